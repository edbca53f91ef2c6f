"""Answers to questions that were asked of a finished run (`fedvlm evaluate`): evaluations/*.json in its folder, one file
for each question. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedvlm.core.records import ClientScores, Number, Scores, build, parsed, read_text
from fedvlm.errors import FedvlmError
from fedvlm.system import files
from fedvlm.system.names import file_name
from fedvlm.system.table import Table

FOLDER = "evaluations"
FORMAT = 1
VIEWS = ("shared", "personal", "newcomer")  # as in a round's record
COLUMNS = ("question", *VIEWS, "images")
MEASURES = {
    "acc": "acc: accuracy",
    "cacc": "cacc: accuracy on corrupted images",
    "auroc": "auroc: how well outsiders are separated from known images",
    "fpr95": "fpr95: outsiders taken for known images where 95 % of the known images are accepted (lower is better)",
}  # all in %
MODELS = (
    "all in %. shared and personal: the shared model and the clients' own models on the clients that trained; newcomer: the "
    "shared model on held-out clients"
)


@dataclass(frozen=True)
class Evaluation:
    """An answer; `scores` and `clients` in the words of a round's record."""

    kind: str  # outsiders, corrupt or data
    name: str  # as measures are called: auroc@NAME, cacc@NAME, acc@NAME
    asked: str  # what was given: a path, or a corruption
    images: int
    scores: dict[str, Scores]  # measure@NAME → view → its value on test
    identity: str  # of the run
    round: int
    fingerprint: str = ""  # of the images; "" where they are the run's own
    clients: dict[str, ClientScores] = field(default_factory=dict)  # of data=: by domain
    notes: list[str] = field(default_factory=list)  # what whoever reads the numbers should know
    versions: dict[str, str] = field(default_factory=dict)
    started: str = ""
    format: int = FORMAT

    @property
    def file(self) -> str:
        return f"{file_name(f'{self.kind}-{self.name}')}.json"


def write_answers(run: Path, found: Evaluation) -> Path:
    path = run / FOLDER / found.file
    files.write(path, json.dumps(dataclasses.asdict(found), indent=1))
    return path


def read_answers(run: Path) -> list[Evaluation]:
    """All answers beside a run, in the order of their files' names."""
    return [_read(path) for path in sorted((run / FOLDER).glob("*.json"))]


def _read(path: Path) -> Evaluation:
    try:
        raw = parsed(read_text(path))
        if raw.get("format") != FORMAT:
            raise ValueError(f"format {raw.get('format')}, and this version of fedvlm reads {FORMAT}")
        return build(Evaluation, raw)
    except (OSError, ValueError) as error:
        raise FedvlmError(f"{path} is damaged or of another version ({error}); ask again, or remove it") from error


def answer(run: Path, measure: str, view: str = "personal") -> Number:
    """The value of a measure such as auroc@textures; None if this was not evaluated."""
    found = [e.scores[measure] for e in read_answers(run) if measure in e.scores]
    return found[0].get(view) if found else None


def answers_table(found: Sequence[Evaluation]) -> Table:
    """A row for each measure, in percent."""
    rows = [
        {"question": measure, "images": f"{e.images:,}"}
        | {view: "" if (value := scores.get(view)) is None else f"{100 * value:.1f}" for view in VIEWS}
        for e in found
        for measure, scores in e.scores.items()
    ]
    notes = [f"{e.name}: {note}" for e in found for note in e.notes]
    asked = {measure.partition("@")[0] for e in found for measure in e.scores}
    notes += [f"{', '.join(text for name, text in MEASURES.items() if name in asked)}; {MODELS}"] if found else []
    return Table(list(COLUMNS), rows, notes=notes)
