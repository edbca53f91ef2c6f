"""An exported folder: written from a run, and loaded where neither the run nor its data is.

config.json (records.ExportRecord) · adapter.safetensors · README.md (the model card) · example.py · and as asked for or
possible: code/ (an adapter of the user's own) · classifier.safetensors · peft/ · backbone/ · model.onnx with model.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedvlm import backbones
from fedvlm.backbones.base import Backbone, tower_of
from fedvlm.config.config import Config, Setup
from fedvlm.config.trust import PREDICTS, admitted
from fedvlm.core.adapter import Adapter, HasLinearForm, Task
from fedvlm.core.model import Model
from fedvlm.core.records import ExportRecord, read_text
from fedvlm.core.state import aligned
from fedvlm.errors import FedvlmError
from fedvlm.parts import user_code
from fedvlm.parts.registry import AXES
from fedvlm.predict.export.card import card
from fedvlm.predict.export.peft import to_peft
from fedvlm.predict.export.weights import BACKBONE, copy_backbone, files_of
from fedvlm.predict.predictor import (
    Predictor,
    check_fingerprint,
    far_below,
    fitting_together,
    from_run,
    recorded_scores,
)
from fedvlm.system import console, files
from fedvlm.system.names import printable
from fedvlm.training.folder import RunFolder
from fedvlm.training.saved import check_params

TEXT = "task.text"  # in adapter.safetensors: the class embeddings, beside the adapter's parameters
EXAMPLE = '''"""Load this folder and classify images: python example.py image.jpg …"""

import sys
from pathlib import Path

import fedvlm

model = fedvlm.load(Path(__file__).parent)
for path, (name, probability) in zip(sys.argv[1:], model.predict(sys.argv[1:])):
    print(path, name, round(probability, 3))
'''


class Extras(NamedTuple):
    """What an export holds beside the adapter, where it is asked for."""

    backbone: bool = False  # the backbone's files
    onnx: bool = False  # image encoder and adapter in one ONNX file


def export(
    run: RunFolder,
    folder: Path,
    client: str = "",
    backbone: Backbone | None = None,
    extras: Extras = Extras(),  # noqa: B008 (it cannot be changed)
) -> list[str]:
    """Writes a folder that needs no run: the adapter, its settings and code, a card and an example; returns the files'
    names."""
    with files.writing(folder):
        if folder.exists() and any(folder.iterdir()):
            raise FedvlmError(f"{folder} is not empty; export to a new folder")
    predictor = from_run(run, client, backbone)
    if extras.backbone:
        files_of(predictor.backbone)  # an error before anything is written
    about = export_record(run, predictor)
    task = predictor.model.task
    content = {"config.json": about.to_json(), "README.md": card(run, about), "example.py": EXAMPLE}
    frozen = {} if task.text is None else {TEXT: task.text.contiguous()}
    tensors = {"adapter.safetensors": save({k: v.contiguous() for k, v in predictor.params.items()} | frozen)}
    if isinstance(predictor.model.adapter, HasLinearForm):
        weight = predictor.model.adapter.to_linear(task, predictor.params)
        meta = {"classes": json.dumps(task.classes), "use": "logits = normalised image embedding @ weight.T"}
        tensors["classifier.safetensors"] = save({"weight": weight.contiguous()}, meta)
    tensors |= to_peft(predictor)
    if extras.onnx:
        from fedvlm.predict.export.onnx import DESCRIPTION, MODEL, to_onnx

        model, description = to_onnx(predictor)
        tensors[MODEL], content[DESCRIPTION] = model, description
    with files.writing(folder):
        for name, text in content.items():
            files.write(folder / name, text)
        for name, data in tensors.items():
            files.write(folder / name, data, private=bool(client))
    written = [*content, *tensors]
    if about.adapter.code:
        user_code.stored_code(run.folder / "code" / "adapter", about.adapter.code).write(folder / "code" / "adapter")
        written.append("code/adapter")
    if extras.backbone:
        written += copy_backbone(predictor.backbone, folder / BACKBONE)
    return written


def export_record(run: RunFolder, predictor: Predictor) -> ExportRecord:
    record, task = run.record, predictor.model.task
    return ExportRecord(
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
        scores=recorded_scores(run),
    )


def read_record(folder: Path) -> ExportRecord:
    try:
        return ExportRecord.from_json(read_text(folder / "config.json"))
    except (OSError, ValueError) as error:
        raise FedvlmError(
            f"{folder} is no exported model of this version of fedvlm ({printable(error, 200)})"
        ) from error


@dataclass(frozen=True)
class Exported:
    """A folder that `export` wrote, and whether it may do what one from others would do here (trust.py)."""

    folder: Path
    about: ExportRecord
    trusted: bool

    @property
    def place(self) -> str:
        """The place of its backbone: inside the folder, or as recorded."""
        inside = self.folder / BACKBONE
        return str(inside) if inside.is_dir() else self.about.backbone.name

    def with_encoder(self, backbone: Backbone | None) -> tuple[Adapter, Backbone]:
        """The adapter, and the given backbone or its own."""
        adapter = self.adapter(AXES)  # whatever is wrong there, another backbone is no way out of it
        if backbone is not None:
            return adapter, backbone
        try:
            return self.adapter(PREDICTS), backbones.load(self.place)
        except FedvlmError as error:
            mark = printable(self.about.backbone.fingerprint, 40)
            raise FedvlmError(
                f"{error}. Or give the same weights (fingerprint {mark}) from another place: "
                "fedvlm.load(FOLDER, backbone=PLACE), `fedvlm predict FOLDER IMAGE --backbone PLACE`"
            ) from error

    def adapter(self, uses: tuple[str, ...]) -> Adapter:
        part = self.about.adapter
        codes = {"adapter": user_code.stored_code(self.folder / "code" / "adapter", part.code)} if part.code else {}
        setup = Setup(self.about.method, Config(backbone=self.place), {"adapter": part}, codes=codes)
        return admitted(setup, self.folder, self.trusted, uses).adapter


def load_export(folder: str | Path, backbone: Backbone | None = None, trusted: bool = False) -> Predictor:
    """What `export` wrote, ready to predict; `backbone` replaces the recorded one, which must have the same weights."""
    folder = Path(folder)
    weights = folder / "adapter.safetensors"
    about = read_record(folder)
    adapter, encoder = Exported(folder, about, trusted).with_encoder(backbone)
    check_fingerprint(encoder, about.backbone.fingerprint, str(folder))
    try:
        params = {k: aligned(v) for k, v in load_file(weights).items()}
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
    if about.whose == "shared" and (doubt := far_below(about.scores)):
        console.warn(f"{folder}: {doubt}; for one of those, export the run again with --client NAME")
    return Predictor(encoder, Model(adapter, task), params, about.whose)
