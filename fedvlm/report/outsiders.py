"""Histogram of how sure the shared model is of test images and of outsiders (`fedvlm report --details`, runs with
outsiders=). The outputs of a run do not hold outsiders, so that this needs the run's data and backbone."""

from __future__ import annotations

import numpy as np
import torch

from fedvlm.core.detection import auroc
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.predict.finished import Finished, test_rows
from fedvlm.report.axes import Drawn
from fedvlm.report.svg import chart, hue
from fedvlm.rounds.steps.score import detection_scores
from fedvlm.training.folder import RunFolder

BINS = 20
SCORE = "mcm"  # the largest probability


def histogram(label: str, run: RunFolder, pools: Pools) -> Drawn | None:
    """None for runs without outsiders or without a shared model, and where their data or backbone are not here."""
    if not run.record.config.get("outsiders"):
        return None
    try:
        setup = run.setup()
        pool = pools.load(setup)
        if pool.fingerprint != run.record.data.fingerprint:
            return None
        model = Finished.of(run, setup, pool)
    except FedvlmError:
        return None
    if not model.method.has_shared_model:
        return None
    data = model.tested.data
    inside = sure(model, data.x[torch.from_numpy(test_rows(data))])
    return outsider_chart(label, inside, sure(model, pool.extras["outsiders"].x))


@torch.no_grad()
def sure(model: Finished, x: torch.Tensor) -> np.ndarray:
    message = model.state.message()
    method = model.method.for_message(message)
    params = method.adapter.prepare(method.task, method.shared_model(message), {})
    blocks = x.split(method.adapter.limits.examples)
    found = [detection_scores(method.model, params, part[None])[SCORE][0].cpu() for part in blocks]
    return torch.cat(found).double().numpy()


def outsider_chart(label: str, inside: np.ndarray, outside: np.ndarray) -> Drawn:
    edges = np.linspace(min(inside.min(), outside.min()), max(inside.max(), outside.max()) + 1e-9, BINS + 1)
    shares = {
        name: 100 * np.histogram(v, edges)[0] / len(v) for name, v in (("test images", inside), ("outsiders", outside))
    }
    highest = max(float(v.max()) for v in shares.values())
    c = chart(f"outsiders: {label}", (100 * edges).tolist(), [0.0, highest], "confidence, %")
    for k, (name, share) in enumerate(shares.items()):
        c.parts.append(f'<g class="{hue(k)}">')
        for low, high, value in zip(edges, edges[1:], share, strict=False):
            tip = f"{name}: {value:.0f} % with a confidence of {100 * low:.0f} to {100 * high:.0f} %"
            left, top = c.x(100 * low), c.y(value)
            c.add(
                "rect",
                tip,
                x=left,
                y=top,
                width=round(c.x(100 * high) - left, 1),
                height=round(c.y(0) - top, 1),
                cls="bar",
            )
        c.close_group()
    found = auroc(inside, outside)
    words = f"Shared model of {label}: share of the test images (blue) and of the outsiders (orange) by confidence"
    more = "from the largest probability, all clients together (in the summary: personal models, mean over clients)"
    return Drawn(f"Outsiders, {label}", f"{words}. AUROC {100 * (found or 0):.1f}, {more}.", str(c))
