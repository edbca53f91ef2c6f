"""Finding parts: the files of a folder are the list; entry points, files and modules of your own join them.

A name is, in this order: a file in the package's folder (`rotation`), an entry point of an installed package (groups
`fedvlm.adapters`, `.local`, `.merges`, `.metrics`, `.engines`, `.formats`, `.backbones`), a file (`path/to/idea.py`), or a
module (`package.module`).
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from fedvlm.errors import FedvlmError, nearest
from fedvlm.parts import user_code

HERE = Path(__file__).parent.parent  # the package


class Kind(NamedTuple):
    """A kind of part."""

    folders: tuple[str, ...]  # below the package
    base: str  # module:class that every part of this kind derives from
    group: str  # of entry points
    shared: tuple[str, ...] = ()  # files of the folders that are no parts


KINDS = {
    "adapter": Kind(
        ("parts/adapters",), "fedvlm.core.adapter:Adapter", "fedvlm.adapters", ("layered", "network", "several")
    ),
    "local": Kind(("parts/local",), "fedvlm.core.local:Local", "fedvlm.local", ("means", "term")),
    "merge": Kind(("parts/merge",), "fedvlm.core.merge:Merge", "fedvlm.merges"),
    "metric": Kind(("parts/metrics",), "fedvlm.core.metric:Metric", "fedvlm.metrics"),
    "engine": Kind(
        ("engines", "federation/engines"),
        "fedvlm.engines.base:Engine",
        "fedvlm.engines",
        ("base", "rows", "device_rows", "spread"),
    ),
    "format": Kind(("data/formats",), "fedvlm.data.format:Format", "fedvlm.formats"),
}
AXES = ("adapter", "local", "merge")


@cache
def modules(kind: str) -> dict[str, str]:
    """Built-in parts: name → module."""
    about = KINDS[kind]
    files = (p for folder in about.folders for p in (HERE / folder).glob("*.py"))
    found = {p.stem: ".".join(("fedvlm", *p.relative_to(HERE).with_suffix("").parts)) for p in files}
    return {name: where for name, where in found.items() if name not in ("__init__", *about.shared)}


@cache
def built_in(kind: str) -> frozenset[str]:
    return frozenset(modules(kind))


def names(kind: str) -> list[str]:
    """Built-in parts and those of installed packages."""
    return sorted(built_in(kind) | installed(kind).keys())


def installed(kind: str) -> dict[str, str]:
    """Entry points of other packages: name → module (or module:class)."""
    from importlib.metadata import entry_points  # slow to import, and most commands do not need it

    return {e.name: e.value for e in entry_points(group=KINDS[kind].group)}


def installed_version(kind: str, name: str) -> str:
    """DISTRIBUTION VERSION of a part that an installed package declares; "" for a built-in one."""
    if name in built_in(kind) or user_code.is_own(name):
        return ""
    from importlib.metadata import entry_points

    found = [e.dist for e in entry_points(group=KINDS[kind].group) if e.name == name and e.dist]
    return f"{found[0].name} {found[0].version}" if found else ""


def find(kind: str, name: str) -> type:
    """The class of a part."""
    what = f"{kind}={name}"
    if name in built_in(kind):
        return only_part(kind, what, importlib.import_module(modules(kind)[name]))
    if name in installed(kind):
        module, _, attribute = installed(kind)[name].partition(":")
        try:
            found = importlib.import_module(module)
        except Exception as error:
            raise FedvlmError(f"{what}: {module} does not import ({type(error).__name__}: {error})") from error
        user_code.remember(what, found)
        return getattr(found, attribute) if attribute else only_part(kind, what, found)
    if user_code.is_own(name):
        return only_part(kind, what, user_code.read_code(what, name).load(what))
    raise FedvlmError(f"{what}: no such {kind}; {nearest(name, names(kind))} (a file of your own: {kind}=path.py)")


def only_part(kind: str, what: str, module: ModuleType) -> type:
    """The one part that a module defines."""
    home, _, name = KINDS[kind].base.partition(":")
    base = getattr(importlib.import_module(home), name)
    mine = [
        v
        for v in vars(module).values()
        if inspect.isclass(v) and v.__module__ == module.__name__ and issubclass(v, base) and not inspect.isabstract(v)
    ]
    leaves = [v for v in mine if not any(v is not w and issubclass(w, v) for w in mine)]
    if len(leaves) != 1:
        raise FedvlmError(
            f"{what}: the file must define exactly one {kind} (a class that derives from fedvlm.parts.{name}), and defines "
            f"{len(leaves)}"
        )
    return leaves[0]
