"""The model card of an export (README.md with front matter, as Hugging Face reads it), made from the run's record alone."""

from __future__ import annotations

import json
import re
from pathlib import PurePath

from fedvlm import backbones
from fedvlm.config import catalogue
from fedvlm.core.records import ExportRecord, RunRecord
from fedvlm.predict import questions
from fedvlm.predict.predictor import far_below
from fedvlm.system.formatting import counted
from fedvlm.system.interrupts import key_words
from fedvlm.system.names import printable
from fedvlm.training.folder import RunFolder

VIEWS = {
    "shared": "the shared model, on clients that trained",
    "personal": "each client's own model, on its own images",
    "newcomer": "the shared model, on clients that nobody trained on",
}
LISTED = 20  # class names in the card; config.json has all


def card(run: RunFolder, about: ExportRecord) -> str:
    record = run.record
    parts = [
        front_matter(record, about),
        f"# {plain(record.method.title or record.method.label)} on {plain(record.data.name)}\n",
        what(record, about),
        "## Use\n\n" + use(about),
        "## Data\n\n" + data(record),
        "## Method and protocol\n\n" + method(record),
        "## Scores\n\n" + scores_text(run, about),
        "## What is private\n\n" + private(record, about),
        "## Limitations\n\n" + limitations(record, about),
        "## Made by\n\n" + command(record, about),
    ]
    return "\n".join(parts)


def plain(value: object) -> str:
    """Text that others chose, without meaning in Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", printable(value, 200))


def name_only(place: str) -> str:
    """The last part of a path: where files lie on somebody's machine is nobody's business."""
    return place if backbones.form_of(place) in ("hub", "bundled", "pixels") else PurePath(place).name or place


def front_matter(record: RunRecord, about: ExportRecord) -> str:
    """YAML; values are written as JSON, which is YAML too."""
    segments = record.data.metric != "accuracy"
    task = "image-segmentation" if segments else "image-classification"
    place = about.backbone.name
    entries: dict[str, object] = {
        "library_name": "fedvlm",
        "pipeline_tag": task,
        "tags": ["federated-learning", "vision-language", record.method.name],
        "metrics": [record.data.metric],
    }
    if backbones.form_of(place) == "hub":
        entries["base_model"] = place
    results = [
        {"type": record.data.metric, "value": round(value, 6), "name": f"{view}, test"}
        for view, value in about.scores.items()
        if value is not None
    ]
    dataset = {"name": record.data.name, "type": record.data.name}
    index = {"name": record.method.label, "results": [{"task": {"type": task}, "dataset": dataset, "metrics": results}]}
    entries["model-index"] = [index] if results else []
    return "\n".join(["---", *(f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in entries.items()), "---", ""])


def what(record: RunRecord, about: ExportRecord) -> str:
    whose = "The shared model" if about.whose == "shared" else f"The own model of client {plain(about.whose)}"
    idea = f" The method: {plain(record.method.idea)}." if record.method.idea else ""
    return (
        f"{whose} of a federated run: adapter `{plain(about.adapter.name)}` on the frozen backbone "
        f"`{plain(name_only(about.backbone.name))}` (fingerprint {plain(about.backbone.fingerprint)}).{idea}\n"
    )


def use(about: ExportRecord) -> str:
    known = backbones.form_of(about.backbone.name) in ("hub", "bundled", "pixels")
    where = "" if known else (
        "\nThe backbone is not at a public place: unless this folder holds `backbone/`, give the same weights, "
        '`fedvlm.load("FOLDER", backbone="PLACE")`; their fingerprint is compared.\n'
    )  # fmt: skip
    return f'```python\nimport fedvlm\n\nfedvlm.load("FOLDER").predict("image.jpg")\n```\n{where}'


def data(record: RunRecord) -> str:
    found, classes = record.data, [plain(c) for c in record.data.classes]
    more = f", … ({len(classes)} in all; config.json names them)" if len(classes) > LISTED else ""
    split = record.config.get("split")
    shares = "/".join(f"{s:g}" for s in split if isinstance(s, int | float)) if isinstance(split, list) else ""
    return (
        f"{plain(found.name)}: {found.images:,} images, {len(found.domains)} domains, {len(record.clients)} clients "
        f"(partition={plain(record.config.get('partition', 'auto'))}), fingerprint {plain(found.fingerprint)}. Split "
        f"train/val/test {shares}, by the seed. The images are not included.\n\n"
        f"Classes: {', '.join(classes[:LISTED])}{more}\n"
    )


def method(record: RunRecord) -> str:
    title = f"{plain(record.method.title)} {plain(record.method.paper)}".strip() or plain(record.method.label)
    held = ", ".join(map(plain, record.unseen)) or "nobody"
    parts = f"adapter={record.adapter.name}, local={record.local.name}, merge={record.merge.name}"
    rounds = record.result.last["round"] if record.result else record.rounds
    protocol = f"Protocol: {plain(record.protocol)}; " if record.protocol != "one" else "Clients "
    return (
        f"{title} ({plain(parts)}). {protocol}held out: {held}; {counted(rounds, 'round')}, the last one; "
        f"one run with seed {record.seed}.\n"
    )


def scores_text(run: RunFolder, about: ExportRecord) -> str:
    record = run.record
    rows = [f"| {VIEWS[view]} | {percent_text(value)} |" for view, value in about.scores.items()]
    lines = [f"{plain(record.data.metric)} on the test split, in %, mean over clients (seed {record.seed}):", ""]
    lines += ["| model | test |", "|---|---|", *rows, ""]
    asked = [(m, s) for e in questions.read_answers(run.folder) for m, s in e.scores.items()]
    if asked:
        lines += [
            "Asked afterwards (`fedvlm evaluate`):",
            "",
            "| measure | shared | personal | newcomer |",
            "|---|---|---|---|",
        ]
        lines += [f"| {plain(m)} | {' | '.join(percent_text(s.get(view)) for view in VIEWS)} |" for m, s in asked]
        lines.append("")
    return "\n".join(lines)


def percent_text(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def private(record: RunRecord, about: ExportRecord) -> str:
    shared = about.whose == "shared"
    lines = [
        "- Not included: the images, the clients' private parameters and what was computed on single images."
        if shared
        else f"- Included: private parameters of client {plain(about.whose)}, which never left it in training. Pass this "
        "folder on only with its consent. Not included: the images, and other clients' private parameters.",
        f"- In training, clients sent {plain(record.reveals)}." if record.reveals else "",
        f"- Differential privacy: {plain(record.result.privacy.line)}."
        if record.result and record.result.privacy
        else "- Trained without differential privacy: the parameters may reveal something about the training images.",
    ]
    return "\n".join(filter(None, lines)) + "\n"


def limitations(record: RunRecord, about: ExportRecord) -> str:
    doubt = far_below(about.scores) if about.whose == "shared" else ""
    lines = [
        f"- {doubt[0].upper()}{doubt[1:]}." if doubt else "",
        f"- It knows {len(about.classes)} classes, and gives every image one of them.",
        "- The scores are of one run on one split; images from elsewhere can be harder.",
        "- The backbone mini-clip is small and made for trying things out."
        if about.backbone.name == backbones.BUNDLED
        else "",
    ]
    return "\n".join(filter(None, lines)) + "\n"


def command(record: RunRecord, about: ExportRecord) -> str:
    hidden, paths = {"seeds", *catalogue.for_purpose("engine", "output")}, catalogue.with_trait("path")
    given = {k: name_only(str(v)) if k in paths else v for k, v in record.given.items() if k not in hidden}
    words = key_words(given)
    words += [] if "seed" in given else [f"seed={record.seed}"]
    recipe = name_only(record.method.path) if record.method.path else record.method.name
    client = "" if about.whose == "shared" else f" --client {printable(about.whose)}"
    versions = ", ".join(f"{k} {v}" for k, v in about.versions.items() if v)
    lines = [f"fedvlm run {recipe} {' '.join(words)}", f"fedvlm export RUN{client}"]
    shown = "\n".join(printable(line).replace("`", "'") for line in lines)
    return f"```\n{shown}\n```\n\nRun {plain(record.identity)}, {plain(versions)}.\n"
