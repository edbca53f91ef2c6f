"""Finding adapters, local rules and merges: the files themselves are the list. A file of your own works by its path."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

from fedvlm.core import FedvlmError
from fedvlm.errors import nearest

AXES = {"adapter": "fedvlm.adapters", "local": "fedvlm.local", "merge": "fedvlm.merge"}
SHARED = {"base", "copies", "descent", "layered", "model", "network"}  # what parts have in common, not parts


def names(axis: str) -> list[str]:
    folder = importlib.import_module(AXES[axis]).__path__
    return sorted(m.name for m in pkgutil.iter_modules(folder) if m.name not in SHARED)


def find(axis: str, name: str) -> type:
    """The one dataclass that a part's file defines: `rotation`, or `path/to/idea.py`."""
    if name.endswith(".py"):
        module = _from_file(axis, Path(name))
    elif name in names(axis):
        module = importlib.import_module(f"{AXES[axis]}.{name}")
    else:
        raise FedvlmError(
            f"{axis}={name}: no such {axis}; {nearest(name, names(axis))} (a file of your own: {axis}=path.py)"
        )
    own = [v for v in vars(module).values() if is_dataclass(v) and v.__module__ == module.__name__]
    parts = [v for v in own if hasattr(v, {"adapter": "logits", "local": "train", "merge": "round"}[axis])]
    if len(parts) != 1:
        raise FedvlmError(f"{axis}={name}: the file must define exactly one {axis} dataclass, and defines {len(parts)}")
    return cast(type, parts[0])


def _from_file(axis: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise FedvlmError(f"{axis}={path}: no such file")
    spec = importlib.util.spec_from_file_location(f"fedvlm_{axis}_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    importlib.sys.modules[spec.name] = module  # type: ignore[attr-defined]
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise FedvlmError(f"{axis}={path} does not import: {type(error).__name__}: {error}") from error
    return module
