"""Pictures of trained models, one panel for each run: what a run's record does not hold is computed from its models.

A picture of another kind is a file beside this one with a function panel(ax, model, theme), and its name in
manifest.py (FIGURES)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedvlm.core.copies import COPY, STARTED
from fedvlm.core.data import SPLITS, Data
from fedvlm.core.state import Params, with_client_axis
from fedvlm.errors import FedvlmError
from fedvlm.parts.metrics.loss import Loss
from fedvlm.predict.finished import Finished
from fedvlm.report.figures import LIGHT, Picture, Theme
from fedvlm.rounds.steps.predict import one_model, sums

Panel = Callable[[Axes, Finished, Theme], None]
SIZE = 3.4  # inches of a panel


class Named(NamedTuple):
    title: str
    model: Finished


def draw(panel: Panel, models: Sequence[Named]) -> Picture:
    """One panel for each model, in a row."""
    with styled():
        picture = Picture(figsize=(SIZE * len(models), SIZE), layout=ConstrainedLayoutEngine())
        axes = picture.subplots(1, len(models), squeeze=False)[0]
        for ax, (title, model) in zip(axes, models, strict=True):
            panel(ax, model, LIGHT)
            ax.set_title(title)
        return settled(picture)


def settled(picture: Picture) -> Picture:
    """Draws it once: matplotlib creates ticks on the first draw, with the settings of that moment."""
    picture.draw_without_rendering()
    return picture


def styled() -> AbstractContextManager[None]:
    """matplotlib's settings of our pictures, for the duration of a `with` block."""
    muted = LIGHT.muted
    own = {"font.size": 8.5, "text.parse_math": False, "text.color": LIGHT.text, "axes.titlelocation": "left"}
    own |= {"axes.spines.top": False, "axes.spines.right": False, "axes.labelcolor": LIGHT.text}
    own |= {"axes.edgecolor": muted, "xtick.color": muted, "ytick.color": muted}
    return matplotlib.rc_context(own)


def client_models(model: Finished) -> Params:
    """The shared parameters as each client trained them last, [clients, …], of the clients that trained."""
    copies = {k: model.rows[COPY + k] for k in model.state.shared if COPY + k in model.rows}
    if not copies:
        raise FedvlmError("this picture needs each client's own model; run the method with keep=true")
    return {k: v[trained(model)] for k, v in copies.items()}


def trained(model: Finished) -> list[int]:
    """The clients that have a model of their own."""
    return [int(i) for i in torch.nonzero(model.rows[STARTED] > 0).flatten()]


def as_shared(model: Finished, shared: Params) -> Params:
    """The parameters of a new client's model whose shared parameters are these."""
    return model.method.shared_model(replace(model.state.message(), shared=shared))


def of_clients(model: Finished, which: Sequence[int]) -> Data:
    data = model.federation.data
    return replace(data, bounds=data.bounds[list(which)], ids=data.ids[list(which)])


@torch.no_grad()
def loss(model: Finished, shared: Params, data: Data, split: str = "test") -> float:
    """The mean loss of a model with these shared parameters on all examples of a split."""
    at, found = SPLITS.index(split), model.method.model
    params = found.adapter.prepare(found.task, as_shared(model, shared), {})
    total = sums(found, one_model(found, params, data), [Loss()], 3 * len(data))[0][:, at].sum()
    return float(total / max(1, int(np.diff(data.bounds, axis=1)[:, at].sum())))


def held_out(model: Finished) -> Data:
    if not model.federation.unseen:
        raise FedvlmError("this picture is of an unseen domain; run the method with unseen=DOMAIN")
    return of_clients(model, model.federation.unseen)


def shared_features(model: Finished, x: torch.Tensor) -> np.ndarray:
    """The shared model's image features, [examples, dim]."""
    method = model.method
    params = as_shared(model, model.state.shared)
    with torch.no_grad():
        blocks = [method.adapter.features(method.task, params, part[None])[0] for part in x.split(64)]
    return torch.cat(blocks).double().cpu().numpy()


def flat(params: Params) -> torch.Tensor:
    """[clients, …] as one vector for each client."""
    return torch.cat([v.flatten(1).double() for v in params.values()], dim=1)


def unflat(vector: torch.Tensor, like: Params) -> Params:
    parts = vector.split([v.numel() for v in like.values()])
    return {k: part.view_as(v).to(v.dtype) for (k, v), part in zip(like.items(), parts, strict=True)}


def one_row(shared: Params) -> torch.Tensor:
    return flat(with_client_axis(shared))[0]
