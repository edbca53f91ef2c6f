"""Axes of the page's charts, and names of methods and clients on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedvlm.report.figures import Line, shorten, spaced
from fedvlm.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Scale, linear

MOST_LABELS = 8  # curves or markers whose names stand beside them; of more, see the legend
LONGEST = 14  # letters of a name at the end of a curve


class Drawn(NamedTuple):
    """A chart of the page."""

    title: str
    caption: str
    svg: str


class End(NamedTuple):
    """Of a curve."""

    label: str
    style: str  # class of its colour
    value: float
    method: int | None = None  # number in the legend; None: a client's curve, which the legend does not hide


def indexed(lines: list[Line]) -> list[tuple[int, Line]]:
    """Each method with the number of its colour; the frozen model is grey and has −1."""
    trained = [x for x in lines if not x.frozen]
    return [(-1 - k if x.frozen else trained.index(x), x) for k, x in enumerate(lines)]


def label_points(c: Chart, points: Sequence[tuple[int, Line, float, float]]) -> None:
    """Names beside the markers, moved up or down so that they do not overlap."""
    if len(points) > MOST_LABELS:
        return
    wanted = [c.y(y) - 9 * x.frozen for _, x, _, y in points]  # above its dashed line
    heights = spaced(wanted, 13, TOP + 6, HEIGHT - BOTTOM - 4)
    for (k, line, x, _), height in zip(points, heights, strict=True):
        right = c.x(x) < (LEFT + WIDTH - RIGHT) / 2
        c.open_group(k, line.frozen)
        side = f"label {'' if right else 'end'}"
        c.add("text", text=shorten(line.label, 24), cls=side, x=c.x(x) + (9 if right else -9), y=height + 4)
        c.close_group()


def room(labels: Sequence[str]) -> float:
    """What names at the ends of curves take, in pixels."""
    return 4 + 6.7 * max(len(shorten(label, LONGEST)) for label in labels) if 0 < len(labels) <= MOST_LABELS else 0


def name_curves(c: Chart, ends: Sequence[End]) -> None:
    """Names to the right of the axes, at the heights of the curves' ends."""
    if len(ends) > MOST_LABELS:
        return
    for end, height in zip(ends, spaced([c.y(e.value) for e in ends], 13, TOP + 4, HEIGHT - BOTTOM), strict=True):
        whose = "" if end.method is None else f' data-m="{end.method}"'
        c.parts.append(f'<g class="{end.style}"{whose}>')
        c.add("text", text=shorten(end.label, LONGEST), cls="label", x=c.x.end + 5, y=height + 4)
        c.close_group()


def rows_axes(name: str, rows: Sequence[str], values: Sequence[float], x_label: str) -> Chart:
    """Axes with a named row for each entry, the first on top."""
    height = max(120, TOP + BOTTOM + 20 * len(rows))
    left = min(150, 16 + 6.4 * max(len(shorten(r, 20)) for r in rows))
    y = Scale(-0.5, len(rows) - 0.5, TOP, height - BOTTOM)
    x = linear(values, left, WIDTH - RIGHT)
    return Chart(name, x, y, x_label, height, rows=[shorten(r, 20) for r in rows])
