"""Using what was learned: predictions from a run or an exported folder, and the export itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedvlm import backbones, files, own
from fedvlm.adapters.base import Adapter, HasLinearForm, Task
from fedvlm.backbones.base import Backbone, encode_view, tower_of
from fedvlm.config import Config, Setup
from fedvlm.core import Params, State, with_client_axis
from fedvlm.data.images import decode, read_file, too_many
from fedvlm.data.pool import class_phrases
from fedvlm.data.store import text_embeddings
from fedvlm.engines.rows import Rows
from fedvlm.errors import FedvlmError, nearest
from fedvlm.folder import RunFolder
from fedvlm.local.model import Model
from fedvlm.method import Method
from fedvlm.names import file_name, printable
from fedvlm.parts import AXES
from fedvlm.records import ExportRecord, read_text
from fedvlm.tasks import SEGMENTATION
from fedvlm.trust import PREDICTS, admitted

Picture = str | Path | Image.Image
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
        for part in in_batches(map(opened, given), batch):
            found = self.probabilities(part)
            if self.model.adapter.task_type is SEGMENTATION:
                out += [("inside", float(p)) for p in (found > 0.5).float().mean((-2, -1))]
                continue
            best = found.max(-1)
            out += [(self.classes[c], float(p)) for p, c in zip(best.values, best.indices, strict=True)]
        return out


def in_batches(images: Iterable[Image.Image], size: int) -> Iterator[list[Image.Image]]:
    """Of at most `size` images, and fewer where they are large."""
    batch: list[Image.Image] = []
    for image in images:
        if batch and (len(batch) == size or too_many([*batch, image])):
            yield batch
            batch = []
        batch.append(image)
    if batch:
        yield batch


def opened(image: Picture) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    try:
        return decode(read_file(Path(image)))
    except (ValueError, OSError) as error:
        raise FedvlmError(f"{image}: {error}") from error


def from_run(run: RunFolder, client: str = "", backbone: Backbone | None = None, trusted: bool = False) -> Predictor:
    """The shared model, or with `client` that client's own; `trusted`: see trust.py."""
    setup = run.setup(trusted, PREDICTS if backbone is None else AXES)
    record, saved = run.record, run.load()
    if saved is None:
        raise FedvlmError(f"{run.folder} has no saved state yet")
    if setup.adapter.view == "text":
        raise FedvlmError(f"{run.folder} learned to continue text; predict and export are for images")
    if record.backbone.name == "embeddings":
        raise FedvlmError(f"{run.folder} was trained on given embeddings; use run.parameters() with your own encoder")
    state, round = saved
    encoder = backbone or backbones.load(setup.config.backbone)
    check_fingerprint(encoder, record.backbone.fingerprint, str(run.folder))
    with fitting_together(run.folder):
        phrases = class_phrases(setup.config.template, record.data.classes)
        text = text_embeddings(encoder, list(phrases)) if encoder.dim else None
        tower = tower_of(encoder, setup.adapter.requires)
        task = Task(tuple(record.data.classes), text, encoder.dim, encoder.scale, tower, phrases=phrases)
        task = task._replace(nouns=tuple(record.data.nouns))
        method = Method.build(setup.adapter, setup.local, setup.merge, task, setup.config.seed)
    check_state(state, method, run.folder / "state.safetensors")
    if not client and not method.has_shared_model:
        names = ", ".join(map(printable, record.clients))
        raise FedvlmError(
            f"this run shares nothing, so there is no model for a newcomer; give --client, one of {names}"
        )
    row = private_row(run, state, client, round) if client else with_client_axis(state.private)
    check_params({k: v[0] for k, v in row.items()}, method.newcomer, f"{run.folder}, client {client}")
    message = state.message()
    method = method.for_message(message)
    params = method.or_shared(row, method.local.personal(row, with_client_axis(message.shared)))
    return Predictor(encoder, method.model, {k: v[0] for k, v in params.items()}, client or "shared")


@contextlib.contextmanager
def fitting_together(folder: Path) -> Iterator[None]:
    """Around what builds a model from a record that others may have written: settings of the right type can still be
    impossible, such as a width of −1."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AssertionError, MemoryError) as error:
        reason = f"{type(error).__name__}: {printable(error, 200)}"
        raise FedvlmError(f"{folder}: no model can be built from its settings ({reason})") from error


def check_state(state: State, method: Method, where: Path, first: State | None = None) -> None:
    """An error where a saved state is not one of this method; `first`: the state that a run starts from, to check what the
    server keeps too."""
    check_params(state.shared, method.initial, str(where))
    check_params(state.private, method.newcomer, str(where))
    if state.task:  # class embeddings that the server trained
        tasks = {"text": method.task, "novel": method.task.novel}
        frozen = {k: task.names() for k, task in tasks.items() if task is not None}
        check_params({k: v for k, v in state.task.items() if k in frozen}, frozen, str(where))
    if first:
        kept = {k: v for k, v in state.server.items() if k in first.server}
        check_params(kept, first.server, str(where), finite=False)


def check_params(found: Params, expected: Params, where: str, finite: bool = True) -> None:
    """An error where names, shapes, types or numbers are not what the adapter expects."""
    odd = sorted(found.keys() ^ expected.keys())
    if odd:
        raise FedvlmError(f"{where} holds other parameters than its adapter has: {', '.join(odd[:5])}")
    for name, wanted in expected.items():
        value = found[name]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise FedvlmError(
                f"{where} holds {name} as {tuple(value.shape)} {value.dtype}, and its adapter has "
                f"{tuple(wanted.shape)} {wanted.dtype}"
            )
        if finite and not value.isfinite().all():
            raise FedvlmError(f"{where} holds {name} with numbers that are not finite")


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
        raise FedvlmError(f"--client {client}: no such client in this run; {nearest(client, map(printable, names))}")
    alone, together = run.folder / "clients" / file_name(client) / "rows.bin", run.folder / "rows.bin"
    if alone.exists():
        return Rows(state.private, 1, alone).read(np.array([0]), round)
    if together.exists():
        return Rows(state.private, len(names), together).read(np.array([names.index(client)]), round)
    if state.private and round:
        raise FedvlmError(f"{run.folder} has no rows.bin, so that {client}'s own model is lost; use the shared one")
    return with_client_axis(state.private)


def export(
    run: RunFolder, folder: Path, client: str = "", backbone: Backbone | None = None, trusted: bool = False
) -> list[str]:
    """Writes a folder that needs no run: the adapter, its settings and code, and an example; returns the files' names."""
    predictor = from_run(run, client, backbone, trusted)
    record, task = run.record, predictor.model.task
    about = ExportRecord(
        adapter=record.adapter,
        classes=list(task.classes),
        nouns=list(task.nouns),
        phrases=list(task.phrases),
        dim=task.dim,
        scale=task.scale,
        backbone=record.backbone,
        whose=predictor.whose,
        method=record.method,
        identity=record.identity,
        versions=record.versions,
    )
    written = ["config.json", "adapter.safetensors", "example.py"]
    with files.writing(folder):
        if folder.exists() and any(folder.iterdir()):
            raise FedvlmError(f"{folder} is not empty; export to a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / "config.json", about.to_json())
        frozen = {} if task.text is None else {TEXT: task.text.contiguous()}
        params = save({k: v.contiguous() for k, v in predictor.params.items()} | frozen)
        files.write(folder / "adapter.safetensors", params, private=bool(client))
        files.write(folder / "example.py", EXAMPLE)
        if record.adapter.code:
            own.stored(run.folder / "code" / "adapter", record.adapter.code).write(folder / "code" / "adapter")
            written.append("code/adapter")
        if isinstance(predictor.model.adapter, HasLinearForm):
            weight = predictor.model.adapter.to_linear(task, predictor.params)
            meta = {"classes": json.dumps(task.classes), "use": "logits = normalised image embedding @ weight.T"}
            content = save({"weight": weight.contiguous()}, meta)
            files.write(folder / "classifier.safetensors", content, private=bool(client))
            written.append("classifier.safetensors")
    return written


def load(folder: str | Path, backbone: Backbone | None = None, trusted: bool = False) -> Predictor:
    """What `export` wrote, ready to predict; `backbone` replaces the recorded one, which must have the same weights."""
    folder = Path(folder)
    weights = folder / "adapter.safetensors"
    try:
        about = ExportRecord.from_json(read_text(folder / "config.json"))
    except (OSError, ValueError) as error:
        raise FedvlmError(
            f"{folder} is no exported model of this version of fedvlm ({printable(error, 200)})"
        ) from error
    adapter = adapter_of(about, folder, backbone is None, trusted)
    encoder = backbone or backbones.load(about.backbone.name)
    check_fingerprint(encoder, about.backbone.fingerprint, str(folder))
    try:
        params = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise FedvlmError(f"{weights} is damaged ({printable(error, 200)}); export the run again") from error
    text = params.pop(TEXT, None)
    if text is not None:
        check_params({TEXT: text}, {TEXT: torch.empty(len(about.classes), about.dim)}, str(weights))
    with fitting_together(folder):
        tower = tower_of(encoder, adapter.requires)
        task = Task(tuple(about.classes), text, about.dim, about.scale, tower)
        task = task._replace(nouns=tuple(about.nouns), phrases=tuple(about.phrases))
        expected = adapter.init(task, 0)
    check_params(params, expected, str(weights))
    return Predictor(encoder, Model(adapter, task), params, about.whose)


def adapter_of(about: ExportRecord, folder: Path, with_backbone: bool, trusted: bool) -> Adapter:
    part = about.adapter
    codes = {"adapter": own.stored(folder / "code" / "adapter", part.code)} if part.code else {}
    setup = Setup(about.method, Config(backbone=about.backbone.name), {"adapter": part}, codes=codes)
    return admitted(setup, folder, trusted, PREDICTS if with_backbone else AXES).adapter
