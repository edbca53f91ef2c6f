"""A small writer of SVG charts for the page: colours come from its style sheet, values shown on hover are in data-tip.

A chart is about as wide as a phone; the page puts several beside each other where there is room. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TypeVar

import numpy as np

WIDTH, HEIGHT = 380, 280
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 40
COLOURS = 6  # of the style sheet for classes and curves of clients: c0 to c5
STYLES = ("f-one", "f-head", "f-adapt", "f-prompt", "f-tower", "f-whole", "f-ref")  # of families, as in FAMILIES
PER_FAMILY = 100  # a method has the number PER_FAMILY × family + mark
MOST_VERTICES = 200  # of a curve
MOST_TIPS = 20  # values of a curve that hovering shows
T = TypeVar("T")
SHAPES = ("circle", "square", "up", "diamond", "down", "cross", "star")


@dataclass(frozen=True)
class Scale:
    """A map of values to pixels. Logarithmic scales put values of 0 at the lower end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    first: float = 0  # of the ticks

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(max(value, self.low)) if self.log else value
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        if not self.log:
            return [(v, f"{v:g}") for v in round_steps(self.low, self.high)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        parts = (1,) if len(powers) > 4 else (1, 2, 5)
        inside = [m * 10.0**k for k in powers for m in parts if max(self.low, self.first) <= m * 10.0**k <= self.high]
        return [(v, f"{v:g}") for v in inside[:: max(1, len(inside) // 4)]]


def round_steps(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between low and high."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def to_scale(values: Sequence[float], start: float, end: float, margin: float = 0.08) -> Scale:
    low, high = bounds(values)
    pad = (high - low) * margin
    return Scale(low - pad, high + pad, start, end)


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """A decade at least; where a value is 0, the lower end is below the smallest other value."""
    known = [v for v in values if v > 0 and math.isfinite(v)] or [1.0]
    low, high = min(known), max(known)
    zero = any(v <= 0 for v in values)
    return Scale(low / (8 if zero else 2), max(high * 2, low * 5), start, end, log=True, first=low * 0.9 if zero else 0)


def bounds(values: Sequence[float]) -> tuple[float, float]:
    known = [v for v in values if math.isfinite(v)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    return (low, high) if high - low > 1e-9 * max(1.0, abs(low)) else (low - 0.5, high + 0.5)


@dataclass
class Chart:
    """Axes with what was drawn on them; `name` is read by screen readers."""

    name: str
    x: Scale
    y: Scale
    x_label: str = ""
    y_label: str = ""
    height: int = HEIGHT
    parts: list[str] = field(default_factory=list)
    ticks: bool = True  # False: values along the axes mean nothing
    rows: Sequence[str] = ()  # names of rows in place of the y axis

    def add(self, tag: str, tip: str = "", text: str = "", cls: str = "", **attributes: float | str) -> None:
        self.parts.append(element(tag, tip, text, cls, **attributes))

    def curve(
        self, method: int, xs: Sequence[float], ys: Sequence[float], tips: Sequence[str], style: str = ""
    ) -> None:
        """A line with a value to hover at its points; points that are not finite are left out."""
        points = [(self.x(a), self.y(b), t) for a, b, t in zip(xs, ys, tips, strict=True) if math.isfinite(a + b)]
        line = thinned(points, MOST_VERTICES)
        path = "M" + "L".join(f"{a:g} {b:g}" for a, b, _ in line) if len(line) > 1 else ""
        if path:
            self.add("path", d=path, cls=f"curve {style} {dashed(method)}".replace("  ", " "))
        for a, b, tip in thinned(points, MOST_TIPS):
            self.add("circle", tip, cx=a, cy=b, r=2 if len(points) < 15 else 1, cls="dot")

    def marker(self, method: int, x: float, y: float, tip: str, frozen: bool = False) -> None:
        kind = "mark hollow" if hollow(method) else "mark"
        self.add("path", tip, d=marker(method, frozen, self.x(x), self.y(y)), cls=kind)

    def open_group(self, method: int, frozen: bool = False) -> None:
        """What is drawn until the group is closed belongs to this method."""
        self.parts.append(f'<g class="{colour(method, frozen)}" data-m="{method}">')

    def close_group(self) -> None:
        self.parts.append("</g>")

    def __str__(self) -> str:
        bottom, right = self.height - BOTTOM, self.x.end
        out = [f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(self.name)}">']
        for value, name in self.x.ticks() if self.ticks else []:
            at = self.x(value)
            out.append(element("line", x1=at, x2=at, y1=TOP, y2=bottom, cls="grid"))
            out.append(element("text", text=name, x=at, y=bottom + 14, cls="tick middle"))
        for value, name in self.y.ticks() if self.ticks and not self.rows else []:
            at = self.y(value)
            out.append(element("line", x1=self.x.start, x2=right, y1=at, y2=at, cls="grid"))
            out.append(element("text", text=name, x=self.x.start - 5, y=at + 4, cls="tick end"))
        for k, name in enumerate(self.rows):
            out.append(element("text", text=name, x=self.x.start - 5, y=self.y(k) + 4, cls="tick end"))
        if self.x_label:
            out.append(element("text", text=self.x_label, x=right, y=self.height - 8, cls="axis end"))
        if self.y_label:
            out.append(element("text", text=self.y_label, x=self.x.start + 4, y=TOP + 8, cls="axis"))
        return "".join([*out, *self.parts, "</svg>"])


def chart(
    name: str,
    xs: Sequence[float],
    ys: Sequence[float],
    x_label: str,
    log_x: bool = False,
    log_y: bool = False,
    room: float = 0,
) -> Chart:
    """Empty axes on which these values fit, with so much room at the right."""
    x = (logarithmic if log_x else to_scale)(xs, LEFT, WIDTH - RIGHT - room)
    return Chart(name, x, (logarithmic if log_y else to_scale)(ys, HEIGHT - BOTTOM, TOP), x_label)


def element(tag: str, tip: str = "", text: str = "", cls: str = "", **attributes: float | str) -> str:
    pairs = {"class": cls.strip(), "data-tip": tip} | {k.replace("_", "-"): v for k, v in attributes.items()}
    written = "".join(f' {k}="{escape(svg_number(v))}"' for k, v in pairs.items() if v != "")
    return f"<{tag}{written}>{escape(text)}</{tag}>" if text else f"<{tag}{written}/>"


def svg_number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def colour(method: int, frozen: bool = False) -> str:
    """The class of a method's colour: that of its family."""
    return STYLES[-1] if frozen or method < 0 else STYLES[method // PER_FAMILY]


def hue(k: int) -> str:
    """The class of a colour that stands for no method."""
    return f"c{k % COLOURS}"


def dashed(method: int) -> str:
    kind = method % PER_FAMILY % 4 if method >= 0 else 0
    return f"dash{kind}" if kind else ""


def hollow(method: int) -> bool:
    return method >= 0 and method % PER_FAMILY // len(SHAPES) % 2 == 1


def thinned(points: Sequence[T], most: int) -> list[T]:
    """Evenly chosen, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[int(k)] for k in np.unique(np.linspace(0, len(points) - 1, most).round())]


def marker(method: int, frozen: bool, x: float, y: float) -> str:
    """The path of a method's marker."""
    return shape_path("diamond" if frozen or method < 0 else SHAPES[method % PER_FAMILY % len(SHAPES)], x, y)


def shape_path(shape: str, x: float, y: float, r: float = 5) -> str:
    """The path of a shape."""
    outlines: dict[str, list[tuple[float, float]]] = {
        "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
        "up": [(0, -1.1), (1, 0.8), (-1, 0.8)],
        "down": [(0, 1.1), (1, -0.8), (-1, -0.8)],
        "diamond": [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
        "cross": [
            (-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35), (1, 0.35), (0.35, 0.35),
            (0.35, 1), (-0.35, 1), (-0.35, 0.35), (-1, 0.35), (-1, -0.35), (-0.35, -0.35),
        ],
        "star": [
            (1.2 * (1 if k % 2 == 0 else 0.45) * math.sin(k * math.pi / 5),
             -1.2 * (1 if k % 2 == 0 else 0.45) * math.cos(k * math.pi / 5))
            for k in range(10)
        ],
    }  # fmt: skip
    if shape == "circle":
        return f"M{x - r:g} {y:g}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"
    return "M" + "L".join(f"{x + r * a:.1f} {y + r * b:.1f}" for a, b in outlines[shape]) + "Z"
