"""The records of a run, typed: `RunRecord` is run.json, `RoundRecord` a line of rounds.jsonl. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict, TypeVar, cast

from fedvlm.core.client_names import compact, expanded, summarised
from fedvlm.errors import FedvlmError

FORMAT = 2  # of run.json; 1 had no number and did not hold the code of users' own parts
EXPORT_FORMAT = 2  # of config.json in an exported folder
LARGEST = 64 << 20  # bytes of a record; a larger file is refused before it is read

Number = float | None
Value = int | float | str | bool | None | list["Value"]  # of a setting
Settings = dict[str, Value]
Scores = dict[str, Number]
Select = Literal["last", "selected"]
MEASURES = ("local", "base", "novel", "hm")  # of a base-to-novel run (evaluation/novel.py)


class ClientScores(TypedDict, total=False):
    """One client's scores by view, then by split."""

    shared: Scores
    personal: Scores


UPDATE = "update"  # of all methods with a shared model, among `effects`
UPDATE_MEANING = "how far the server moved the shared parameters in the round, relative to their norm"


class RoundRecord(TypedDict, total=False):
    """A round. Merges add notes of their own (numbers, words, or numbers by client) under further names."""

    round: int
    seconds: float
    void: str  # why the round changed nothing
    unscored: str  # why the round has no scores
    missing: list[str]  # clients that are not in the scores; of more than 1,000, ranges (client_names.py)
    offences: dict[str, str]  # clients whose answers were refused, and why
    quarantined: list[str]  # clients that are no longer asked, after offences in three rounds
    late: list[str]  # clients that did not answer in time
    bounded: dict[str, float]  # clients whose update was shortened (bound=): its length, in medians of the round
    bytes_down: int
    bytes_up: int
    score_bytes_down: int
    score_bytes_up: int
    asked: int
    answered: int
    loss: float
    stage: str
    effects: dict[str, float]  # what the mechanisms of the local rule (median over clients) and the merge did
    cosine: float
    gap_variance: float
    summaries: dict[
        str, dict[str, float]
    ]  # of more than 1,000 clients' weights, gaps, …: how many, least, median, most
    weights: dict[str, float]
    gaps: dict[str, float]
    shared: Scores
    personal: Scores
    newcomer: Scores
    clients: dict[str, ClientScores]
    metrics: dict[str, dict[str, Scores]]  # of metrics=: metric → view → split
    detection: dict[str, Scores]
    base_to_novel: dict[str, Scores]
    G: Number
    P: Number
    acc: Number
    cacc: Number
    auroc: Number
    fpr95: Number
    local: Number
    base: Number
    novel: Number
    hm: Number
    base_macro: Number
    novel_macro: Number
    hm_macro: Number
    condition: dict[str, float]
    epsilon: float  # dp=: spent so far, for whoever sees the models of all rounds
    local_epsilon: float  # dp=: spent so far by the clients' uploads, where they are noisy
    delta: float
    clip: float  # dp=client: the norm to which updates were clipped


def value_of(record: RoundRecord, name: str) -> Number:
    """A number at the top level of a round's record or among its effects; None where it was not recorded."""
    entries: Mapping[str, object] = {**record.get("effects", {}), **record}
    found = entries.get(name)
    return found if isinstance(found, int | float) else None


@dataclass(frozen=True)
class PartRecord:
    """An adapter, local rule, merge or metric: all that is needed to build it again."""

    name: str  # as the user chose it
    settings: Settings = field(default_factory=dict)
    code: str = ""  # the user's own: its file or module inside the folder code/; "" for a built-in part
    digest: str = ""  # of that code


@dataclass(frozen=True)
class MetricRecord(PartRecord):
    percent: bool = True  # tables show 100 × the value
    lower_is_better: bool = False


@dataclass(frozen=True)
class MethodRecord:
    name: str
    title: str = ""
    paper: str = ""
    idea: str = ""
    on: str = ""  # the network preset it was put on
    path: str = ""  # of the user's own recipe, where it lay

    @property
    def label(self) -> str:
        return f"{self.name} on={self.on}" if self.on else self.name


@dataclass(frozen=True)
class DataRecord:
    name: str
    fingerprint: str
    metric: str
    images: int
    domains: list[str]
    classes: list[str]
    novel: list[str] = field(default_factory=list)
    nouns: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # file → why it was left out
    split: list[int] = field(default_factory=list)  # train, val and test images, where the data come with their split


@dataclass(frozen=True)
class BackboneRecord:
    name: str
    fingerprint: str
    dim: int
    scale: float
    view: str = ""  # of images, as the adapter got them: "embedding" where it asked for raw means unit vectors


@dataclass(frozen=True)
class PrivacyRecord:
    """What a run spent (dp=). The scores that clients report for evaluation are not covered."""

    level: str  # client or example: whose presence is hidden
    epsilon: float  # for whoever sees the models of all rounds
    delta: float
    local_epsilon: Number  # for whoever sees a client's uploads, too; None: not limited, the server adds the noise
    noise: float  # standard deviation, in units of the clipping norm
    clip: float  # the clipping norm; the first one, if it is adapted
    clip_quantile: float
    noise_at: str  # server or client
    sampling: str  # of a round's clients: all, fixed or poisson
    neighbour: str  # what may happen to one client (example): added or removed, replaced, zeroed out

    @property
    def line(self) -> str:
        cohorts = {
            "all": "all clients in every round",
            "fixed": "cohorts of a fixed size",
            "poisson": "Poisson cohorts",
        }
        known = [f"{self.level} level", f"noise at the {self.noise_at}"]
        known += [cohorts[self.sampling], f"one {self.level} {self.neighbour}"]
        uploads = self.level == "client" and self.local_epsilon is not None
        local = f" (of a client's uploads: {self.local_epsilon:.3g})" if uploads else ""
        return (
            f"ε = {self.epsilon:.3g}{local}, δ = {self.delta:.2g} ({', '.join(known)}); reported scores are not covered"
        )


@dataclass(frozen=True)
class Result:
    last: RoundRecord
    selected: RoundRecord  # chosen on validation
    parameters: dict[str, int]
    bytes_down: int
    bytes_up: int
    seconds: float
    unseen: list[str]
    gap_variance: Number = None  # mean over the second half of the rounds
    void: int = 0  # rounds that left the shared model as it was
    bounded: int = 0  # rounds in which an update was shortened (bound=)
    quarantined: list[str] = field(default_factory=list)  # clients that offended and were no longer asked
    privacy: PrivacyRecord | None = None  # dp=
    phases: dict[str, float] = field(default_factory=dict)  # seconds by phase, since its process began (timing.py)

    def at(self, select: Select) -> RoundRecord:
        return self.last if select == "last" else self.selected


@dataclass(frozen=True)
class RunRecord:
    identity: str  # two runs with the same identity would give the same numbers
    method: MethodRecord
    adapter: PartRecord
    local: PartRecord
    merge: PartRecord
    config: Settings  # every key of the run itself, resolved
    given: Settings  # what the user asked for
    data: DataRecord
    backbone: BackboneRecord
    engine: PartRecord = field(default_factory=lambda: PartRecord("stacked"))
    metrics: list[MetricRecord] = field(default_factory=list)
    published: dict[str, float | str] = field(default_factory=dict)  # the paper's numbers for this data, if any
    reveals: str = ""  # what clients send of private data beside parameters and numbers
    versions: dict[str, str] = field(default_factory=dict)
    # with what each party computed ("server": the process that plays the rounds): a further entry where it changed
    processors: dict[str, list[str]] = field(default_factory=dict)
    started: str = ""
    clients: list[str] = field(default_factory=list)
    homes: dict[str, str] = field(
        default_factory=dict
    )  # client → domain; of many clients, those that are not alone in one
    result: Result | None = None
    format: int = FORMAT

    @property
    def seed(self) -> int:
        return cast(int, self.config["seed"])

    @property
    def rounds(self) -> int:
        return cast(int, self.config["rounds"])

    @property
    def unseen(self) -> list[str]:
        return cast(list[str], self.config["unseen"])

    @property
    def protocol(self) -> str:
        return str(self.config["protocol"])

    @property
    def finished(self) -> Result:
        if self.result is None:
            raise FedvlmError(f"run {self.identity} is not finished; continue it with `fedvlm resume`")
        return self.result

    def to_json(self) -> str:
        short = dataclasses.replace(self, clients=compact(self.clients))
        if short.result:
            last, selected = (cast(RoundRecord, summarised(r)) for r in (short.result.last, short.result.selected))
            short = dataclasses.replace(short, result=dataclasses.replace(short.result, last=last, selected=selected))
        return json.dumps(dataclasses.asdict(short), indent=1)

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Raises ValueError with a reason where the text is no record."""
        raw = parsed(text)
        if raw.get("format") != FORMAT:
            raise ValueError(f"format {raw.get('format')}, and this version of fedvlm reads {FORMAT}")
        for key in ("engine", "metrics", "result"):  # always written, although they have defaults
            if key not in raw:
                raise ValueError(f"an entry is missing ({key})")
        found = build(cls, raw)
        found = dataclasses.replace(found, clients=expanded(found.clients))
        for key, hint in (("seed", int), ("rounds", int), ("unseen", list[str]), ("protocol", str)):
            _value(hint, found.config.get(key), f"config.{key}")
        for metric in found.metrics:
            if {"/", "\\", "\0"} & set(metric.name):  # it names a folder in code/
                raise ValueError(f"a metric is called {metric.name!r:.80}")
        return found


@dataclass(frozen=True)
class ExportRecord:
    """config.json of an exported folder: the adapter, and all that it knows of the task."""

    adapter: PartRecord
    classes: list[str]
    nouns: list[str]
    phrases: list[str]
    dim: int
    scale: float
    backbone: BackboneRecord
    whose: str  # "shared", or a client's name
    method: MethodRecord
    identity: str  # of the run
    versions: dict[str, str]
    scores: Scores = field(default_factory=dict)  # of the run on its clients' test images, by view
    format: int = EXPORT_FORMAT

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ExportRecord:
        """Raises ValueError with a reason where the text is no such record."""
        raw = parsed(text)
        if raw.get("format") != EXPORT_FORMAT:
            raise ValueError(f"format {raw.get('format')}, and this version of fedvlm reads {EXPORT_FORMAT}")
        found = build(cls, raw)
        if found.dim < 0 or not 0 < found.scale < math.inf or not found.classes:
            raise ValueError(f"dim={found.dim}, scale={found.scale}, {len(found.classes)} classes")
        return found


def read_text(path: Path) -> str:
    """The text of a record that others may have written; FileNotFoundError where it is no plain file, ValueError where it
    is too large."""
    if not path.is_file():
        raise FileNotFoundError(path)
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
    return data.decode("utf-8")


def parsed(text: str) -> dict[str, object]:
    """A JSON object; ValueError for anything else."""
    try:
        raw = json.loads(text)
    except RecursionError:
        raise ValueError("too many brackets inside each other") from None
    if not isinstance(raw, dict):
        raise ValueError("not a mapping")
    return raw


Record = TypeVar("Record")


def build(kind: type[Record], raw: object, where: str = "") -> Record:
    """A dataclass from plain data; ValueError names an entry that is missing, unknown or of another type."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where.removesuffix('.')} is not a mapping")
    hints = _hints(cast(type, kind))
    required = {
        f.name
        for f in dataclasses.fields(cast(type, kind))
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if odd := [*(required - raw.keys()), *(raw.keys() - hints.keys())]:
        raise ValueError(f"an entry is missing or unknown ({where}{sorted(map(str, odd))[0]})")
    return kind(**{k: _value(hints[k], v, f"{where}{k}") for k, v in raw.items()})


@cache
def _hints(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _value(hint: object, value: object, where: str) -> object:
    """The value, with mappings as the dataclasses that the hint names."""
    args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(cast(type, hint), value, f"{where}.")
    if args and dataclasses.is_dataclass(args[0]):  # list[MetricRecord], Result | None
        if isinstance(value, list) and typing.get_origin(hint) is list:
            return [build(cast(type, args[0]), v, f"{where}.") for v in value]
        if typing.get_origin(hint) is not list:
            return None if value is None else build(cast(type, args[0]), value, f"{where}.")
    try:
        fits = _test(hint)(value)
    except RecursionError:
        fits = False
    if not fits:
        raise ValueError(f"{where} is {value!r:.80}, of a wrong type")
    return value


@cache
def _test(hint: Hashable) -> Callable[[object], bool]:
    """Whether plain data is of a type, as a function: records of many clients are read often."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and not typing.is_typeddict(hint) and not origin:
        kinds = {int, float} if hint is float else {hint}
        return lambda value: type(value) in kinds
    if isinstance(hint, str | typing.ForwardRef):  # a Value inside a Value
        return lambda value: _test(Value)(value)
    tests = [_test(a) for a in args]
    if origin is list:
        return lambda value: type(value) is list and all(map(tests[0], value))
    if origin is dict:
        return lambda value: type(value) is dict and all(map(tests[1], value.values()))
    if typing.is_typeddict(hint):  # entries that it does not name are notes of merges
        known = {k: _test(h) for k, h in _hints(cast(type, hint)).items()}
        needed = known.keys() & {"round"}
        return lambda value: (
            type(value) is dict and needed <= value.keys() and all(known[k](v) for k, v in value.items() if k in known)
        )
    return lambda value: any(test(value) for test in tests)


def words(record: RoundRecord) -> str:
    """A round in a few words."""
    loss = record.get("loss")
    parts = [f"loss {loss:.3f}"] if loss is not None else []
    parts += [f"{k} {100 * value:.1f}" for k in (*MEASURES, "G", "P") if (value := value_of(record, k)) is not None]
    return " ".join([*parts, f"{(record['bytes_down'] + record['bytes_up']) / 1e6:.2f} MB/round"])
