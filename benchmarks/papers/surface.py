"""The loss on an unseen domain in a plane through the shared model and the clients' (FFT-GP's Figure 5, after GA).

The plane is spanned by the two main directions (principal components) of the clients' models around the shared one; a
cross is the shared model, dots are the clients'. A flat region around the cross is what GA and FAA look for.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes

from fedvlm.predict.finished import Finished
from fedvlm.report.figures import Theme
from papers.models import client_models, flat, held_out, loss, one_row, unflat

POINTS = 9  # along each axis
MARGIN = 1.3  # how far the plane reaches beyond the farthest model


def plane(model: Finished) -> tuple[torch.Tensor, torch.Tensor]:
    """Two orthonormal directions [2, parameters], and the clients' places along them [clients, 2]."""
    around = flat(client_models(model)) - one_row(model.state.shared)
    _, _, directions = torch.linalg.svd(around, full_matrices=False)
    axes = directions[:2]
    if len(axes) < 2:  # a single client: any direction is as good as another
        axes = torch.cat([axes, torch.zeros_like(axes)])
    return axes, around @ axes.T


def surface(model: Finished, points: int = POINTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places along one direction, the losses [points, points] there, and the clients' places."""
    axes, places = plane(model)
    reach = MARGIN * max(float(places.abs().max()), 1e-6)
    at, centre, data = np.linspace(-reach, reach, points), one_row(model.state.shared), held_out(model)
    found = [
        [loss(model, unflat(centre + u * axes[0] + v * axes[1], model.state.shared), data) for u in at] for v in at
    ]
    return at, np.array(found), places.numpy()


def panel(ax: Axes, model: Finished, theme: Theme) -> None:
    at, losses, places = surface(model)
    drawn = ax.contourf(at, at, losses, levels=12, cmap="viridis")
    ax.figure.colorbar(drawn, ax=ax, label="loss on the unseen domain")
    ax.scatter(places[:, 0], places[:, 1], color=theme.background, edgecolor=theme.text, s=24)
    ax.scatter([0], [0], color=theme.text, marker="x")
    ax.set_xlabel("first direction")
    ax.set_ylabel("second direction")
