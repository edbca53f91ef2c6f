"""What models get right and wrong (`fedvlm report --details`): confusions, classes, reliability, image features.

From the outputs that runs keep of their test images, all runs of a method together.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedvlm.report.answers import VIEWS, Answers
from fedvlm.report.axes import Drawn, End, name_curves, room
from fedvlm.report.lines import shorten, spaced
from fedvlm.report.svg import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    TOP,
    Chart,
    chart,
    colour,
    element,
    hue,
    thinned,
)

BINS = 10
FEW = 5  # images of a bin that say nothing
RIGHT, WRONG = (10, 98, 179), (200, 80, 20)  # colours of a confusion matrix
MOST_CONFUSIONS = 10  # rows of the table
MOST_POINTS = 350  # images of a picture of features
Place = Callable[[np.ndarray], np.ndarray]  # [images, dim] → [images, 2]
Method = tuple[int, str, list[Answers]]  # number of its colour (negative: the frozen model), label, runs


class Confusion(NamedTuple):
    """A confusion matrix as a picture of one pixel per cell."""

    title: str
    png: str  # base64
    size: int  # classes


class Details(NamedTuple):
    reliability: list[Drawn]
    off: dict[str, float]  # method → expected calibration error of its own models, in percent
    features: list[Drawn]
    classes: list[dict[str, str]]
    confusions: list[dict[str, str]]
    matrices: list[Confusion]  # of the method that the page is about


def details(methods: list[Method], lead: str = "", tsne: bool = False) -> Details | None:
    """lead: the method whose mistakes are shown."""
    known = [m for m in methods if m[2]]
    if not known:
        return None
    names = known[0][2][0].record.data.classes
    shown = next((m for m in known if m[1] == lead), known[-1])
    return Details(
        [reliability(found, view) for view in VIEWS if (found := of_view(known, view))],
        {m[1]: calibration(*judged(m[2], views(m)[-1]))[1] for m in known},
        [*embeddings(known), *(neighbour_charts(known) if tsne else [])],
        recall_by_class(known, names),
        most_confused([shown], names),
        [confusion_picture(shown, view) for view in views(shown)[-1:]],
    )


def of_view(methods: list[Method], view: str) -> list[Method]:
    """The methods of a panel: those that have the view, and among the shared models those that have no others."""
    return [m for m in methods if view in views(m)]


def confusion_picture(method: Method, view: str) -> Confusion:
    """Rows are true classes, columns predicted ones; blue: right, orange: wrong; the darker, the larger the share."""
    counts = confusion(method[2], view)
    share = counts / np.maximum(1, counts.sum(1, keepdims=True))
    right = np.eye(len(counts), dtype=bool)[..., None]
    full = np.where(right, np.array(RIGHT), np.array(WRONG))
    pixels = (255 - share[..., None] ** 0.5 * (255 - full)).astype(np.uint8)
    out = BytesIO()
    Image.fromarray(pixels, "RGB").save(out, "PNG", optimize=True)
    return Confusion(f"{method[1]}, {view} models", base64.b64encode(out.getvalue()).decode(), len(counts))


def views(method: Method) -> list[str]:
    return [v for v in VIEWS if any(v in a.logits for a in method[2])]


def clients(runs: list[Answers]) -> dict[str, None]:
    """The clients with test images, in order."""
    return dict.fromkeys(a.names[k] for a in runs for k in np.unique(a.client))


def reliability(methods: list[Method], view: str) -> Drawn:
    """Accuracy against confidence: the diagonal is a calibrated model."""
    found = {
        m[1]: (m[0], *calibration(*judged(m[2], view)))
        for m in methods
        if any(a.probabilities(view) is not None for a in m[2])
    }
    ends: list[End] = []
    c = chart(f"reliability of the {view} models", [0, 100], [0, 100], "confidence, %", room=room([*found]))
    c.add("line", x1=c.x(0), y1=c.y(0), x2=c.x(100), y2=c.y(100), cls="reference")
    for label, (k, bins, error) in found.items():
        drawn = [b for b in bins if b[2] >= FEW] or bins
        tips = [f"{label}: confidence {x:.0f} %, accuracy {y:.0f} %, {n} images; ECE {error:.1f}" for x, y, n in drawn]
        c.open_group(k, k < 0)
        c.curve(k, [b[0] for b in drawn], [b[1] for b in drawn], tips)
        c.close_group()
        ends.append(End(label, colour(k, k < 0), drawn[-1][1], k))
    name_curves(c, ends)
    errors = ", ".join(f"{label} {error:.1f}" for label, (_, _, error) in found.items())
    words = f"Accuracy (up, %) of the {view} model against its confidence; below the dashed line it is overconfident."
    words += f" Bins with fewer than {FEW} images are left out. Expected calibration error, %: {errors}."
    return Drawn(f"Reliability, {view}", words, str(c))


def judged(runs: list[Answers], view: str) -> tuple[np.ndarray, np.ndarray]:
    """How sure the model is of each test image, and whether it is right."""
    found = [(p, a) for a in runs if (p := a.probabilities(view)) is not None]
    sure = np.concatenate([p.max(1) for p, _ in found])
    return sure, np.concatenate([p.argmax(1) == a.label for p, a in found])


def calibration(sure: np.ndarray, right: np.ndarray) -> tuple[list[tuple[float, float, int]], float]:
    """How sure and how often right each bin is (percent), and how many; and the expected calibration error in
    percent."""
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    bins = [
        (100 * float(sure[place == b].mean()), 100 * float(right[place == b].mean()), int((place == b).sum()))
        for b in np.unique(place)
    ]
    return bins, sum(n * abs(x - y) for x, y, n in bins) / max(1, len(sure))


def confusion(runs: list[Answers], view: str, client: str = "") -> np.ndarray:
    """[truth, said], of one client or of all."""
    size = len(runs[0].record.data.classes)
    total = np.zeros((size, size), int)
    for a in runs:
        if view in a.said:
            own = np.array([not client or name == client for name in a.names])[a.client]
            np.add.at(total, (a.label[own], a.said[view][own]), 1)
    return total


def recall_by_class(methods: list[Method], names: list[str]) -> list[dict[str, str]]:
    """The share of each class's test images that are classified rightly, by method and view."""
    columns: dict[str, np.ndarray] = {}
    examples = np.zeros(len(names), int)
    for method in methods:
        for view in views(method):
            counts = confusion(method[2], view)
            examples = np.maximum(examples, counts.sum(1))
            columns[f"{method[1]} ({view})"] = 100 * counts.diagonal() / np.maximum(1, counts.sum(1))
    return [
        {"class": name, "examples": f"{examples[k]:,}"}
        | {c: f"{v[k]:.1f}" if examples[k] else "–" for c, v in columns.items()}
        for k, name in enumerate(names)
    ]


def most_confused(methods: list[Method], names: list[str]) -> list[dict[str, str]]:
    """The most frequent mistakes by method, view and client."""
    found: Counter[tuple[str, str, str, int, int]] = Counter()
    totals: Counter[tuple[str, str, str, int]] = Counter()
    for method in methods:
        for view in views(method):
            for a in method[2]:
                for k, truth, answer in zip(a.client, a.label, a.said.get(view, ()), strict=False):
                    key = (method[1], view, a.names[k], int(truth))
                    totals[key] += 1
                    if truth != answer:
                        found[*key, int(answer)] += 1
    return [
        {"method": m, "view": v, "client": c, "true class": names[t], "predicted": names[s], "count": str(n)}
        | {"share": f"{100 * n / totals[m, v, c, t]:.0f}"}
        for (m, v, c, t, s), n in found.most_common(MOST_CONFUSIONS)
    ]


def neighbour_charts(methods: list[Method]) -> list[Drawn]:
    from fedvlm.report.tsne import places  # late: torch

    return embeddings(methods, places, "t-SNE")


def embeddings(methods: list[Method], place: Place | None = None, axes: str = "") -> list[Drawn]:
    """Image features before (the frozen model) and after (the personal models, else the shared one), of one run of each
    method, by their first two principal components or as `place` says. Methods that leave them as they are get no
    picture."""
    out, frozen, unchanged = list[Drawn](), list[np.ndarray](), list[str]()
    before: np.ndarray | None = None
    for k, label, runs in methods:
        a = runs[0]
        chosen = np.array(thinned(range(len(a.label)), MOST_POINTS))
        found = a.features("personal" if "personal" in a.logits else "shared", chosen)
        if found is None or len(found) < 3 or found.shape[1] < 2:
            continue
        if any(f.shape == found.shape and np.allclose(f, found, atol=1e-5) for f in frozen):
            unchanged.append(label)
            continue
        frozen += [found] if k < 0 else []
        at = (place or principal)(found)
        before = at if before is None or len(before) != len(at) else before
        out.append(point_chart(k, label, a, chosen, mirrored(at, before), axes))
    if out and unchanged:
        words = f" {', '.join(unchanged)}: the same, since image features are not changed."
        out[0] = out[0]._replace(caption=out[0].caption + words)
    return out


def principal(x: np.ndarray) -> np.ndarray:
    """The first two principal components, [examples, 2]."""
    centred = x - x.mean(0)
    _, axes = np.linalg.eigh(centred.T @ centred)
    found: np.ndarray = centred @ axes[:, :-3:-1]
    return found


def mirrored(at: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The same components with the signs that agree best with others: signs of principal components are arbitrary."""
    return at * np.where((at * like).sum(0) < 0, -1, 1)


def point_chart(k: int, label: str, a: Answers, chosen: np.ndarray, at: np.ndarray, axes: str) -> Drawn:
    c = chart(
        f"image features: {label}", at[:, 0].tolist(), at[:, 1].tolist(), axes or "first two principal components"
    )
    c.ticks = False
    for j, (x, y) in zip(chosen, at, strict=True):
        held = bool(a.held_out[j])
        tip = f"{a.record.data.classes[int(a.label[j])]}, {a.client_name(int(a.client[j]))}"
        kind = f"point {hue(int(a.label[j]))}"
        if held:
            size = 3.5
            where = f"M{c.x(x) - size:g} {c.y(y) - size:g}l7 7m0-7l-7 7"
            c.parts.append(element("path", tip, d=where, cls=f"{kind} unseen"))
        else:
            c.parts.append(element("circle", tip, cx=c.x(x), cy=c.y(y), r=2.2, cls=kind))
    names = a.record.data.classes
    if len(names) <= COLOURS:
        name_classes(c, names, a.label[chosen], at)
    colours = "coloured by class" + ("" if len(names) <= COLOURS else " (colours repeat; hover for the class)")
    seen = f"; crosses: {', '.join(a.record.finished.unseen)}, which nobody trained on" if a.held_out.any() else ""
    own = "personal" in a.logits
    when = (
        "before: the frozen model" if k < 0 else f"after training: the {'personal models' if own else 'shared model'}"
    )
    words = f"{when}; {len(chosen)} test images of one run, {colours}{seen}."
    return Drawn(f"Image features, {label}{f', {axes}' if axes else ''}", words, str(c))


def name_classes(c: Chart, names: list[str], label: np.ndarray, at: np.ndarray) -> None:
    """The name of each class at the mean of its images."""
    present = np.unique(label).tolist()
    centres = [at[label == k].mean(0).tolist() for k in present]
    heights = spaced([c.y(y) for _, y in centres], 13, TOP + 6, HEIGHT - BOTTOM - 4)
    for k, (x, _), height in zip(present, centres, heights, strict=True):
        text = element("text", text=shorten(names[k], 16), cls="label middle", x=c.x(x), y=round(height + 4, 1))
        c.parts.append(f'<g class="{hue(k)}">{text}</g>')
