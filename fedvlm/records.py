"""The records of a run, typed: `RunRecord` is run.json, `RoundRecord` a line of rounds.jsonl. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict, cast

from fedvlm.errors import FedvlmError

FORMAT = 2  # of run.json; 1 had no number and did not hold the code of users' own parts

Number = float | None
Value = int | float | str | bool | None | list["Value"]  # of a setting
Settings = dict[str, Value]
Scores = dict[str, Number]
Select = Literal["last", "selected"]
MEASURES = ("local", "base", "novel", "hm")  # of a base-to-novel run (evaluate/novel.py)


class ClientScores(TypedDict, total=False):
    """One client's scores by view, then by split."""

    shared: Scores
    personal: Scores


class RoundRecord(TypedDict, total=False):
    """A round. Merges add notes of their own (numbers, words, or numbers by client) under further names."""

    round: int
    seconds: float
    void: str  # why the round changed nothing
    bytes_down: int
    bytes_up: int
    score_bytes_down: int
    score_bytes_up: int
    asked: int
    answered: int
    loss: float
    stage: str
    cosine: float
    gap_variance: float
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
    condition: dict[str, float]


def value_of(record: RoundRecord, name: str) -> Number:
    """A number at the top level of a round's record; None where it was not recorded."""
    entries: Mapping[str, object] = record
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


@dataclass(frozen=True)
class BackboneRecord:
    name: str
    fingerprint: str
    dim: int
    scale: float


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
    started: str = ""
    clients: list[str] = field(default_factory=list)
    homes: dict[str, str] = field(default_factory=dict)  # client → domain
    result: Result | None = None
    format: int = FORMAT
    legacy: bool = False  # converted from the first format, in which a run was not self-contained

    @property
    def seed(self) -> int:
        return cast(int, self.config["seed"])

    @property
    def unseen(self) -> list[str]:
        return cast(list[str], self.config["unseen"])

    @property
    def protocol(self) -> str:
        return str(self.config["protocol"])

    @property
    def finished(self) -> Result:
        if self.result is None:
            raise FedvlmError(f"run {self.identity} is not finished; go on with `fedvlm resume`")
        return self.result

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Raises ValueError with a reason where the text is no record."""
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not a mapping")
        if "format" not in raw and "config" in raw:
            try:
                raw = from_first_format(raw)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"an entry of the first format is missing or wrong ({error})") from error
        if raw.get("format") != FORMAT:
            raise ValueError(f"format {raw.get('format')}, and this version of fedvlm reads {FORMAT}")
        try:
            parts = {k: PartRecord(**raw[k]) for k in ("adapter", "local", "merge", "engine")}
            nested = {
                "method": MethodRecord(**raw["method"]),
                "data": DataRecord(**raw["data"]),
                "backbone": BackboneRecord(**raw["backbone"]),
                "metrics": [MetricRecord(**m) for m in raw["metrics"]],
                "result": None if raw["result"] is None else Result(**raw["result"]),
            }
            return cls(**(raw | parts | nested))
        except (KeyError, TypeError) as error:
            raise ValueError(f"an entry is missing or unknown ({error})") from error


def from_first_format(raw: dict[str, object]) -> dict[str, object]:
    """run.json as fedvlm 0.1 wrote it, for tables and pages; such a run is marked `legacy`: it cannot go on."""
    config = dict(cast(dict[str, object], raw["config"]))
    parts: dict[str, object] = {}
    for axis in ("adapter", "local", "merge"):
        ((name, settings),) = cast(dict[str, object], config.pop(axis)).items()
        parts[axis] = {"name": name, "settings": settings}
    backbone = cast(dict[str, object], raw["backbone"])
    name, _, fingerprint = str(backbone["name"]).rpartition("@")
    data = {"metric": "accuracy", "novel": [], "nouns": [], "skipped": {}} | cast(dict[str, object], raw["data"])
    kept = ("identity", "given", "versions", "started", "clients", "homes", "reveals")
    return {
        "format": FORMAT,
        "legacy": True,
        "method": {"name": raw["method"]},
        "backbone": backbone | {"name": name, "fingerprint": fingerprint},
        "config": {k: v for k, v in config.items() if k != "method"},
        "data": data,
        "metrics": [],
        "engine": {"name": "stacked"},
        "result": raw.get("result"),
        **parts,
        **{k: raw[k] for k in kept if k in raw},
    }
