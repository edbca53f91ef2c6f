"""New questions to a finished run, without training: other sets of outsiders, single corruptions, other data.

Everything is taken from the run's folder (settings, models) and its data; answers are written beside it (questions.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedvlm import backbones
from fedvlm.backbones.base import Backbone, in_precision
from fedvlm.config.config import Setup
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data, Extra
from fedvlm.core.records import RoundRecord, Scores
from fedvlm.core.state import Params, State
from fedvlm.core.tasks import CLASSIFICATION
from fedvlm.data.clients import Federation
from fedvlm.data.corruptions import NAMES
from fedvlm.data.pool import Pool, image_pool
from fedvlm.data.source import Source, open_outsiders, open_source
from fedvlm.data.store import SEVERITIES, Progress, data_fingerprint, features
from fedvlm.engines.base import device_of
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError, nearest
from fedvlm.evaluation.views import evaluate
from fedvlm.predict.predictor import private_rows
from fedvlm.predict.questions import VIEWS, Evaluation
from fedvlm.rounds.method import Method, name_of
from fedvlm.training import folder
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.saved import check_state


@dataclass(frozen=True)
class Finished:
    """A run's models on the data that it was trained on."""

    run: RunFolder
    setup: Setup
    pool: Pool
    federation: Federation
    tested: Federation  # the same with as few examples as scoring on test needs
    method: Method
    state: State
    rows: Params  # the private row of each client
    round: int

    @classmethod
    def of(cls, run: RunFolder, setup: Setup, pool: Pool) -> Finished:
        saved = run.load()
        assert saved is not None, "a finished run has a state"
        state, round = saved
        planned = PlannedRun(setup, pool)
        federation, method = planned.federation, planned.method
        check_state(state, method, run.folder / folder.STATE)
        method = replace(method, task=method.task._replace(novel=None))  # base-to-novel has its answer already
        rows = private_rows(run, state, round) if method.newcomer else {}
        federation = replace(federation, data=replace(federation.data, extras={}))
        tested = federation if method.local.adapts else with_tests_only(federation)  # some train before they are scored
        return cls(run, setup, pool, federation, tested, method, state, rows, round)

    def scored(self, federation: Federation, rows: Params) -> RoundRecord:
        """What a run would record of these models on this federation."""
        data = replace(federation.data, rounds=max(1, self.setup.config.rounds))
        engine = Stacked(self.method, data, self.setup.config.chunk, warn=self.run.log, device=device_of(self.setup))
        try:
            if rows and self.round:
                engine.rows.write(np.arange(len(data)), rows, self.round)
            cohort = Cohort(engine, np.arange(federation.scored), self.round, rounds=self.round)
            return evaluate(self.method, federation, cohort, self.state.message(), self.setup.config.personal_split)
        finally:
            engine.close()

    def with_extra(self, name: str, extra: Extra) -> RoundRecord:
        data = replace(self.tested.data, extras={name: extra})
        return self.scored(replace(self.tested, data=data), self.rows)

    def answer(self, kind: str, name: str, asked: str, images: int, scores: dict[str, Scores]) -> Evaluation:
        return Evaluation(
            kind=kind,
            name=name,
            asked=asked,
            images=images,
            scores={f"{measure}@{name}": by_view for measure, by_view in scores.items()},
            identity=self.run.record.identity,
            round=self.round,
            versions=folder.versions(),
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )


def test_rows(data: Data) -> np.ndarray:
    return np.concatenate([np.arange(low, high) for low, high in data.bounds[:, 2:]])


def with_tests_only(federation: Federation) -> Federation:
    data, rows = federation.data, test_rows(federation.data)
    ends = np.cumsum(data.counts("test"))
    starts = np.concatenate([[0], ends[:-1]])
    bounds = np.stack([starts, starts, starts, ends], axis=1)
    kept = replace(data, x=data.x[torch.from_numpy(rows)], y=data.y[torch.from_numpy(rows)], bounds=bounds)
    return replace(federation, data=kept, items=federation.items[rows])


def encoder_of(setup: Setup) -> Backbone:
    return in_precision(backbones.load(setup.config.backbone), setup.config.encode)


def evaluate_outsiders(model: Finished, path: str, progress: Progress | None = None) -> Evaluation:
    """How well the models detect images of no class: auroc and fpr95."""
    source = open_outsiders(path)
    backbone, view = encoder_of(model.setup), model.setup.adapter.view
    x, keys, skipped = features(source, backbone, "skip", progress, view)
    good = [k for k, item in enumerate(source.items) if item.path not in skipped]
    if not good:
        raise FedvlmError(f"outsiders={path}: none of its images can be read")
    found = model.with_extra("outsiders", Extra(x[good]))["detection"]
    measures = {m: {view: scores[m] for view, scores in found.items()} for m in ("auroc", "fpr95")}
    answer = model.answer("outsiders", source.name, path, len(good), measures)
    notes = [f"{len(skipped)} images cannot be read and are left out"] if skipped else []
    return replace(answer, fingerprint=data_fingerprint([keys[k] for k in good], []), notes=notes)


def evaluate_corrupted(model: Finished, kind: str, progress: Progress | None = None) -> Evaluation:
    """The accuracy on the clients' test images under one corruption, as a mean over its five severities: cacc."""
    data, source = model.tested.data, model.pool.source
    test = test_rows(data)
    wanted, place = np.unique(model.tested.items[test], return_inverse=True)
    backbone, view = encoder_of(model.setup), model.setup.adapter.view
    chosen = replace(source, items=tuple(source.items[i] for i in wanted), masks=())
    found = [
        features(chosen, backbone, "refuse", steps(progress, k), view, (kind, k + 1))[0] for k in range(SEVERITIES)
    ]
    versions = torch.stack(found, dim=1)
    x = torch.zeros((len(data.x), *versions.shape[1:]), dtype=versions.dtype)  # only test images are read
    x[torch.from_numpy(test)] = versions[torch.from_numpy(place)]
    record = model.with_extra("corrupted", Extra(x, aligned=True))
    scores = {"cacc": scores_by_view(record, "corrupted")}
    return model.answer("corrupt", kind, kind, len(wanted), scores)


def steps(progress: Progress | None, before: int) -> Progress | None:
    """Progress over all severities, of which so many are done."""
    if progress is None:
        return None
    report = progress
    return lambda done, total: report(before * total + done, SEVERITIES * total)


def other_data(model: Finished, path: str, progress: Progress | None = None) -> Evaluation:
    """The accuracy on other data: of a domain that has a client's name by that client's own model and the shared one, of
    other domains by the shared model, as for a newcomer. Data with these classes or some of them is classified among the
    run's classes; data with others, where the adapter can, among its own by their names (cross-data-set)."""
    config, adapter = model.setup.config, model.setup.adapter
    classes = model.method.task.classes
    source = open_other(path, model.setup, classes)
    crossed = not set(source.classes) <= set(classes)
    if crossed and model.state.task:
        raise FedvlmError(
            f"data={path}: it has other classes than the run, and of these the server trained no class embeddings"
        )
    pool = image_pool(source, encoder_of(model.setup), config.template, config.broken, progress, adapter.view)
    if crossed:
        model = with_classes_of(model, pool)
    federation, rows = as_clients(model, pool)
    record = model.scored(federation, rows)
    scores, clients = scores_by_view(record, "test"), record.get("clients", {})
    if (
        model.method.local.adapts
    ):  # own models that a client trains from its own examples when it is scored: there are none
        scores.pop("personal", None)
        clients = {name: {"shared": views["shared"]} for name, views in clients.items() if "shared" in views}
    answer = model.answer("data", source.name, path, len(pool.source.items), {"acc": scores})
    missing = [c for c in classes if c not in source.classes] if not crossed else []
    notes = [f"{len(pool.skipped)} images cannot be read and are left out"] if pool.skipped else []
    if missing:
        notes.append(
            f"it has {len(source.classes)} of the run's {len(classes)} classes ({', '.join(missing[:5])}"
            f"{', …' if len(missing) > 5 else ''} are missing); its images are classified among all of them"
        )
    if crossed:
        new = sum(c not in classes for c in source.classes)
        notes.append(f"{new} of its {len(source.classes)} classes are not the run's; classified among its own, by name")
    return replace(answer, fingerprint=pool.fingerprint, clients=clients, notes=notes)


def with_classes_of(model: Finished, pool: Pool) -> Finished:
    """The same models for the classes of other data, known by their names in the run's template."""
    other = pool.task
    task = model.method.task._replace(classes=other.classes, text=other.text, phrases=other.phrases)
    return replace(model, method=replace(model.method, task=task))


QUESTIONS: dict[str, Callable[[Finished, str, Progress | None], Evaluation]] = {
    "outsiders": evaluate_outsiders,
    "corrupt": evaluate_corrupted,
    "data": other_data,
}


def open_other(path: str, setup: Setup, classes: Sequence[str]) -> Source:
    """Other data: its folders are named as the run's classes, as in its names=, or, for adapters with an open vocabulary,
    as other classes."""
    config, adapter = setup.config, setup.adapter
    source = open_source(path, config.group)
    if config.names and not set(source.classes) <= set(classes):
        with (
            suppress(FedvlmError) if adapter.open_vocabulary else nullcontext()
        ):  # names= may be of the run's data only
            source = open_source(path, config.group, names=config.names)
    unknown = [c for c in source.classes if c not in classes]
    if unknown and not adapter.open_vocabulary:
        raise FedvlmError(
            f"data={path}: the run knows no class '{unknown[0]}' ({len(unknown)} of {len(source.classes)} are unknown), and "
            f"adapter={name_of(adapter)} has parameters by class; {nearest(unknown[0], classes)}. Name its folders as the "
            "run's classes, and leave other classes out"
        )
    return source


def as_clients(model: Finished, pool: Pool) -> tuple[Federation, Params]:
    """Each domain of other data as a client that only has test images, and the private rows of those clients."""
    items, trained = pool.source.items, model.federation
    homes = [i.client or i.domain for i in items]
    domains = sorted(set(homes))
    owner = np.array([domains.index(home) for home in homes])
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(domains)))
    starts = np.concatenate([[0], ends[:-1]])
    y = torch.tensor([model.method.task.classes.index(items[i].label) for i in order])
    data = Data(
        pool.x[torch.from_numpy(order)],
        y,
        np.stack([starts, starts, starts, ends], axis=1),
        np.arange(len(domains)),
        trained.data.seed,
    )
    able = {trained.names[i]: int(i) for i in trained.seen}
    unseen = tuple(k for k, d in enumerate(domains) if d not in able)
    named = tuple(domains)
    rows = {
        k: torch.stack([v[able[d]] if d in able else model.method.newcomer[k] for d in domains])
        for k, v in model.rows.items()
    }
    return Federation(named, named, data, model.method.task, unseen, order), rows


def scores_by_view(record: RoundRecord, measure: str) -> Scores:
    views: dict[str, Scores | None] = {v: record.get(v) for v in VIEWS}  # type: ignore[misc]
    return {v: scores[measure] for v, scores in views.items() if scores and measure in scores}


def check_askable(run: RunFolder, setup: Setup, asked: Sequence[tuple[str, str]]) -> None:
    """An error where a finished run cannot be asked these questions (kind, what), before anything is encoded."""
    if setup.config.federation:
        raise FedvlmError(f"{run.folder}: its data are at the sites of a federation, and cannot be evaluated from here")
    if setup.adapter.task_type is not CLASSIFICATION:
        raise FedvlmError(
            f"{run.folder} learned {setup.adapter.task_type.description}; `fedvlm evaluate` is for classes"
        )
    if run.record.backbone.name == "embeddings":
        raise FedvlmError(f"{run.folder} was trained on given embeddings, so there are no images to ask about")
    if setup.config.centre == "own":
        raise FedvlmError(f"{run.folder} was trained with centre=own, and new images have no client's mean to take off")
    if not run.done:
        raise FedvlmError(f"{run.folder} is not finished; continue it with `fedvlm resume` before you evaluate it")
    names: dict[tuple[str, str], str] = {}
    for kind, what in asked:
        if kind == "corrupt":
            check_kind(what)
            continue
        other = kind == "data"
        name = (open_other(what, setup, run.record.data.classes) if other else open_outsiders(what)).name
        if names.setdefault((kind, name), what) != what:
            raise FedvlmError(f"{kind}={names[kind, name]},{what}: both are called {name}; rename one of the folders")


def check_kind(name: str) -> None:
    if name not in NAMES:
        raise FedvlmError(f"corrupt={name}: no such corruption; {nearest(name, NAMES)}")
