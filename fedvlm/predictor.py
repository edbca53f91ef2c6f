"""Using what was learned: predictions from a run or an exported folder, and the export itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedvlm import backbones, own
from fedvlm.adapters.base import Adapter, HasLinearForm, Task
from fedvlm.backbones.base import Backbone, encode_view, tower_of
from fedvlm.config import Config, Setup
from fedvlm.core import Params, State, with_client_axis
from fedvlm.data.pool import class_phrases
from fedvlm.data.source import decode
from fedvlm.data.store import text_embeddings
from fedvlm.engines.rows import Rows
from fedvlm.errors import FedvlmError, nearest
from fedvlm.folder import RunFolder
from fedvlm.local.model import Model
from fedvlm.method import Method
from fedvlm.names import file_name
from fedvlm.records import MethodRecord, PartRecord
from fedvlm.tasks import SEGMENTATION

Picture = str | Path | Image.Image
EXPORT_FORMAT = 2
TEXT = "task.text"  # in adapter.safetensors: the class embeddings, beside the adapter's parameters
EXAMPLE = '''"""Load this folder and classify images: python example.py image.jpg …"""

import sys
from pathlib import Path

import fedvlm

model = fedvlm.load(Path(__file__).parent)
for path, (name, probability) in zip(sys.argv[1:], model.predict(sys.argv[1:])):
    print(path, name, round(probability, 3))
'''


@dataclass
class Predictor:
    """A frozen backbone, an adapter on it, and whose parameters it has."""

    backbone: Backbone
    model: Model
    params: Params
    whose: str  # "shared", or a client's name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.model.task.classes

    @cached_property
    def prepared(self) -> Params:
        """The parameters, with what does not depend on images computed once."""
        with torch.no_grad():
            return self.model.adapter.prepare(self.model.task, with_client_axis(self.params), {})

    @torch.no_grad()
    def probabilities(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """[images, classes] or, for segmentation, the probability of each pixel to be inside the mask."""
        x = encode_view(self.backbone, [i.convert("RGB") for i in images], self.model.adapter.view)
        logits = self.model.logits(self.prepared, x[None])[0]
        return logits.sigmoid() if self.model.adapter.task_type is SEGMENTATION else logits.softmax(-1)

    def masks(self, images: Sequence[Picture]) -> list[Image.Image]:
        """White inside, each as large as its image."""
        out = []
        for image in images:
            shown = opened(image)
            inside = (self.probabilities([shown])[0] * 255).round().to(torch.uint8).numpy()
            whole = Image.fromarray(inside).resize(shown.size, Image.Resampling.BILINEAR)
            out.append(whole.point(lambda grey: 255 * (grey > 127)))
        return out

    def predict(self, images: Picture | Sequence[Picture], batch: int = 64) -> list[tuple[str, float]]:
        """(class, probability) for each image or path; for segmentation, the share of the image inside the mask."""
        given = [images] if isinstance(images, str | Path | Image.Image) else list(images)
        out: list[tuple[str, float]] = []
        for first in range(0, len(given), batch):
            found = self.probabilities([opened(i) for i in given[first : first + batch]])
            if self.model.adapter.task_type is SEGMENTATION:
                out += [("inside", float(p)) for p in (found > 0.5).float().mean((-2, -1))]
                continue
            best = found.max(-1)
            out += [(self.classes[c], float(p)) for p, c in zip(best.values, best.indices, strict=True)]
        return out


def opened(image: Picture) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    try:
        return decode(Path(image).read_bytes())
    except (ValueError, OSError) as error:
        raise FedvlmError(f"{image}: {error}") from error


def from_run(run: RunFolder, client: str = "", backbone: Backbone | None = None) -> Predictor:
    """The shared model, or with `client` that client's own."""
    record, saved = run.record, run.load()
    setup = run.setup()
    if saved is None:
        raise FedvlmError(f"{run.folder} has no saved state yet")
    if setup.adapter.view == "text":
        raise FedvlmError(f"{run.folder} learned to continue text; predict and export are for images")
    if record.backbone.name == "embeddings":
        raise FedvlmError(f"{run.folder} was trained on given embeddings; use run.parameters() with your own encoder")
    state, round = saved
    encoder = backbone or backbones.load(record.backbone.name)
    check_fingerprint(encoder, record.backbone.fingerprint, str(run.folder))
    phrases = class_phrases(setup.config.template, record.data.classes)
    text = text_embeddings(encoder, list(phrases)) if encoder.dim else None
    tower = tower_of(encoder, setup.adapter.requires)
    task = Task(tuple(record.data.classes), text, encoder.dim, encoder.scale, tower, phrases=phrases)
    task = task._replace(nouns=tuple(record.data.nouns))
    method = Method.build(setup.adapter, setup.local, setup.merge, task, setup.config.seed)
    if not client and not method.has_shared_model:
        names = ", ".join(record.clients)
        raise FedvlmError(
            f"this run shares nothing, so there is no model for a newcomer; give --client, one of {names}"
        )
    row = private_row(run, state, client, round) if client else with_client_axis(state.private)
    message = state.message()
    method = method.for_message(message)
    params = method.or_shared(row, method.local.personal(row, with_client_axis(message.shared)))
    return Predictor(encoder, method.model, {k: v[0] for k, v in params.items()}, client or "shared")


def check_fingerprint(backbone: Backbone, fingerprint: str, what: str) -> None:
    if backbone.fingerprint != fingerprint:
        raise FedvlmError(
            f"{what}: backbone {backbone.name} is not the one this was trained on (its fingerprint differs); give the same "
            "weights, or train again"
        )


def private_row(run: RunFolder, state: State, client: str, round: int) -> Params:
    """A client's own row, from the run's rows or from the client's folder (engine=loopback); a new client's where there is
    none."""
    names = run.record.clients
    if client not in names:
        raise FedvlmError(f"--client {client}: no such client in this run; {nearest(client, names)}")
    alone, together = run.folder / "clients" / file_name(client) / "rows.bin", run.folder / "rows.bin"
    if alone.exists():
        return Rows(state.private, 1, alone).read(np.array([0]), round)
    if together.exists():
        return Rows(state.private, len(names), together).read(np.array([names.index(client)]), round)
    return with_client_axis(state.private)


def export(run: RunFolder, folder: Path, client: str = "", backbone: Backbone | None = None) -> list[str]:
    """Writes a folder that needs no run: the adapter, its settings and code, and an example; returns the files' names."""
    predictor = from_run(run, client, backbone)
    record, task = run.record, predictor.model.task
    if folder.exists() and any(folder.iterdir()):
        raise FedvlmError(f"{folder} is not empty; export to a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "format": EXPORT_FORMAT,
        "adapter": asdict(record.adapter),
        "classes": task.classes,
        "nouns": task.nouns,
        "phrases": task.phrases,
        "dim": task.dim,
        "scale": task.scale,
        "backbone": asdict(record.backbone),
        "whose": predictor.whose,
        "method": asdict(record.method),
        "identity": record.identity,
        "versions": record.versions,
    }
    (folder / "config.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    frozen = {} if task.text is None else {TEXT: task.text.contiguous()}
    save_file({k: v.contiguous() for k, v in predictor.params.items()} | frozen, folder / "adapter.safetensors")
    (folder / "example.py").write_text(EXAMPLE, encoding="utf-8")
    written = ["config.json", "adapter.safetensors", "example.py"]
    if record.adapter.code:
        own.stored(run.folder / "code" / "adapter", record.adapter.code).write(folder / "code" / "adapter")
        written.append("code/adapter")
    if isinstance(predictor.model.adapter, HasLinearForm):
        weight = predictor.model.adapter.to_linear(task, predictor.params)
        meta = {"classes": json.dumps(task.classes), "use": "logits = normalised image embedding @ weight.T"}
        save_file({"weight": weight.contiguous()}, folder / "classifier.safetensors", meta)
        written.append("classifier.safetensors")
    return written


def load(folder: str | Path, backbone: Backbone | None = None) -> Predictor:
    """What `export` wrote, ready to predict; `backbone` replaces the recorded one, which must have the same weights."""
    folder = Path(folder)
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        params = load_file(folder / "adapter.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise FedvlmError(f"{folder} is no exported model: {error}") from error
    if about.get("format") != EXPORT_FORMAT:
        raise FedvlmError(f"{folder} was exported by another version of fedvlm; export the run again")
    encoder = backbone or backbones.load(about["backbone"]["name"])
    check_fingerprint(encoder, about["backbone"]["fingerprint"], str(folder))
    adapter = adapter_of(PartRecord(**about["adapter"]), folder)
    text = params.pop(TEXT, None)
    tower = tower_of(encoder, adapter.requires)
    task = Task(tuple(about["classes"]), text, about["dim"], about["scale"], tower)
    task = task._replace(nouns=tuple(about["nouns"]), phrases=tuple(about["phrases"]))
    return Predictor(encoder, Model(adapter, task), params, about["whose"])


def adapter_of(part: PartRecord, folder: Path) -> Adapter:
    codes = {"adapter": own.stored(folder / "code" / "adapter", part.code)} if part.code else {}
    return Setup(MethodRecord("export"), Config(), {"adapter": part}, codes=codes).adapter
