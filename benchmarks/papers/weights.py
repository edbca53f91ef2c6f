"""How a client's generalisation gap follows its weight in the mean (FFT-GP's Figure 2).

For each client i the weights become a_i + Δ and, of the others, (1 − a_i − Δ)/(1 − a_i) times what they were; ΔG is the
change of the averaged model's loss on the client's validation images (its own model's loss does not change). The legend
has the slope K of the line through the points, and Pearson's correlation ρ.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes

from fedvlm.predict.finished import Finished
from fedvlm.report.figures import Theme
from papers.models import client_models, flat, loss, of_clients, trained, unflat

CHANGES = np.linspace(-0.15, 0.15, 7)


def moved(weights: np.ndarray, client: int, change: float) -> np.ndarray:
    """Weights whose sum stays 1."""
    out: np.ndarray = weights * (1 - weights[client] - change) / (1 - weights[client])
    out[client] = weights[client] + change
    return out


def gaps(model: Finished) -> dict[str, np.ndarray]:
    """By client, the change of its gap at CHANGES of its weight, from equal weights."""
    vectors = flat(client_models(model))
    even, out = np.full(len(vectors), 1 / len(vectors)), {}
    for i, client in enumerate(trained(model)):
        data = of_clients(model, [client])
        mixed = [torch.from_numpy(moved(even, i, float(d))) @ vectors for d in (0.0, *CHANGES)]
        losses = [loss(model, unflat(v, model.state.shared), data, "val") for v in mixed]
        out[model.federation.names[client]] = np.array(losses[1:]) - losses[0]
    return out


def panel(ax: Axes, model: Finished, theme: Theme) -> None:
    for (name, change), colour in zip(gaps(model).items(), theme.colours * 9, strict=False):
        slope = np.polyfit(CHANGES, change, 1)[0]
        with np.errstate(invalid="ignore"):
            agreement = np.corrcoef(CHANGES, change)[0, 1]
        ax.plot(CHANGES, change, "o-", ms=3, color=colour, label=f"{name}: K {slope:.2g}, ρ {agreement:.2f}")
    ax.legend(frameon=False, fontsize=7)
    ax.set_xlabel("change of the client's weight")
    ax.set_ylabel("change of its gap")
