"""How similar images of each class are to each prompt: a heat map of mean cosines (FOCoOp's Figure 6).

Rows are the classes of test images, columns the shared model's class vectors and, where an adapter has them, its first
outsider prompts, as many as there are classes.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes

from fedvlm.core.adapter import TEXT_FEATURES, class_vectors
from fedvlm.predict.finished import Finished
from fedvlm.report.figures import Theme
from papers.models import as_shared, shared_features

MOST = 100  # images of a class


def similarities(model: Finished) -> np.ndarray:
    """[classes, prompts]: mean cosine of a class's test images and a prompt; NaN where there is no image."""
    method, data = model.method, model.federation.data
    params = method.adapter.prepare(method.task, as_shared(model, model.state.shared), {})
    with torch.no_grad():
        prompts = params.get(TEXT_FEATURES, None)
        prompts = class_vectors(method.adapter, method.task, params) if prompts is None else prompts
    classes = len(method.task.classes)
    text = torch.nn.functional.normalize(prompts[0, : 2 * classes].double().cpu(), dim=-1).numpy()
    test = np.concatenate([np.arange(low, high) for low, high in data.bounds[:, 2:]])
    labels, out = data.y[test].numpy(), np.full((classes, len(text)), np.nan)
    for c in range(classes):
        if len(rows := test[labels == c][:MOST]):
            x = shared_features(model, data.x[rows])
            out[c] = (x / np.linalg.norm(x, axis=-1, keepdims=True) @ text.T).mean(0)
    return out


def panel(ax: Axes, model: Finished, theme: Theme) -> None:
    found, classes = similarities(model), model.method.task.classes
    drawn = ax.imshow(found, cmap="viridis", aspect="auto")
    ax.figure.colorbar(drawn, ax=ax, label="mean cosine")
    if found.shape[1] > len(classes):
        ax.axvline(len(classes) - 0.5, color=theme.background)
    ax.set_xlabel("prompts: classes" + (", then outsiders" if found.shape[1] > len(classes) else ""))
    if len(classes) <= 20:
        ax.set_yticks(range(len(classes)), classes)
