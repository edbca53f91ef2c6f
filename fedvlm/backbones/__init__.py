"""Frozen encoders behind one protocol (`base.Backbone`). The form of the name decides which kind is loaded."""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from fedvlm.backbones.base import Backbone
from fedvlm.errors import FedvlmError

ASSETS = Path(__file__).parent / "assets"
GROUP = "fedvlm.backbones"  # entry points of other packages: NAME → a function from "NAME:rest" to a Backbone


def load(name: str) -> Backbone:
    """mini-clip · a folder or hub name in Hugging Face format · onnx:FILE · http(s)://… · python:module:function ·
    pixels:SIZE · NAME or NAME:rest of an installed package."""
    if name.startswith("object:"):
        from fedvlm.backbones import objects

        return objects.load(name)
    installed = {e.name: e for e in entry_points(group=GROUP)}
    if name.partition(":")[0] in installed:
        return cast(Callable[[str], Backbone], installed[name.partition(":")[0]].load())(name)
    if name.startswith("onnx:") or name.endswith(".onnx"):
        from fedvlm.backbones.onnx import Onnx

        return Onnx(Path(name.removeprefix("onnx:")))
    if name.startswith(("http://", "https://")):
        from fedvlm.backbones.http import Endpoint

        return Endpoint(name)
    if name.startswith("pixels:"):
        from fedvlm.backbones.pixels import Pixels

        return Pixels(name, name.removeprefix("pixels:"))
    if name.startswith("python:"):
        from fedvlm.backbones.callable import PythonFunction

        return PythonFunction(name.removeprefix("python:"))
    from fedvlm.backbones.hf import Clip, Vision, folder_of, read_config

    if not Path(name).expanduser().is_dir() and name != "mini-clip" and name.count("/") != 1:
        raise FedvlmError(
            f"backbone={name}: no such folder; give mini-clip, a folder in Hugging Face format, a hub name "
            "(owner/model), onnx:FILE, http(s)://…, python:module:function, or pixels:SIZE"
        )
    folder = ASSETS / name if name == "mini-clip" else folder_of(name)
    return Clip(name, folder) if read_config(folder).get("model_type") == "clip" else Vision(name, folder)
