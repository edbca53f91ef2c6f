"""Axes of the page's charts, and names of methods and clients on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedvlm.report.lines import MethodLine, shorten, spaced
from fedvlm.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Scale, to_scale

MOST_LABELS = 8  # curves or markers whose names stand beside them; of more, see the legend
LONGEST = 14  # letters of a name at the end of a curve
LETTER = 6.9  # width of a bold letter, in pixels


class Drawn(NamedTuple):
    """A chart of the page."""

    title: str
    caption: str
    svg: str


class End(NamedTuple):
    """The end of a curve, with its name."""

    label: str
    style: str  # class of its colour
    value: float
    method: int | None = None  # number in the legend; None: a client's curve, which the legend does not hide


def indexed(lines: list[MethodLine]) -> list[tuple[int, MethodLine]]:
    """Each method with its number, which is its colour and mark; the frozen model's is negative."""
    return [(x.number, x) for x in lines]


class Box(NamedTuple):
    """A rectangle of a chart, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: Box) -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, wide) * max(0.0, high)


def label_points(c: Chart, points: Sequence[tuple[int, MethodLine, float, float]]) -> None:
    """Names beside the markers, where they cover neither markers nor each other, if there is such a place."""
    if len(points) > MOST_LABELS:
        return
    at = [(c.x(x), c.y(y)) for _, _, x, y in points]
    taken = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in at]
    for (k, line, _, _), (x, y) in zip(points, at, strict=True):
        text = shorten(line.label, 24)
        start, box = name_place(
            x, y - 9 * line.frozen, LETTER * len(text), taken
        )  # the frozen model's: above its dashed line
        taken.append(box)
        c.open_group(k, line.frozen)
        before = box.right < x  # then the end of the name has its place, however wide the reader's letters are
        at_x = box.right if before else start
        c.add("text", text=text, cls=f"label {'end' if before else ''}", x=round(at_x, 1), y=round(box.bottom - 2, 1))
        c.close_group()


def name_place(x: float, y: float, width: float, taken: Sequence[Box]) -> tuple[float, Box]:
    """The start of a point's name, and the box that it takes: the first of these places that covers least."""
    inside = x < (LEFT + WIDTH - RIGHT) / 2
    starts = [x + 9, x - 9 - width] if inside else [x - 9 - width, x + 9]
    tried = [(start, y + shift) for shift in (0, -9, 9, -18, 18, -27, 27) for start in (*starts, x - width / 2)]
    axes = Box(LEFT, TOP, WIDTH, HEIGHT - BOTTOM)

    def cost(box: Box) -> float:
        area = (box.right - box.left) * (box.bottom - box.top)
        return sum(box.shared(other) for other in taken) + 4 * (area - box.shared(axes))

    boxes = [(start, Box(start, middle - 6, start + width, middle + 6)) for start, middle in tried]
    return min(boxes, key=lambda found: round(cost(found[1]), 1))


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
    x = to_scale(values, left, WIDTH - RIGHT)
    return Chart(name, x, y, x_label, height=height, rows=[shorten(r, 20) for r in rows])
