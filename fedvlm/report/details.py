"""What models get right and wrong (`fedvlm report --details`): confusions, classes, reliability, image features.

From the outputs that runs keep of their test images, all runs of a method together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedvlm.report.answers import VIEWS, Answers
from fedvlm.report.axes import Drawn, End, name_curves, room
from fedvlm.report.figures import shorten, spaced
from fedvlm.report.svg import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    TOP,
    WIDTH,
    Chart,
    Scale,
    chart,
    colour,
    element,
    thinned,
    to_scale,
)

BINS = 10
FEW = 5  # images of a bin that say nothing
MOST_CLASSES = 40  # of a confusion matrix
LARGEST, READABLE = 60, 26  # pixels of a cell: at most, and from which on it has its number
MOST_CELLS = 9000  # of all confusion matrices of a block: the page stays small
MOST_CONFUSIONS = 300  # rows of the table
MOST_POINTS = 350  # images of a picture of features
Place = Callable[[np.ndarray], np.ndarray]  # [images, dim] → [images, 2]
Method = tuple[int, str, list[Answers]]  # number of its colour (negative: the frozen model), label, runs


class Confusion(NamedTuple):
    label: str
    view: str
    client: str  # "": all of them
    svg: str


class Details(NamedTuple):
    reliability: list[Drawn]
    features: list[Drawn]
    classes: list[dict[str, str]]
    confusions: list[dict[str, str]]
    matrices: list[Confusion]  # of all clients together
    by_client: dict[str, list[Confusion]]
    left_out: int  # matrices by client that would make the page too large


def details(methods: list[Method], tsne: bool = False) -> Details | None:
    known = [m for m in methods if m[2]]
    if not known:
        return None
    names = known[0][2][0].record.data.classes
    matrices = list[Confusion]()
    by_client, left_out, cells = dict[str, list[Confusion]](), 0, 0
    wanted = [(m, view, "") for m in known for view in views(m)]
    present = {m[1]: clients(m[2]) for m in known}
    everybody = dict.fromkeys(c for found in present.values() for c in found)
    wanted += [(m, view, c) for c in everybody for m in known if c in present[m[1]] for view in views(m)]
    for (_, label, runs), view, client in wanted if len(names) <= MOST_CLASSES else []:
        counts = None if client and cells > MOST_CELLS else confusion(runs, view, client)
        cells += 0 if counts is None else int((counts > 0).sum())
        if counts is None or (client and cells > MOST_CELLS):
            left_out += 1
        elif counts.any():
            title = f"{label}, {view}" + (f", {client}" if client else "")
            made = Confusion(label, view, client, matrix(title, counts, names))
            (by_client.setdefault(client, []) if client else matrices).append(made)
    return Details(
        [
            reliability(known, view)
            for view in VIEWS
            if any(a.probabilities(view) is not None for m in known for a in m[2])
        ],
        [*embeddings(known), *(neighbour_charts(known) if tsne else [])],
        recall_by_class(known, names),
        most_confused(known, names),
        matrices,
        by_client,
        left_out,
    )


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


def matrix(name: str, counts: np.ndarray, names: list[str]) -> str:
    """Rows are the true class, columns the predicted one; the colour is the share of the row."""
    size = len(names)
    left = min(110.0, 12 + 6 * max(len(shorten(n, 16)) for n in names))
    step = min(LARGEST, (WIDTH - left - 12) / size)
    height = round(TOP + size * step + 24)
    y = Scale(-0.5, size - 0.5, TOP, TOP + size * step)
    shown = [shorten(n, 16) for n in names] if step > 9 else [""] * size
    c = Chart(
        f"confusion matrix: {name}",
        to_scale([0, 1], left, WIDTH - 12),
        y,
        "columns: predicted class, same order",
        height,
    )
    c.ticks, c.rows, c.dense = False, shown, step < 14
    totals = counts.sum(1)
    for i, j in zip(*np.nonzero(counts), strict=True):
        share = counts[i, j] / totals[i]
        tip = f"{names[i]} → {names[j]}: {counts[i, j]} ({100 * share:.0f} %)"
        x, top, side = round(left + step * int(j), 1), round(TOP + step * int(i), 1), round(step - 0.6, 1)
        kind = f"{'hit' if i == j else 'miss'} h{math.ceil(10 * share)}"
        c.add("rect", tip, width=side, height=side, cls=kind, x=x, y=top)
        if step >= READABLE:
            at = round(x + step / 2, 1), round(top + step / 2 + 4, 1)
            c.add("text", text=f"{100 * share:.0f}", cls="cell middle", x=at[0], y=at[1])
    return str(c)


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
        kind = f"point c{int(a.label[j]) % COLOURS}"
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
        c.parts.append(f'<g class="{colour(k)}">{text}</g>')
