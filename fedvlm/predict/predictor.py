"""Using what was learned: predictions with a run's models. Exported folders: predict/export/folder.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedvlm import backbones
from fedvlm.backbones.alone import each_alone, encoder_threads
from fedvlm.backbones.base import Backbone, encode_view
from fedvlm.config.trust import PREDICTS
from fedvlm.core.model import Model
from fedvlm.core.records import RoundRecord, Scores
from fedvlm.core.state import Params, State, with_client_axis
from fedvlm.core.tasks import SEGMENTATION
from fedvlm.data.formats.arrays import as_array, as_image, as_images
from fedvlm.data.images import decode, read_file, too_many
from fedvlm.data.pool import task_of
from fedvlm.engines.rows import Rows
from fedvlm.errors import FedvlmError, nearest
from fedvlm.evaluation.protocols import FAR_BELOW
from fedvlm.parts.registry import AXES
from fedvlm.rounds.method import Method
from fedvlm.system import console
from fedvlm.system.names import file_name, printable
from fedvlm.training.folder import RunFolder
from fedvlm.training.saved import check_params, check_state

Picture = str | Path | Image.Image | np.ndarray | torch.Tensor


@dataclass
class Predictor:
    """A frozen backbone, an adapter on it, and whose parameters it has."""

    backbone: Backbone
    model: Model
    params: Params
    whose: str  # "shared", or a client's name

    def __repr__(self) -> str:
        return f"Predictor({self.whose} model, {len(self.classes)} classes, backbone {self.backbone.name})"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.model.task.classes

    @cached_property
    def prepared(self) -> Params:
        """The parameters, with what does not depend on images computed once."""
        with torch.no_grad(), encoder_threads(1):
            return self.model.adapter.prepare(self.model.task, with_client_axis(self.params), {})

    def probabilities(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """[images, classes] or, for segmentation, the probability of each pixel to be inside the mask. An image's do not
        depend on the images beside it."""
        x = encode_view(self.backbone, [i.convert("RGB") for i in images], self.model.adapter.view)
        model, params = self.model, self.prepared

        def found(row: torch.Tensor) -> torch.Tensor:
            logits = model.logits(params, row[None, None].clone())[0]  # its place in memory may matter to a product
            return logits.sigmoid() if model.adapter.task_type is SEGMENTATION else logits.softmax(-1)

        return each_alone(lambda rows: torch.cat([found(row) for row in rows]), list(x))

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
        return [found[0] for found in self.top(images, 1, batch)]

    def top(
        self, images: Picture | Sequence[Picture], count: int = 5, batch: int = 64
    ) -> list[list[tuple[str, float]]]:
        """The most probable classes of each image or path, best first: (class, probability)."""
        array = as_array(images)
        if array is not None:
            images = list(as_images(array) if array.ndim == 4 else [as_image(array)])
        given = [images] if isinstance(images, str | Path | Image.Image) else list(images)
        out: list[list[tuple[str, float]]] = []
        for part in in_batches(map(opened, given), batch):
            found = self.probabilities(part)
            if self.model.adapter.task_type is SEGMENTATION:
                out += [[("inside", float(p))] for p in (found > 0.5).float().mean((-2, -1))]
                continue
            best = found.topk(min(count, len(self.classes)), dim=-1)
            for values, places in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                out.append([(self.classes[c], p) for c, p in zip(places, values, strict=True)])
        return out


def in_batches(images: Iterable[Image.Image], size: int) -> Iterator[list[Image.Image]]:
    """Batches of at most `size` images, and fewer where they are large."""
    batch: list[Image.Image] = []
    for image in images:
        if batch and (len(batch) == size or too_many([*batch, image])):
            yield batch
            batch = []
        batch.append(image)
    if batch:
        yield batch


def opened(image: Picture) -> Image.Image:
    if not isinstance(image, str | Path):
        return as_image(image)
    try:
        return decode(read_file(Path(image)))
    except (ValueError, OSError) as error:
        raise FedvlmError(f"{image}: {error}") from error


def from_run(run: RunFolder, client: str = "", backbone: Backbone | None = None) -> Predictor:
    """The shared model, or with `client` that client's own."""
    setup = run.setup(PREDICTS if backbone is None else AXES)
    record, saved = run.record, run.load()
    if saved is None:
        raise FedvlmError(f"{run.folder} has no saved state yet")
    if setup.adapter.view == "text":
        raise FedvlmError(f"{run.folder} learned to continue text; predict and export are for images")
    if record.backbone.name == "embeddings":
        raise FedvlmError(f"{run.folder} was trained on given embeddings; use run.parameters() with your own encoder")
    if setup.config.centre == "own":
        raise FedvlmError(
            f"{run.folder} was trained with centre=own, and one image has no mean to take off; use centre=none"
        )
    if not client and (doubt := far_below(recorded_scores(run))):
        held_out = record.result.unseen if record.result else record.unseen
        able = [printable(c) for c in record.clients if c not in held_out]
        names = ", ".join(able[:3]) + (", …" if len(able) > 3 else "")
        console.warn(f"{run.folder}: {doubt}; for one of those give --client NAME (in Python: client=NAME), of {names}")
    state, round = saved
    encoder = backbone or backbones.load(setup.config.backbone)
    check_fingerprint(encoder, record.backbone.fingerprint, str(run.folder))
    with fitting_together(run.folder):
        task = task_of(encoder, record.data.classes, setup.config.template, setup.adapter.requires)
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


def recorded_scores(run: RunFolder) -> Scores:
    """The test score of each view that the run recorded last; {} where none is recorded."""
    result = run.record.result
    rounds: list[RoundRecord] = [result.last] if result else [r for r in run.rounds() if "personal" in r]
    found: Scores = {}
    for view in ("shared", "personal", "newcomer") if rounds else ():
        scores: Scores = rounds[-1].get(view) or {}  # type: ignore[assignment]
        found |= {view: scores["test"]} if "test" in scores else {}
    return found


def far_below(scores: Scores) -> str:
    """A sentence where the shared model is far below the clients' own ones; "" where it is not."""
    shared, personal = scores.get("shared"), scores.get("personal")
    if shared is None or personal is None or personal - shared <= FAR_BELOW:
        return ""
    newcomer = scores.get("newcomer")
    new = "" if newcomer is None else f" (and {100 * newcomer:.1f} % on those of clients that nobody trained on)"
    return (
        f"this is the shared model, which scores {100 * shared:.1f} % on the clients' test images{new}, and their own "
        f"models score {100 * personal:.1f} %"
    )


@contextlib.contextmanager
def fitting_together(folder: Path) -> Iterator[None]:
    """Report what fails while a model is built from a record that others may have written: settings of the right type
    can still be impossible, such as a width of −1."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AssertionError, MemoryError) as error:
        reason = f"{type(error).__name__}: {printable(error, 200)}"
        raise FedvlmError(f"{folder}: no model can be built from its settings ({reason})") from error


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


def private_rows(run: RunFolder, state: State, round: int) -> Params:
    """The rows of all clients."""
    names, together = run.record.clients, run.folder / "rows.bin"
    if together.exists():
        return Rows(state.private, len(names), together).read(np.arange(len(names)), round)
    rows = [private_row(run, state, name, round) for name in names]
    return {k: torch.cat([row[k] for row in rows]) for k in state.private}
