"""Using what was learned: predictions from a run or an exported folder, and the export itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fedvlm import backbones
from fedvlm.adapters.base import Task
from fedvlm.backbones.base import Backbone, look, towers
from fedvlm.config import resolve
from fedvlm.core import FedvlmError, Params, lift
from fedvlm.data.federation import in_words
from fedvlm.engines.rows import Rows
from fedvlm.errors import nearest
from fedvlm.evaluate.protocols import OPEN
from fedvlm.local.model import Model
from fedvlm.method import Method
from fedvlm.parts import find
from fedvlm.runs import Run
from fedvlm.tasks import MASKS

EXAMPLE = '''"""Load this folder and classify images: python example.py image.jpg …"""

import sys

import fedvlm

model = fedvlm.load(__file__.rsplit("/", 1)[0] if "/" in __file__ else ".")
for path, (name, probability) in zip(sys.argv[1:], model.predict(sys.argv[1:])):
    print(path, name, round(probability, 3))
'''


@dataclass
class Predictor:
    """A frozen backbone, an adapter on it, and whose parameters they are."""

    backbone: Backbone
    model: Model
    params: Params
    whose: str  # "shared", or a client's name

    @cached_property
    def ready(self) -> Params:
        """The parameters, and what needs no image worked out once: words."""
        with torch.no_grad():
            return self.model.adapter.read(self.model.task, lift(self.params), {})

    @torch.no_grad()
    def probabilities(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Of each class or, where masks are learned, of each pixel to be inside."""
        x = look(self.backbone, [i.convert("RGB") for i in images], self.model.adapter.reads)
        found = self.model.logits(self.ready, x[None])[0]
        return found.sigmoid() if self.model.adapter.learns is MASKS else found.softmax(-1)

    def masks(self, images: Sequence[str | Path | Image.Image]) -> list[Image.Image]:
        """White inside, each as large as its image."""
        out = []
        for image in images:
            shown = image if isinstance(image, Image.Image) else read(Path(image))
            inside = (self.probabilities([shown])[0] * 255).round().to(torch.uint8).numpy()
            whole = Image.fromarray(inside).resize(shown.size, Image.Resampling.BILINEAR)
            out.append(whole.point(lambda grey: 255 * (grey > 127)))
        return out

    def predict(self, images: Sequence[str | Path | Image.Image], batch: int = 64) -> list[tuple[str, float]]:
        """(class, probability) for each image or path; where masks are learned, the share of it that is inside."""
        out: list[tuple[str, float]] = []
        for first in range(0, len(images), batch):
            part = [i if isinstance(i, Image.Image) else read(Path(i)) for i in images[first : first + batch]]
            if self.model.adapter.learns is MASKS:
                out += [("inside", float(p)) for p in (self.probabilities(part) > 0.5).float().mean((-2, -1))]
                continue
            best = self.probabilities(part).max(-1)
            out += [(self.model.task.classes[c], float(p)) for p, c in zip(best.values, best.indices, strict=True)]
        return out


def read(path: Path) -> Image.Image:
    from fedvlm.data.source import decode

    try:
        return decode(path.read_bytes())
    except (ValueError, OSError) as error:
        raise FedvlmError(f"{path}: {error}") from error


def setup_of(info: dict[str, Any]):
    """The setup that a run folder records."""
    given = {k: v for k, v in info["given"].items() if k not in ("protocol", "seeds", "out", "jobs")}
    given |= {"protocol": OPEN} if info["config"].get("protocol") == OPEN else {}
    return resolve(info["recipe"], given | {"seed": info["config"]["seed"], "unseen": info["config"]["unseen"]})


def from_run(run: Run, client: str = "") -> Predictor:
    """The shared model, or with `client` that client's own."""
    info, saved = run.info, run.load()
    if saved is None:
        raise FedvlmError(f"{run.folder} has no saved state yet")
    state, round = saved
    setup = setup_of(info)
    if setup.adapter.reads == "text":
        raise FedvlmError(f"{run.folder} learned to continue text; predict and export are for images")
    backbone = backbones.load(setup.config.backbone)
    classes = info["data"]["classes"]
    phrases = in_words(setup.config.template, classes)
    text = backbone.texts(phrases) if backbone.dim else None
    task = Task(tuple(classes), text, backbone.dim, backbone.scale, towers(backbone, setup.adapter.needs))
    task = task._replace(nouns=tuple(info["data"].get("nouns", ())), phrases=phrases)
    method = Method.build(setup.adapter, setup.local, setup.merge, task, setup.config.seed)
    names = info["clients"]
    if client and client not in names:
        raise FedvlmError(f"--client {client}: no such client in this run; {nearest(client, names)}")
    if not client and not method.generalises:
        raise FedvlmError(
            f"this run shares nothing, so there is no model for a newcomer; give --client, one of {', '.join(names)}"
        )
    own = lift(state.private)
    if client:
        own = private_row(run, method, names, client, round) or own
    method, shared = method.told(state.shared)
    params = method.met(own, method.local.personal(own, lift(shared)))
    return Predictor(backbone, method.model, {k: v[0] for k, v in params.items()}, client or "shared")


def private_row(run: Run, method: Method, names: list[str], client: str, round: int) -> Params:
    alone = run.folder / "clients" / client / "rows.bin"
    if alone.exists():
        return Rows(method.newcomer, 1, alone).read(np.array([0]), round)
    if (run.folder / "rows.bin").exists():
        return Rows(method.newcomer, len(names), run.folder / "rows.bin").read(np.array([names.index(client)]), round)
    return {}


def export(run: Run, folder: Path, client: str = "") -> list[str]:
    """A folder that needs no run: the adapter, what it needs to know, and a loading example. What was written."""
    predictor = from_run(run, client)
    info, task = run.info, predictor.model.task
    if folder.exists() and any(folder.iterdir()):
        raise FedvlmError(f"{folder} is not empty; export to a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    axis = info["config"]["adapter"]
    about = {
        "adapter": axis,
        "classes": task.classes,
        "nouns": task.nouns,
        "dim": task.dim,
        "scale": task.scale,
        "backbone": info["backbone"]["name"],
        "template": info["config"]["template"],
        "whose": predictor.whose,
        "method": info["method"],
        "identity": info["identity"],
        "versions": info["versions"],
    }
    (folder / "config.json").write_text(json.dumps(about, indent=1))
    frozen = {} if task.text is None else {"task.text": task.text.contiguous()}
    save_file({k: v.contiguous() for k, v in predictor.params.items()} | frozen, folder / "adapter.safetensors")
    (folder / "example.py").write_text(EXAMPLE)
    written = ["config.json", "adapter.safetensors", "example.py"]
    plain = predictor.model.adapter.fold(task, predictor.params)
    if plain is not None:
        meta = {"classes": json.dumps(task.classes), "use": "logits = normalised image embedding @ weight.T"}
        save_file({"weight": plain.contiguous()}, folder / "classifier.safetensors", meta)
        written.append("classifier.safetensors")
    return written


def load(folder: str | Path) -> Predictor:
    """What `fedvlm export` wrote, ready to predict."""
    folder = Path(folder)
    try:
        about = json.loads((folder / "config.json").read_text())
        params = load_file(folder / "adapter.safetensors")
    except OSError as error:
        raise FedvlmError(f"{folder} is no exported model: {error}") from error
    name, mark = about["backbone"].rsplit("@", 1)
    backbone = backbones.load(name)
    if backbone.fingerprint != mark:
        raise FedvlmError(f"backbone {name} is not the one this adapter was trained on (its fingerprint differs)")
    (axis, fields), *_ = about["adapter"].items()
    kind = find("adapter", axis)
    adapter = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    text = params.pop("task.text", None)
    task = Task(tuple(about["classes"]), text, about["dim"], about["scale"], towers(backbone, adapter.needs))
    phrases = in_words(about["template"], about["classes"])
    task = task._replace(nouns=tuple(about.get("nouns", ())), phrases=phrases)
    return Predictor(backbone, Model(adapter, task), params, about["whose"])
