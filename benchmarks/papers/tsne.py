"""t-SNE (van der Maaten and Hinton, 2008) of the shared model's features: training images and images of an unseen domain
(FFT-GP's Figure 7). Needs scikit-learn."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from fedvlm.predict.finished import Finished
from fedvlm.report.figures import Theme
from fedvlm.report.tsne import places
from papers.models import held_out, shared_features

MOST = 400  # images of each kind


def embedding(model: Finished, most: int = MOST) -> tuple[np.ndarray, np.ndarray]:
    """Places [images, 2], and whether an image is of the unseen domain."""
    data, draw = model.federation.data, np.random.default_rng(0)
    seen = [np.arange(low, high) for low, high in data.bounds[list(model.federation.seen), :2]]
    unseen = [np.arange(low, high) for low, high in held_out(model).bounds[:, 2:]]
    rows = [draw.permutation(np.concatenate(each))[:most] for each in (seen, unseen)]
    x = shared_features(model, data.x[np.concatenate(rows)])
    return places(x), np.repeat([False, True], [len(r) for r in rows])


def panel(ax: Axes, model: Finished, theme: Theme) -> None:
    at, unseen = embedding(model)
    for which, label, colour in ((~unseen, "training images", theme.colours[0]), (unseen, "unseen domain", "#c00")):
        ax.scatter(at[which, 0], at[which, 1], s=5, color=colour, label=label)
    ax.legend(frameon=False)
    ax.set_xticks([])
    ax.set_yticks([])
