"""The Python API; the command line is a thin layer over it.

Keys are those of the command line (`fedvlm.describe("fedot")` lists them). `data` may also be arrays, a torch or Hugging
Face dataset (see `fedvlm.dataset`), `backbone` a torch module or a function from images to embeddings.
"""

from __future__ import annotations

import fnmatch
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, overload

from fedvlm.config import catalogue, recipe, trust
from fedvlm.config.config import Setup, resolve
from fedvlm.config.keys import Key
from fedvlm.core.records import RoundRecord, RunRecord, Select, Value
from fedvlm.errors import FedvlmError
from fedvlm.system import files
from fedvlm.system.interrupts import stoppable
from fedvlm.system.machine import runs_home
from fedvlm.system.timing import timed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from fedvlm.backbones.base import Backbone
    from fedvlm.data.pool import Pool, Pools
    from fedvlm.predict.predictor import Picture, Predictor
    from fedvlm.predict.questions import Evaluation
    from fedvlm.system.table import Table
    from fedvlm.training.folder import RunFolder
    from fedvlm.training.planned_run import PlannedRun


def run(method: str, **keys: object) -> Run:
    """Runs one method and returns the finished run; a run that is already finished is not repeated.

    `method` is a name of `fedvlm.methods()` or a recipe file. Several runs (seeds=, leave-one-domain-out): use `bench`."""
    setup = chosen(method, prepared(keys))
    if setup.config.federation:
        return federated(setup)
    planned = plan([setup], new_pools())
    if len(planned) != 1:
        raise FedvlmError(f"run: these keys stand for {len(planned)} runs; use fedvlm.bench([{method!r}], …)")
    return execute(planned, setup.config.jobs)[0]


def chosen(method: str, given: Mapping[str, object]) -> Setup:
    """Resolve the keys to a Setup and mark all that it names as trusted."""
    setup = resolve(method, given)
    with timed("import"):  # it asks for the kind of backbone, which takes torch
        trust.remember(setup)
    return setup


def methods(pattern: str = "*") -> list[str]:
    """The names of built-in methods that match a pattern such as "fed*"."""
    return [name for name in recipe.recipe_names() if fnmatch.fnmatch(name, pattern)]


def describe(method: str, **keys: object) -> Description:
    """A method with every key, its value and where that comes from."""
    setup = resolve(method, prepared(keys))
    homes = {"run": setup.settings()} | {a: dict(setup.parts[a].settings) for a in ("adapter", "local", "merge")}
    known = {"run": catalogue.load().run} | {
        a: catalogue.keys(a, setup.parts[a].name) for a in ("adapter", "local", "merge")
    }
    rows = []
    for home, values in homes.items():
        for key in known[home]:
            origin = setup.origins.get(f"{home}.{key.name}", "")
            rows.append(KeyRow(home, key, values[key.name], origin))
    return Description(setup, rows)


def runs(*paths: str | Path, trust: bool = False) -> Runs:
    """The runs in or below these folders; `trust`: see `Run`."""
    from fedvlm.training.folder import find_runs

    return Runs([Run(found.folder, trust) for found in find_runs([str(p) for p in paths] or [str(runs_home())])])


def load(folder: str | Path, backbone: object = None, trust: bool = False) -> Predictor:
    """What `fedvlm export` wrote, ready to predict; `backbone` replaces the recorded one (the weights must be the same).

    A folder from others runs no code, contacts nobody and reads nothing else, unless `trust` is true; the error says what
    it would do."""
    from fedvlm.predict.export import folder as exported

    return exported.load_export(folder, encoder(backbone), trust)


class Run:
    """A run folder as an object.

    A run from others runs no code, contacts nobody and reads nothing outside its folder when it predicts, is exported or
    goes on, unless `trust` is true; the error says what it would do. What you ran on this machine needs no trust."""

    def __init__(self, folder: RunFolder | str | Path, trust: bool = False):
        from fedvlm.training.folder import RunFolder

        self.files = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder), trust)

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def record(self) -> RunRecord:
        """What was decided, and the result."""
        return self.files.record

    @property
    def rounds(self) -> list[RoundRecord]:
        return self.files.rounds()

    @property
    def done(self) -> bool:
        return self.files.done

    def table(self, select: Select = "last") -> Table:
        return Runs([self]).table(select)

    def figure(self, path: str | Path | None = None) -> Figure:
        return Runs([self]).figure(path)

    def predictor(self, client: str = "", backbone: object = None) -> Predictor:
        """The shared model or, with `client`, that client's own, ready to predict."""
        from fedvlm.predict.predictor import from_run

        return from_run(self.files, client, encoder(backbone))

    def predict(self, images: Picture | Sequence[Picture], client: str = "") -> list[tuple[str, float]]:
        """(class, probability) for each image or path; a single one gives a list of one."""
        return self.predictor(client).predict(images)

    def parameters(self, client: str = "") -> dict[str, Tensor]:
        """The trained parameters by name: shared ones and, with `client`, that client's private ones."""
        from fedvlm.core.copies import adapter_params
        from fedvlm.predict.predictor import private_row

        saved = self.files.load()
        if saved is None:
            raise FedvlmError(f"{self.folder} has no saved state yet")
        state, round = saved
        if not client:
            return dict(state.shared)
        row = private_row(self.files, state, client, round)
        return state.shared | {k: v[0] for k, v in adapter_params(row).items()}

    def export(
        self,
        folder: str | Path,
        client: str = "",
        backbone: object = None,
        with_backbone: bool = False,
        onnx: bool = False,
    ) -> list[str]:
        """A folder to deploy from; returns the names of its files. `with_backbone` copies the backbone's files into it,
        `onnx` writes image encoder and adapter as one ONNX file."""
        from fedvlm.predict.export.folder import Extras, export

        extras = Extras(with_backbone, onnx)
        return export(self.files, Path(folder), client, encoder(backbone), extras)

    def evaluate(
        self, outsiders: Sequence[str] = (), corrupt: Sequence[str] = (), data: Sequence[str] = ()
    ) -> list[Evaluation]:
        """New questions to a finished run, without training; the answers are also written beside it.

        outsiders: folders of images of no class (auroc, fpr95). corrupt: corruptions of its clients' test images, such as
        fog (cacc, the mean of five severities). data: other data with its classes, or some of them (acc)."""
        return ask(self, outsiders, corrupt, data)

    @property
    def evaluations(self) -> list[Evaluation]:
        """What was asked of it so far."""
        from fedvlm.predict import questions

        return questions.read_answers(self.folder)

    def resume(self) -> Run:
        """Continue where the run stopped."""
        return resume([self])[0]

    def __repr__(self) -> str:
        record = self.record
        state = "finished" if record.result else "not finished"
        return f"Run({record.method.label} on {record.data.name}, seed {record.seed}, {state}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        body = self.table()._repr_html_() if self.done else ""
        return f"<p>{html.escape(repr(self))}</p>{body}"


class Runs(Sequence[Run]):
    """Several runs: a table, a figure, a page."""

    def __init__(self, members: Sequence[Run], notes: Sequence[str] = ()):
        self.members = list(members)
        self.notes = list(notes)  # what a table says of them, beside what their records say

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Run | Runs:
        return Runs(self.members[index], self.notes) if isinstance(index, slice) else self.members[index]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.members)

    @property
    def files(self) -> list[RunFolder]:
        return [r.files for r in self.members]

    def table(self, select: Select = "last", fair: bool = False) -> Table:
        """One row per method: mean ± standard deviation over seeds. `last` round, or `selected` on validation. fair: an
        error where rows follow different protocols, which otherwise a note says."""
        from fedvlm.report.tables import summarise

        return with_notes(summarise(self.files, select, fair=fair), self.notes)

    def tables(self, select: Select = "last", fair: bool = False) -> dict[str, Table]:
        """A table as `table` makes it for each data set and backbone."""
        from fedvlm.report.blocks import tables

        return {name: with_notes(table, self.notes) for name, table in tables(self.files, select, fair).items()}

    def figure(self, path: str | Path | None = None) -> Figure:
        """Drawn as a matplotlib figure, and written to a file where a path is given."""
        from fedvlm.report.figures import drawn

        made = drawn(self.files)
        if path:
            with files.writing(path):
                made.savefig(path)
        return made

    def report(
        self, path: str | Path = "report.html", details: bool = False, images: bool = False, tsne: bool = False
    ) -> Path:
        """One self-contained page. details: also what the models said of test images. images: also some of these images,
        which are private data. tsne: of the details, image features by t-SNE too (needs scikit-learn)."""
        from fedvlm.report.page import PageOptions, page

        page(self.files, Path(path), PageOptions(details=details, images=images, tsne=tsne))
        return Path(path)

    def __repr__(self) -> str:
        if not any(r.done for r in self):
            return f"Runs({len(self)})\nnone is finished"
        tables = self.tables()
        titled = [f"{name}\n{table}" if len(tables) > 1 else str(table) for name, table in tables.items()]
        return f"Runs({len(self)})\n" + "\n\n".join(titled)

    def _repr_html_(self) -> str:
        if not any(r.done for r in self):
            return html.escape(repr(self))
        tables = self.tables()
        titles = [f"<p>{html.escape(name)}</p>" if len(tables) > 1 else "" for name in tables]
        return "\n".join(title + table._repr_html_() for title, table in zip(titles, tables.values(), strict=True))


def with_notes(table: Table, notes: list[str]) -> Table:
    return replace(table, notes=[*table.notes, *notes])


class KeyRow(NamedTuple):
    home: str  # run, adapter, local, merge
    key: Key
    value: Value
    origin: str  # "" is the default


@dataclass(frozen=True)
class Description:
    """A method with its keys."""

    setup: Setup
    keys: list[KeyRow]

    def __str__(self) -> str:
        about = self.setup.method
        lines = [f"{about.title} {about.paper}".strip(), about.idea]
        for row in self.keys:
            lines.append(
                f"  {row.home + '.' + row.key.name:28} {shown(row.value):20} {row.origin or 'default':24} {row.key.help}"
            )
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = [(r.home, r.key.name, shown(r.value), r.origin or "default", r.key.help) for r in self.keys]
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in cells)
        about = self.setup.method
        head = "".join(f"<th>{h}</th>" for h in ("part", "key", "value", "from", "meaning"))
        title = html.escape(f"{about.title} {about.paper}. {about.idea}")
        return f"<p>{title}</p><table><tr>{head}</tr>{rows}</table>"

    def to_yaml(self) -> str:
        """A complete recipe: every key with its value, where it comes from and what it does, as comments."""
        about, chosen = self.setup.method, self.setup.parts
        texts = {"title": about.title, "paper": about.paper, "idea": about.idea}
        lines = [f"{key}: {quoted(text)}" for key, text in texts.items() if text]
        lines += [f"{axis}: {quoted(chosen[axis].name)}" for axis in ("adapter", "local", "merge")]
        lines.append("settings:")
        done: set[str] = set()
        for row in self.keys:
            if row.key.name in done or row.key.name in ("out", "values"):
                continue
            done.add(row.key.name)
            comment = "; ".join(x for x in (row.origin and f"from {row.origin}", row.key.help) if x)
            lines.append(f"  {row.key.name}: {yaml_value(row.value)}" + (f"  # {comment}" if comment else ""))
        return "\n".join(lines) + "\n"


def shown(value: Value) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def yaml_value(value: Value) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(yaml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return str(float(value)) if "e" not in repr(value) or "." in repr(value) else repr(value).replace("e", ".0e")
    return json.dumps(value, ensure_ascii=False)


def prepared(keys: dict[str, object]) -> dict[str, object]:
    """Keys as plain data: objects given for data or backbone are registered and replaced by a name."""
    given = {k: str(v) if isinstance(v, Path) else v for k, v in keys.items()}
    if "data" in given and not isinstance(given["data"], str):
        from fedvlm.data.formats.arrays import stored

        made = stored(given["data"])
        given["data"] = str(made.path)
        given |= {"group": made.group} if made.group and "group" not in given else {}
    if "backbone" in given and not isinstance(given["backbone"], str):
        from fedvlm.backbones.objects import register

        given["backbone"] = register(given["backbone"])
    return given


def encoder(backbone: object) -> Backbone | None:
    """A backbone from a name or an object; None where nothing was given."""
    if backbone is None:
        return None
    from fedvlm import backbones

    name = str(prepared({"backbone": backbone})["backbone"])
    trust.remember_backbone(name)
    return backbones.load(name)


def new_pools() -> Pools:
    with timed("import"):
        from fedvlm.data.pool import Pools

    return Pools()


def plan(setups: list[Setup], pools: Pools) -> list[PlannedRun]:
    """Every single run of these setups, prepared."""
    from fedvlm.training import planning  # imports torch

    return planning.plan(setups, pools)


def execute(planned: Sequence[PlannedRun], at_once: int) -> Runs:
    """Runs them with one progress bar over all rounds. Ctrl-C ends those under way, and no other starts."""
    if not planned:
        return Runs([])
    from fedvlm.core import records
    from fedvlm.system import console
    from fedvlm.training.folder import RunFolder
    from fedvlm.training.processes import run_all

    known = [p.folder for p in planned if (p.folder / "run.json").exists() and RunFolder(p.folder).done]
    if known:
        text = f"{known[0]} is" if len(planned) == 1 else f"{len(known)} of {len(planned)} runs are"
        console.note(f"{text} already finished and not repeated")
    sizes = [max(1, p.setup.config.rounds) for p in planned]
    done = [0] * len(planned)
    title = planned[0].setup.method.label if len(planned) == 1 else f"{len(planned)} runs"
    with stoppable() as check, console.progress(title, sum(sizes)) as update:

        def report(i: int, record: RoundRecord | None, error: str) -> None:
            check()
            done[i] = sizes[i] if record is None else record["round"]
            setup = planned[i].setup
            what = "" if len(planned) == 1 else f"{setup.method.label} {'+'.join(setup.config.unseen)} "
            if record is not None:
                update(sum(done), what + records.words(record))

        return Runs([Run(folder) for folder in run_all(planned, at_once, report)])


def federated(setup: Setup, folder: Path | None = None) -> Run:
    """Runs it at the sites of a federation (federation=), with a progress bar; returns the run as it was fetched."""
    from fedvlm.core import records
    from fedvlm.federation import admin
    from fedvlm.system import console

    with console.progress(setup.method.label, setup.config.rounds) as update:
        return Run(admin.run_on_sites(setup, lambda record: update(record["round"], records.words(record)), folder))


def resume(found: Sequence[Run]) -> Runs:
    """Continue those that are not finished, from what their folders hold."""
    from fedvlm.system import console
    from fedvlm.training.planned_run import PlannedRun

    pools = new_pools()
    waiting = [r for r in found if not r.done]
    for one in waiting:
        setup = one.files.setup()
        if setup.config.federation:
            federated(setup, one.folder)
            continue
        saved = one.files.load()
        console.note(f"{one.folder.name}: from round {saved[1] + 1 if saved else 0}")
        execute([PlannedRun(setup, data_of(one.files, setup, pools), one.folder)], 1)
    if not waiting:
        console.note("nothing to resume: finished")
    return Runs(found)


def ask(run: Run, outsiders: Sequence[str], corrupt: Sequence[str], data: Sequence[str]) -> list[Evaluation]:
    """Answers each question and writes the answer, with a progress bar for each."""
    from fedvlm.predict import finished, questions
    from fedvlm.system import console

    setup = run.files.setup()
    given = zip(finished.QUESTIONS, (outsiders, corrupt, data), strict=True)
    asked = [(kind, what) for kind, each in given for what in listed(each)]
    if not asked:
        raise FedvlmError("evaluate: ask something, such as outsiders=FOLDER, corrupt=fog,snow or data=OTHER")
    finished.check_askable(run.files, setup, asked)
    model = finished.Finished.of(run.files, setup, data_of(run.files, setup, new_pools()))
    found = []
    for kind, what in asked:
        with console.progress(f"{kind}={what}") as update:
            found.append(finished.QUESTIONS[kind](model, what, lambda done, total: update(done, total=total)))
        questions.write_answers(run.folder, found[-1])
    return found


def listed(given: str | Path | Sequence[str]) -> list[str]:
    return [str(given)] if isinstance(given, str | Path) else [str(g) for g in given]


def data_of(run: RunFolder, setup: Setup, pools: Pools) -> Pool:
    """The data of a run, or an error where they or the backbone are no longer what it was trained on; the backbone is looked
    at before it encodes."""
    from fedvlm.predict.predictor import check_fingerprint

    record, backbone = run.record, pools.outline(setup).backbone
    if backbone is not None:
        check_fingerprint(backbone, record.backbone.fingerprint, str(run.folder))
    pool = pools.encode(setup)
    if pool.fingerprint != record.data.fingerprint:
        raise FedvlmError(
            f"{run.folder}: data={setup.config.data} is not what it was trained on; start a new run with it"
        )
    return pool
