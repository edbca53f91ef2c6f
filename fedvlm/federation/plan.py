"""What a server and its sites tell each other before the first round, as plain data.

look: the server sends the plan, a site answers with its classes and fingerprints. begin: the server sends what was agreed,
a site encodes and splits its own data and answers how much it has. No path, no file name and no example is in any of them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

import fedvlm
from fedvlm.config import catalogue
from fedvlm.config.config import Setup
from fedvlm.core.records import MethodRecord, PartRecord, RunRecord, Settings, build, parsed
from fedvlm.core.records import Value as Value  # Settings are made of it, which `build` looks up here
from fedvlm.core.state import Params
from fedvlm.errors import BadMessage, Refused
from fedvlm.federation.wire import octets
from fedvlm.parts import registry

LOOK, BEGIN, FINISH = "look", "begin", "finish"  # requests beside the steps
JSON = "json"  # the part of a frame that holds one of these
LONGEST = 1 << 24  # bytes of such a text
FETCHED = "fedvlm"  # the folder in a job's workspace that is fetched at the end


@dataclass(frozen=True)
class Plan:
    """A run, as it was asked for: all that a server and a site need to build its method."""

    federation: str
    name: str  # of the run's folders
    sites: list[str]  # all of the federation, in the order of their ids
    method: MethodRecord
    adapter: PartRecord
    local: PartRecord
    merge: PartRecord
    metrics: list[PartRecord]
    config: Settings
    given: Settings
    version: str  # of fedvlm
    code: str  # its fingerprint

    engine: PartRecord = field(default_factory=lambda: PartRecord("nvflare"))

    @classmethod
    def of(cls, setup: Setup, federation: str, name: str, sites: list[str]) -> Plan:
        refuse_own(setup.parts)
        metrics = [p for home, p in setup.parts.items() if home.startswith("metric-")]
        mine = catalogue.with_trait("asker")
        config = {k: v for k, v in setup.settings().items() if k not in mine}
        return cls(
            federation=federation,
            name=name,
            sites=sites,
            method=replace(setup.method, path=""),
            adapter=setup.parts["adapter"],
            local=setup.parts["local"],
            merge=setup.parts["merge"],
            metrics=metrics,
            config=config | {"data": f"federation:{federation}", "engine": "nvflare"},
            given={k: v for k, v in setup.given.items() if k not in mine},
            version=fedvlm.__version__,
            code=code_fingerprint(),
        )

    def setup(self) -> Setup:
        """The run's setup, of parts that are installed here: a plan carries no code."""
        known = {axis: getattr(self, axis) for axis in registry.AXES} | {f"metric-{m.name}": m for m in self.metrics}
        refuse_own(known)
        return Setup.from_record(self, Path())  # type: ignore[arg-type]  # has the same entries

    def agreement(self, agreed: Agreed | None = None) -> str:
        """A hash of what all parties of the run must have been told the same of."""
        told = [self.federation, self.name, self.sites, self.version, self.code, self.setup().binding()]
        told += [agreed.classes, agreed.nouns] if agreed else []
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Hello:
    """A site's answer to look."""

    version: str
    code: str
    backbone: str  # the fingerprint
    classes: list[str]
    task: str  # the kind of task: classification, …


@dataclass(frozen=True)
class Agreed:
    """What the server tells a site with begin."""

    id: int
    classes: list[str]
    nouns: list[str]


@dataclass(frozen=True)
class SiteReady:
    """A site's answer to begin."""

    counts: list[int]  # train, val, test; 1 each where they are withheld
    mark: str  # changes with the site's data, and tells nothing of it
    extras: list[str]  # names of extra examples
    skipped: int  # files that cannot be read
    computed_by: str  # its processor, library of products and instruction set


Record = TypeVar("Record")


def packed_record(record: Plan | Hello | Agreed | SiteReady | RunRecord) -> dict[str, Params]:
    return {JSON: {"text": octets(json.dumps(asdict(record)).encode())}}


def unpacked_record(kind: type[Record], found: dict[str, Params]) -> Record:
    """The record in a frame; BadMessage where there is none."""
    try:
        return build(kind, parsed(text_of(found)))
    except ValueError as error:
        raise BadMessage(f"a {kind.__name__.lower()} is not readable: {error}") from error


def text_of(found: dict[str, Params]) -> str:
    """The JSON in a frame."""
    text = found.get(JSON, {}).get("text")
    if text is None or text.dtype != torch.uint8 or text.numel() > LONGEST:
        raise BadMessage("there is no record in a message")
    return text.numpy().tobytes().decode(errors="replace")


def refuse_own(chosen: dict[str, PartRecord]) -> None:
    for home, part in chosen.items():
        kind = home.partition("-")[0]
        if kind != "engine" and (part.code or part.name not in registry.names(kind)):
            raise Refused(
                f"{kind}={part.name}: runs across machines carry no code; install your part as a package on the server "
                "and at every site (docs/add-a-method.md, entry points)"
            )


@cache
def code_fingerprint() -> str:
    """A hash of the installed package's own files."""
    seen = hashlib.sha256()
    here = Path(fedvlm.__file__).parent
    for path in sorted(here.rglob("*.py")):
        seen.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    return seen.hexdigest()[:16]
