"""Image encoder and adapter as one ONNX file, for onnxruntime without torch and fedvlm.

The input are uint8 pixels [images, 3, height, width], resized and cropped as model.json says; rescaling and normalisation
are in the graph. What does not depend on images (prompts, class embeddings) is computed here and stored as constants.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedvlm.backbones.base import Backbone, encode_view
from fedvlm.backbones.pixels import Pixels
from fedvlm.backbones.preprocessing import Preprocessing
from fedvlm.core.adapter import Adapter, HasLinearForm
from fedvlm.core.seeds import numpy_generator
from fedvlm.core.state import Params
from fedvlm.core.tasks import SEGMENTATION
from fedvlm.errors import FedvlmError
from fedvlm.predict.predictor import Predictor
from fedvlm.system import console
from fedvlm.system.names import printable

MODEL, DESCRIPTION = "model.onnx", "model.json"
OPSET = 17
STDOUT = 1  # the file descriptor
FATAL = 4  # of onnxruntime's levels
TOLERANCE = 1e-4  # of probabilities
SIZES = ((90, 70), (64, 128), (200, 200))  # width and height of the images of the check


@runtime_checkable
class HasPixels(Protocol):
    """A backbone that preprocesses by `processor` and computes everything else from `pixels`."""

    processor: Preprocessing
    model: nn.Module

    def pixels(self, images: Sequence[Image.Image]) -> Tensor: ...


@dataclass(frozen=True)
class ImageSteps:
    """What happens to an RGB image before the model; 0: this step is left out."""

    shortest_edge: int  # the shorter side is resized to this, and the longer one in proportion (rounded down)
    width: int  # otherwise both sides are resized to this
    height: int
    resample: str  # Pillow's name
    crop_width: int  # from the middle
    crop_height: int
    crop_offset: str = "floor"  # of half the pixels that are cut off: floor, or round (to even)
    channels: str = "RGB"
    layout: str = "images, channels, height, width"
    dtype: str = "uint8"


class Whole(nn.Module):
    """The exported module: uint8 pixels to logits and probabilities."""

    def __init__(self, predictor: Predictor):
        super().__init__()
        self.predictor = predictor
        self.prepared = {k: v.detach() for k, v in predictor.prepared.items()}
        adapter = predictor.model.adapter
        linear = isinstance(adapter, HasLinearForm) and adapter.view == "embedding"  # ONNX solves no linear systems
        self.linear = cast(HasLinearForm, adapter).to_linear(predictor.model.task, predictor.params) if linear else None

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        model = self.predictor.model
        x = encoded(self.predictor.backbone, pixels, model.adapter.view)
        logits = x @ self.linear.T if self.linear is not None else model.logits(self.prepared, x[None])[0]
        return logits, logits.sigmoid() if model.adapter.task_type is SEGMENTATION else logits.softmax(-1)


def encoded(backbone: Backbone, pixels: Tensor, view: str) -> Tensor:
    if view == "pixels":
        return pixels
    assert isinstance(backbone, HasPixels)
    processor = backbone.processor
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    x = (pixels.float() * processor.factor - mean) / std
    given = copy.copy(backbone)
    given.__dict__["pixels"] = lambda images: x.to(next(backbone.model.parameters()).device)
    return encode_view(given, [Image.new("RGB", (1, 1))] * len(pixels), view)


def to_onnx(predictor: Predictor) -> tuple[bytes, str]:
    """The file, checked by onnxruntime where that is installed, and its description as JSON."""
    if importlib.util.find_spec("onnx") is None:
        raise FedvlmError(
            "--onnx needs the packages onnx and onnxruntime; install them with `pip install 'fedvlm[onnx]'`"
        )
    steps = preprocessing(predictor.backbone)
    images = example_images()
    ours = pixels_of(predictor.backbone, images)
    data, error = b"", ""
    for batch in (True, False):  # some adapters can only be traced for one image at a time
        try:
            data = traced(Whole(predictor), ours[:2] if batch else ours[:1], batch)
            error = onnx_difference(data, predictor, images, ours, 0 if batch else 1)
        except FedvlmError:
            raise
        except Exception as fault:  # whatever torch and onnxruntime raise
            error = f"{type(fault).__name__}: {printable(fault, 200)}"
        if not error:
            about = onnx_description(predictor, steps, 0 if batch else 1)
            return data, json.dumps(about, indent=1, ensure_ascii=False)
    name = type(predictor.model.adapter).__module__.rsplit(".", 1)[-1]
    raise FedvlmError(
        f"--onnx: adapter={name} on backbone={predictor.backbone.name} cannot be written as ONNX ({error}); export without "
        "--onnx, and load the folder by fedvlm.load"
    )


def preprocessing(backbone: Backbone) -> ImageSteps:
    if isinstance(backbone, Pixels):
        return ImageSteps(0, backbone.size, backbone.size, "bicubic", 0, 0)
    if backbone.black_box or not isinstance(backbone, HasPixels):
        raise FedvlmError(
            f"--onnx: backbone={backbone.name} returns embeddings only, so its image encoder cannot be written; "
            "classifier.safetensors, where the export has it, is the adapter alone"
        )
    p = backbone.processor
    offset = "round" if p.to_even else "floor"
    (width, height), kept = p.size or (0, 0), p.crop or (0, 0)
    return ImageSteps(p.shortest, width, height, p.resample.name.lower(), *kept, offset)


def example_images() -> list[Image.Image]:
    draw = numpy_generator(0)
    return [Image.fromarray(draw.integers(0, 256, (h, w, 3), np.uint8)) for w, h in SIZES]


def pixels_of(backbone: Backbone, images: Sequence[Image.Image]) -> Tensor:
    """The pixels that the backbone's own preprocessing gives, before they are rescaled and normalised."""
    if isinstance(backbone, Pixels):
        return backbone.encode(images, "pixels")
    assert isinstance(backbone, HasPixels)
    return torch.stack([backbone.processor.pixels(image) for image in images])


def traced(model: Whole, pixels: Tensor, batch: bool) -> bytes:
    out = io.BytesIO()
    axes = {"pixels": {0: "images"}, "logits": {0: "images"}, "probabilities": {0: "images"}} if batch else {}
    with quiet_exporter(), more_operations(), plain_calls(model.predictor.model.adapter), torch.no_grad():
        torch.onnx.export(
            model.eval(),
            (pixels,),
            out,  # type: ignore[arg-type]  # this exporter takes it
            dynamo=False,  # the other exporter needs a package more
            opset_version=OPSET,
            input_names=["pixels"],
            output_names=["logits", "probabilities"],
            dynamic_axes=axes,
        )
    return out.getvalue()


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence torch's warnings about its own exporter and about sizes that become constants, since the result is
    checked, and the graph that C++ code of torch prints where an operation is unknown."""
    sys.stdout.flush()
    with warnings.catch_warnings(), Path(os.devnull).open("wb") as nowhere:
        warnings.simplefilter("ignore")
        kept = os.dup(STDOUT)
        os.dup2(nowhere.fileno(), STDOUT)
        try:
            yield
        finally:
            os.dup2(kept, STDOUT)
            os.close(kept)


@contextlib.contextmanager
def more_operations() -> Iterator[None]:
    """Teach the exporter operations that fedvlm uses and it does not know."""

    def transpose(graph: Any, x: Any) -> Any:
        rank = x.type().dim()
        return graph.op("Transpose", x, perm_i=[*range(rank - 2), rank - 1, rank - 2])

    torch.onnx.register_custom_op_symbolic("aten::mT", transpose, OPSET)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::mT", OPSET)  # type: ignore[attr-defined]


@contextlib.contextmanager
def plain_calls(adapter: Adapter) -> Iterator[None]:
    """Replace torch's functional_call, which refuses to be traced, by an ordinary call of a module whose parameters are
    replaced for it."""

    def call(module: nn.Module, values: Params, args: tuple[Tensor | None, ...]) -> object:
        before: list[tuple[dict[str, Any], str, object]] = []
        for name, value in values.items():
            path, _, leaf = name.rpartition(".")
            home = module.get_submodule(path)
            table: dict[str, Any] = home._parameters if leaf in home._parameters else home._buffers
            before.append((table, leaf, table[leaf]))
            table[leaf] = value
        try:
            return module(*args)
        finally:
            for table, leaf, kept in before:
                table[leaf] = kept

    homes = {sys.modules[kind.__module__] for kind in type(adapter).__mro__}
    used = {home: vars(home)["functional_call"] for home in homes if "functional_call" in vars(home)}
    for home in used:
        vars(home)["functional_call"] = call
    try:
        yield
    finally:
        for home, original in used.items():
            vars(home)["functional_call"] = original


def onnx_difference(
    data: bytes, predictor: Predictor, images: Sequence[Image.Image], pixels: Tensor, batch: int
) -> str:
    """Why the file is not the model, or ""; `batch`: images at a time, 0 for any number."""
    if importlib.util.find_spec("onnxruntime") is None:
        console.warn("onnxruntime is not installed: the ONNX file is not checked (pip install 'fedvlm[onnx]')")
        return ""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL  # errors are raised, too
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    parts = pixels.split(batch or len(pixels))
    theirs = np.concatenate([session.run(["probabilities"], {"pixels": p.numpy()})[0] for p in parts])
    ours = predictor.probabilities(images).numpy()
    if theirs.shape != ours.shape:
        return f"onnxruntime gives {theirs.shape}, and fedvlm {ours.shape}"
    worst = float(np.abs(theirs - ours).max())
    return "" if worst <= TOLERANCE else f"onnxruntime's probabilities differ from fedvlm's by {worst:.1g}"


def onnx_description(predictor: Predictor, steps: ImageSteps, batch: int) -> dict[str, object]:
    return {
        "classes": list(predictor.classes),
        "preprocessing": asdict(steps),
        "inputs": {"pixels": "uint8"},
        "outputs": ["logits", "probabilities"],
        "images_at_a_time": batch,  # 0: any number
        "opset": OPSET,
        "backbone": predictor.backbone.fingerprint,
        "model": predictor.whose,
    }
