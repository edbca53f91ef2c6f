"""Frozen encoders behind one protocol. The form of the name says which kind it is."""

from pathlib import Path

from fedvlm.backbones.base import Backbone
from fedvlm.core import FedvlmError

ASSETS = Path(__file__).parent / "assets"


def load(name: str) -> Backbone:
    """mini-clip · a folder or hub name in Hugging Face format · onnx:FILE · http(s)://… · python:module:function ·
    pixels:SIZE."""
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
        from fedvlm.backbones.callable import Callable

        return Callable(name.removeprefix("python:"))
    from fedvlm.backbones.hf import Clip, Vision, describe, folder_of

    if not Path(name).expanduser().is_dir() and name != "mini-clip" and name.count("/") != 1:
        raise FedvlmError(
            f"backbone={name}: no such folder; give mini-clip, a folder in Hugging Face format, a hub name (owner/model), "
            "onnx:FILE, http(s)://…, python:module:function, or pixels:SIZE"
        )
    folder = ASSETS / name if name == "mini-clip" else folder_of(name)
    return Clip(name, folder) if describe(folder).get("model_type") == "clip" else Vision(name, folder)
