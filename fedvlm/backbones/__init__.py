"""Frozen encoders behind one protocol (`base.Backbone`). The form of the name decides which kind is loaded."""

import re
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal, cast

from fedvlm.backbones.base import Backbone
from fedvlm.core.hub_names import in_full
from fedvlm.errors import FedvlmError

ASSETS = Path(__file__).parent / "assets"
BUNDLED = "mini-clip"
GROUP = "fedvlm.backbones"  # entry points of other packages: NAME → a function from "NAME:rest" to a Backbone
HUB = re.compile(r"[\w-][\w.-]{,95}/[\w-][\w.-]{,95}")  # owner/model
Form = Literal["object", "installed", "onnx", "http", "pixels", "python", "bundled", "hub", "folder"]


def installed_backbones() -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group=GROUP)}


def form_of(name: str) -> Form:
    """What `load` takes a name for. Nothing is loaded."""
    name = in_full(name)
    if name.startswith("object:"):
        return "object"
    if name.partition(":")[0] in installed_backbones():
        return "installed"
    if name.startswith("onnx:") or name.endswith(".onnx"):
        return "onnx"
    if name.startswith(("http://", "https://")):
        return "http"
    if name.startswith("pixels:"):
        return "pixels"
    if name.startswith("python:"):
        return "python"
    if name == BUNDLED:
        return "bundled"
    return "hub" if HUB.fullmatch(name) and not Path(name).is_dir() else "folder"


def load(name: str) -> Backbone:
    """mini-clip · a folder or hub name in Hugging Face or open_clip format · onnx:FILE · http(s)://… ·
    python:module:function · pixels:SIZE · NAME or NAME:rest of an installed package · a short name of weights.py."""
    name = in_full(name)
    form = form_of(name)
    if form == "object":
        from fedvlm.backbones import objects

        return objects.load_object(name)
    if form == "installed":
        return cast(Callable[[str], Backbone], installed_backbones()[name.partition(":")[0]].load())(name)
    if form == "onnx":
        from fedvlm.backbones.onnx import Onnx

        return Onnx(Path(name.removeprefix("onnx:")))
    if form == "http":
        from fedvlm.backbones.http import Endpoint

        return Endpoint(name)
    if form == "pixels":
        from fedvlm.backbones.pixels import Pixels

        return Pixels(name, name.removeprefix("pixels:"))
    if form == "python":
        from fedvlm.backbones.callable import PythonFunction

        return PythonFunction(name.removeprefix("python:"))
    if form == "bundled":
        return bundled(name)
    from fedvlm.backbones import model_folder

    return of_folder(name, model_folder.folder_of(name, fetch=form == "hub"))


def of_folder(name: str, folder: Path) -> Backbone:
    """The model in a folder, by its layout: the same object as long as the files stay the same, so that weights are read
    once in a process."""
    from fedvlm.backbones import model_folder

    return _of_folder(name, folder, model_folder.fingerprint(folder))


@lru_cache(maxsize=2)
def _of_folder(name: str, folder: Path, fingerprint: str) -> Backbone:
    from fedvlm.backbones import model_folder
    from fedvlm.backbones.hf import Clip
    from fedvlm.backbones.siglip import Siglip
    from fedvlm.backbones.vision_only import Vision

    if model_folder.is_open_clip(folder):
        from fedvlm.backbones import open_clip

        return open_clip.load_open_clip(name, folder)
    kind = model_folder.read_config(folder).get("model_type")
    if kind == "siglip2":
        raise FedvlmError(
            f"backbone={name}: a SigLIP 2 with NaFlex, which takes images of any aspect ratio and gives no features of "
            "one size; use a fixed-resolution SigLIP 2, such as google/siglip2-base-patch16-224"
        )
    if kind == "siglip":
        return Siglip(name, folder)
    return Clip(name, folder) if kind == "clip" else Vision(name, folder)


@cache
def bundled(name: str) -> Backbone:
    """A model of the package: its files do not change, so that one copy serves the whole process."""
    from fedvlm.backbones.hf import Clip

    return Clip(name, ASSETS / name)
