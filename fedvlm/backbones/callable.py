"""A Python function as an encoder: `module:function` or `./file.py:function`, list[PIL.Image] → numbers [n, dim].

Optional attributes of the function: `scale` (logit scale, 20 by default), `fingerprint` (set it to the version of the
weights: by default only the module's source is looked at), and `texts`, a function list[str] → numbers [n, dim].
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fedvlm.backbones.base import checked
from fedvlm.core import FedvlmError


class Callable:
    black_box = True

    def __init__(self, spec: str):
        self.name = f"python:{spec}"
        self.who = f"backbone={self.name}"
        where, colon, function = spec.rpartition(":")
        if not (where and colon and function):
            raise FedvlmError(f"{self.who}: write python:module:function or python:./file.py:function")
        module = self._guarded("does not import", _module, where)
        self.encode = getattr(module, function, None)
        if not callable(self.encode):
            raise FedvlmError(f"{self.who}: {where} has no function {function!r}; write python:module:function")
        self.scale = getattr(self.encode, "scale", 20.0)
        if not isinstance(self.scale, int | float) or not 0 < self.scale < 1e6:
            raise FedvlmError(f"{self.who}: {function}.scale is {self.scale!r}; it must be a positive number")
        version = getattr(self.encode, "fingerprint", None)
        file = Path(getattr(module, "__file__", None) or "")
        source = str(version).encode() if version else file.read_bytes() if file.is_file() else b""
        self.fingerprint = hashlib.blake2b(spec.encode() + b"\0" + source, digest_size=8).hexdigest()
        self.dim = 0
        self.dim = self.images([Image.linear_gradient("L").resize((64, 64)).convert("RGB")]).shape[1]

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        if not images:
            return torch.empty(0, self.dim)
        found = self._guarded("failed", self.encode, list(images))
        return checked(found, len(images), self.who, self.dim)

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        encode = getattr(self.encode, "texts", None)
        if encode is None:
            return None
        found = self._guarded("failed in texts", encode, list(phrases))
        return checked(found, len(phrases), f"{self.who}: texts", self.dim)

    @torch.no_grad()
    def _guarded(self, what: str, function: Any, argument: Any) -> Any:
        """The user's own code: whatever it raises is told with its file and line."""
        try:
            return function(argument)
        except FedvlmError:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise FedvlmError(
                f"{self.who}: {what} at {at.filename}:{at.lineno} ({type(error).__name__}: {error}); put it right there"
            ) from error


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    file = Path(where).expanduser().resolve()
    if not file.is_file():
        raise FedvlmError(f"backbone=python:{where}: no such file; give the path of a .py file or a module's name")
    name = f"fedvlm_callable_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    plan = importlib.util.spec_from_file_location(name, file)
    assert plan and plan.loader  # a .py file always has both
    module = importlib.util.module_from_spec(plan)
    sys.modules[name] = module  # dataclasses and pickles look their module up by name
    plan.loader.exec_module(module)
    return module
