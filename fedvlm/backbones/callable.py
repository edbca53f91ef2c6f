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
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from PIL import Image
from torch import Tensor

from fedvlm.backbones.base import checked_embeddings
from fedvlm.core import FedvlmError

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class PythonFunction:
    black_box = True

    def __init__(self, spec: str):
        self.name = f"python:{spec}"
        self.label = f"backbone={self.name}"  # starts every error message
        where, colon, function = spec.rpartition(":")
        if not (where and colon and function):
            raise FedvlmError(f"{self.label}: write python:module:function or python:./file.py:function")
        module = self._call("does not import", _module, where)
        found = getattr(module, function, None)
        if not callable(found):
            raise FedvlmError(f"{self.label}: {where} has no function {function!r}; write python:module:function")
        self.encode: Callable[[list[Image.Image]], object] = found
        self.scale = getattr(self.encode, "scale", 20.0)
        if not isinstance(self.scale, int | float) or not 0 < self.scale < 1e6:
            raise FedvlmError(f"{self.label}: {function}.scale is {self.scale!r}; it must be a positive number")
        version = getattr(self.encode, "fingerprint", None)
        file = Path(getattr(module, "__file__", None) or "")
        source = str(version).encode() if version else file.read_bytes() if file.is_file() else b""
        self.fingerprint = hashlib.blake2b(spec.encode() + b"\0" + source, digest_size=8).hexdigest()
        self.dim = 0
        self.dim = self.images([Image.linear_gradient("L").resize((64, 64)).convert("RGB")]).shape[1]

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        if not images:
            return torch.empty(0, self.dim)
        found = self._call("failed", self.encode, list(images))
        return checked_embeddings(found, len(images), self.label, self.dim)

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        encode: Callable[[list[str]], object] | None = getattr(self.encode, "texts", None)
        if encode is None:
            return None
        found = self._call("failed in texts", encode, list(phrases))
        return checked_embeddings(found, len(phrases), f"{self.label}: texts", self.dim)

    @torch.no_grad()
    def _call(self, what: str, function: Callable[[Argument], Result], argument: Argument) -> Result:
        """function(argument). An error in the user's code is reported with its file and line."""
        try:
            return function(argument)
        except FedvlmError:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise FedvlmError(
                f"{self.label}: {what} at {at.filename}:{at.lineno} ({type(error).__name__}: {error}); fix it there"
            ) from error


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    file = Path(where).expanduser().resolve()
    if not file.is_file():
        raise FedvlmError(f"backbone=python:{where}: no such file; give the path of a .py file or a module's name")
    name = f"fedvlm_callable_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    spec.loader.exec_module(module)
    return module
