"""What there is, as data: every part with its keys, every method with what it keeps private and sends.

`fedvlm ls`, `show`, completion and the check of a command line read it instead of importing torch. The package ships
catalogue.json; where the files it was made from have changed since, it is made anew (in the cache). Refresh the shipped
one with `python tools/keys_page.py`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedvlm.config import recipe
from fedvlm.config.keys import Key, keys_of
from fedvlm.core.ranges import Purpose, Range, Trait
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.system import files
from fedvlm.system.machine import cache_home

HERE = Path(__file__).parent.parent  # the package
SHIPPED = HERE / "config" / "catalogue.json"
SOURCES = (
    *(f"config/{name}.py" for name in ("config", "keys", "layouts")),
    *(
        f"core/{name}.py"
        for name in ("adapter", "copies", "descent", "detection", "local", "merge", "metric", "ranges")
    ),
    *(f"parts/{folder}/*.py" for folder in ("adapters", "local", "merge", "metrics")),
    "parts/recipes/**/*.yaml",
    "engines/*.py",
    "federation/engines/*.py",
    "data/formats/*.py",
    *(f"backbones/{name}.py" for name in ("hf", "siglip", "open_clip", "vision_only", "pixels")),
)


MOST_NAMED = 8  # private parameters of a method
TUPLES = ("choices", "traits", "decisive")  # entries of a key that are lists in JSON


class PartInfo(NamedTuple):
    keys: list[Key]
    summary: str  # the first line of its file's docstring
    records: dict[str, str]  # numbers about its mechanism that it records (effects, diagnostics), with their meaning


class MethodInfo(NamedTuple):
    name: str
    title: str
    paper: str
    idea: str
    parts: str
    private: str  # names; "–" nothing, "?" depends on the backbone
    upload: str  # kB per client and round, for 10 classes and 512 dimensions


class BackboneInfo(NamedTuple):
    name: str
    how: str  # what a user gives as backbone=
    adapters: list[str]


class Catalogue(NamedTuple):
    digest: str
    run: list[Key]  # the keys of a run itself
    parts: dict[str, dict[str, PartInfo]]  # kind → name
    methods: list[MethodInfo]
    presets: dict[str, str]  # name → title
    backbones: list[BackboneInfo]

    def to_json(self) -> str:
        return json.dumps(self, indent=0, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Catalogue:
        digest, run, kinds, methods, presets, backbones = json.loads(text)

        def keys(given: list[list[object]]) -> list[Key]:
            named = [dict(zip(Key._fields, k, strict=True)) for k in given]
            return [Key(**k | {f: tuple(k[f]) for f in TUPLES} | {"range": Range(*k["range"])}) for k in named]  # type: ignore

        found = {
            kind: {name: PartInfo(keys(given), *rest) for name, (given, *rest) in known.items()}
            for kind, known in kinds.items()
        }
        return cls(
            digest, keys(run), found, [MethodInfo(*m) for m in methods], presets, [BackboneInfo(*b) for b in backbones]
        )


def current_digest() -> str:
    seen = hashlib.blake2b(digest_size=8)
    for pattern in SOURCES:
        for path in sorted(HERE.glob(pattern)):
            seen.update(path.relative_to(HERE).as_posix().encode() + path.read_bytes().replace(b"\r\n", b"\n"))
    return seen.hexdigest()


@cache
def load() -> Catalogue:
    digest = current_digest()
    made = read_catalogue(SHIPPED, digest)
    with suppress(FedvlmError):  # no cache, or one that cannot be written: made anew each time
        if made is None:
            path = cache_home() / f"catalogue-{digest}.json"
            made = read_catalogue(path, digest)
        if made is None:
            made = make(digest)
            files.write(path, made.to_json())
    return made or make(digest)


def read_catalogue(path: Path, digest: str) -> Catalogue | None:
    try:
        found = Catalogue.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, AttributeError, LookupError):  # damaged, or of another version
        return None
    return found if found.digest == digest else None


@cache
def run_keys() -> dict[str, Key]:
    """The keys of a run itself, by name."""
    return {key.name: key for key in load().run}


def with_trait(*traits: Trait) -> list[str]:
    """The names of a run's keys that have one of these traits."""
    return [name for name, key in run_keys().items() if {*traits} & {*key.traits}]


def for_purpose(*purposes: Purpose) -> list[str]:
    """The names of a run's keys that are for one of these purposes."""
    return [name for name, key in run_keys().items() if key.purpose in purposes]


def keys(kind: str, name: str) -> list[Key]:
    """The keys of a part; a part of the user's own, or of an installed package, is imported."""
    known = load().parts[kind].get(name)
    return known.keys if known else keys_of(registry.find(kind, name))


def records(kind: str, name: str) -> dict[str, str]:
    """The numbers that a part records of its mechanism, with their meaning; {} where there is no such part."""
    if known := load().parts[kind].get(name):
        return known.records
    return records_of(registry.find(kind, name)) if name in registry.names(kind) else {}


def records_of(cls: type) -> dict[str, str]:
    return dict(getattr(cls, "effects", {}) or getattr(cls, "diagnostics", {}))


def make(digest: str) -> Catalogue:
    """Imports everything."""
    found: dict[str, dict[str, PartInfo]] = {}
    for kind in registry.KINDS:
        found[kind] = {}
        for name in sorted(set(registry.names(kind)) - registry.installed(kind).keys()):
            cls = registry.find(kind, name)
            summary = (sys.modules[cls.__module__].__doc__ or "").split("\n")[0]
            found[kind][name] = PartInfo(keys_of(cls) if is_dataclass(cls) else [], summary, records_of(cls))
    methods = []
    for name in recipe.recipe_names():
        r = recipe.load(name)
        made = f"{r.adapter} × {r.local} × {r.merge}"
        methods.append(MethodInfo(name, r.title, r.paper, r.idea, made, *private_and_upload(r, found)))
    titles = {name: recipe.load("fedavg", on=name).title.removeprefix("FedAvg on ") for name in recipe.presets()}
    from fedvlm.config.config import Config  # which imports this module

    return Catalogue(digest, keys_of(Config), found, methods, titles, backbone_infos())


def backbone_infos() -> list[BackboneInfo]:
    from fedvlm.config.layouts import LAYOUTS, usable_adapters

    return [BackboneInfo(layout.name, layout.how, usable_adapters(layout.offer)) for layout in LAYOUTS]


def private_and_upload(r: recipe.Recipe, known: dict[str, dict[str, PartInfo]]) -> tuple[str, str]:
    """What a method keeps private and how much it sends, at a common size."""
    import torch

    from fedvlm.core.adapter import Task
    from fedvlm.core.copies import COPY
    from fedvlm.core.state import nbytes
    from fedvlm.rounds.method import Method

    settings = {k: v for layer in r.layers("mini-clip") for k, v in layer.settings.items()}
    made = []
    for axis in registry.AXES:
        name = getattr(r, axis)
        values = {k.name: k.coerce(settings[k.name]) for k in known[axis][name].keys if k.name in settings}
        kind = registry.find(axis, name)
        made.append(kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}))
    if made[0].requires:  # its size is the backbone's
        return "?", "of the tower"
    task = Task(tuple(map(str, range(10))), torch.zeros(10, 512), 512, 100.0)
    adapter, local, merge = made
    method = Method.build(adapter, local, merge, task)
    private = list(dict.fromkeys("a copy" if k.startswith(COPY) else k for k in method.newcomer))
    private = private if len(private) <= MOST_NAMED else [*private[:2], f"and {len(private) - 2} more"]
    size = (nbytes(method.initial) + method.upload_bytes * method.trains) / 1e3
    return ", ".join(private) or "–", f"{size:.3g}" if size < 1000 else f"{float(f'{size:.3g}'):,.0f}"
