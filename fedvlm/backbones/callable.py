"""A Python function as an encoder: `module:function` or `./file.py:function`, list[PIL.Image] → numbers [n, dim].

Optional attributes of the function: `scale` (logit scale, 20 by default), `fingerprint` (set it to the version of the
weights: by default only the module's source is hashed), and `texts`, a function list[str] → numbers [n, dim].
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from PIL import Image
from torch import Tensor

from fedvlm.backbones.base import checked_embeddings
from fedvlm.errors import FedvlmError
from fedvlm.system.allowed import absolute

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_looked_at: dict[str, str] = {}  # file → digest of its content when trust.py looked at it


class PythonFunction:
    black_box = True

    def __init__(self, spec: str):
        self.name = f"python:{spec}"
        self.label = f"backbone={self.name}"  # starts every error message
        where, colon, function = spec.rpartition(":")
        if not (where and colon and function):
            raise FedvlmError(f"{self.label}: write python:module:function or python:./file.py:function")
        source = _read(where)
        module = self._call("does not import", _module, where, source)
        found = getattr(module, function, None)
        if not callable(found):
            raise FedvlmError(f"{self.label}: {where} has no function {function!r}; write python:module:function")
        self.encode: Callable[[list[Image.Image]], object] = found
        self.scale = getattr(self.encode, "scale", 20.0)
        if not isinstance(self.scale, int | float) or not 0 < self.scale < 1e6:
            raise FedvlmError(f"{self.label}: {function}.scale is {self.scale!r}; it must be a positive number")
        version = getattr(self.encode, "fingerprint", None)
        file = Path(getattr(module, "__file__", None) or "")
        known = str(version).encode() if version else source or (file.read_bytes() if file.is_file() else b"")
        self.fingerprint = hashlib.blake2b(spec.encode() + b"\0" + known, digest_size=8).hexdigest()
        self.dim = 0
        self.dim = self.images([Image.linear_gradient("L").resize((64, 64)).convert("RGB")]).shape[1]

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        if not images:
            return torch.empty(0, self.dim)
        found = self._call("failed", self.encode, list(images))
        return checked_embeddings(found, len(images), self.label, self.dim)

    @property
    def has_texts(self) -> bool:
        return getattr(self.encode, "texts", None) is not None

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        encode: Callable[[list[str]], object] | None = getattr(self.encode, "texts", None)
        if encode is None:
            return None
        found = self._call("failed in texts", encode, list(phrases))
        return checked_embeddings(found, len(phrases), f"{self.label}: texts", self.dim)

    @torch.no_grad()
    def _call(
        self, what: str, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """function(…). An error in the user's code is reported with its file and line."""
        try:
            return function(*args, **kwargs)
        except FedvlmError:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise FedvlmError(
                f"{self.label}: {what} at {at.filename}:{at.lineno} ({type(error).__name__}: {error}); fix it there"
            ) from error


def _read(where: str) -> bytes:
    """The source of a file; b"" for a module's name. It is read once, and run from memory: what trust.py looked at is what
    runs."""
    if not where.endswith(".py"):
        return b""
    try:
        source = Path(absolute(where)).read_bytes()
    except (OSError, ValueError):
        raise FedvlmError(
            f"backbone=python:{where}: no such file; give the path of a .py file or a module's name"
        ) from None
    seal = hashlib.sha256(source).hexdigest()
    if _looked_at.get(where, seal) != seal:
        del _looked_at[where]
        raise FedvlmError(f"backbone=python:{where}: the file changed while it was looked at; try again")
    return source


def _module(where: str, source: bytes) -> ModuleType:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    file = Path(absolute(where)).resolve()
    name = f"fedvlm_callable_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    exec(compile(source, str(file), "exec", dont_inherit=True), vars(module))
    return module


def seal_of(name: str) -> str:
    """A digest of the code that `python:…` names, for trust.py: of a file its content, of a module its file and content.
    Nothing is imported; "" where nothing is found."""
    where = name.removeprefix("python:").rpartition(":")[0]
    file = where if where.endswith(".py") else _file_of(where)
    if not file or file.startswith(("//", "\\\\")):  # another machine is not asked
        return ""
    try:
        content = Path(absolute(file)).read_bytes()
    except (OSError, ValueError):
        return ""
    if where.endswith(".py"):
        _looked_at[where] = hashlib.sha256(content).hexdigest()
        return _looked_at[where]
    return hashlib.sha256(f"{where}\0{file}\0".encode() + content).hexdigest()


def _file_of(module: str) -> str:
    """The file of a module; for one inside packages importlib.util.find_spec alone would import these."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: of __main__
        return ""
    for name in inner:
        if spec is None or spec.submodule_search_locations is None:
            return ""
        spec = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
    return (spec.origin or "") if spec else ""
