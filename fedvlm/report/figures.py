"""One figure that compares methods, made from run folders only: the charts of the page, drawn by matplotlib.

Left both goals (or the methods ranked, where there is one), then by round, then each client. A chart is drawn once, as
SVG (charts.py); here its lines, paths, circles and texts become matplotlib's, with the colours of the page's style sheet.
"""

from __future__ import annotations

import re
import textwrap
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.patheffects import withStroke
from matplotlib.text import Text

from fedvlm.evaluation.protocols import is_base_to_novel
from fedvlm.report import charts
from fedvlm.report.axes import MOST_LABELS
from fedvlm.report.first_screen import leader
from fedvlm.report.gains import verdicts
from fedvlm.report.lines import MethodLine, gather, shorten
from fedvlm.report.svg import STYLES, WIDTH, colour, marker
from fedvlm.report.tables import summarise
from fedvlm.system import files
from fedvlm.training.folder import RunFolder

MOST_CHARTS = 3  # side by side
TITLE, FOOT, LEGEND = 26, 76, 120  # pixels above and below the charts, and beside them where names are not in them
INCH = 100  # pixels of a chart
LETTER = 4.9  # pixels of a small one
DASHES = {"reference": (4, 3), "ended": (2, 4), "dash1": (6, 3), "dash2": (2, 3), "dash3": (8, 3, 2, 3)}
OPAQUE = {"seed": 0.35, "ended": 0.8}
SVG = "{http://www.w3.org/2000/svg}"


class Theme(NamedTuple):
    background: str
    text: str
    muted: str
    colours: tuple[str, ...]  # of the families of methods, as in FAMILIES


def page_colours() -> dict[str, str]:
    """The colours of the page's style sheet, by name, on white."""
    text = Path(__file__).with_name("page.css").read_text("utf-8")
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", text.partition("@media")[0]))


COLOURS = page_colours()
LIGHT = Theme(COLOURS["background"], COLOURS["text"], COLOURS["muted"], tuple(COLOURS[k[2:]] for k in STYLES))


class Picture(Figure):
    """A matplotlib figure that notebooks show without pyplot, which keeps figures in global state."""

    def _repr_png_(self) -> bytes:
        out = BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()


def figure(runs: list[RunFolder], path: Path) -> None:
    """Writes the figure as a PNG file."""
    write_picture(drawn(runs), path)


def write_picture(picture: Picture, path: Path) -> None:
    out = BytesIO()
    picture.savefig(out, format="png", dpi=200)
    files.write(path, out.getvalue())


def drawn(runs: list[RunFolder]) -> Picture:
    """The figure, not written anywhere."""
    lines, table = gather(runs), summarise(runs)
    found = charts.comparison(runs, lines, leader(table, verdicts(table)), table.by_client)
    chosen = [found.plane or charts.ranking(lines), *found.rounds[:1], *found.clients[:1]]
    pictures = [ElementTree.fromstring(one.svg) for one in chosen]
    heights = [int(p.attrib["viewBox"].split()[3]) for p in pictures]
    named = len(lines) <= MOST_LABELS
    size = (WIDTH * len(chosen) + LEGEND * (not named), TITLE + max(heights) + FOOT)
    made = Picture(figsize=(size[0] / INCH, size[1] / INCH), facecolor=LIGHT.background)
    ax = made.add_axes((0, 0, 1, 1), xlim=(0, size[0]), ylim=(size[1], 0))
    ax.set_axis_off()
    for k, (one, picture) in enumerate(zip(chosen, pictures, strict=True)):
        write(ax, k * WIDTH + 8, 17, one.title, LIGHT.text, size=9.5, weight="bold")
        play(ax, picture, k * WIDTH, TITLE)
        about = wrap(one.caption, int(WIDTH / LETTER))
        write(ax, k * WIDTH + 8, TITLE + heights[k] + 4, about, LIGHT.muted, size=6.5, va="top")
    for k, line in enumerate([] if named else lines):
        y, style = TITLE + 12 + 15 * k, colour(line.number, line.frozen)
        shape = ElementTree.Element("path", {"class": "mark", "d": marker(line.number, line.frozen, 8, y)})
        draw(ax, shape, style, len(chosen) * WIDTH, 0)
        write(ax, len(chosen) * WIDTH + 20, y + 4, shorten(line.label, 16), LIGHT.text)
    write(ax, 8, size[1] - 8, wrap(caption(lines), int(size[0] / LETTER)), LIGHT.muted, size=6.5, va="bottom")
    return made


def play(ax: Axes, group: ElementTree.Element, right: float, down: float, style: str = "") -> None:
    """Draws what is in a group, so far to the right and down, in the colour of its style or of the group around it."""
    for element in group:
        if element.tag.removeprefix(SVG) == "g":
            play(ax, element, right, down, element.get("class", style))
        else:
            draw(ax, element, style, right, down)


def draw(ax: Axes, element: ElementTree.Element, style: str, right: float, down: float) -> None:
    kinds = element.get("class", "").split()
    named = next((k for k in [*kinds, *style.split()] if k in COLOURS or k in STYLES), "")
    own = COLOURS.get(named.removeprefix("f-"), LIGHT.text)
    at = {k: float(v) for k, v in element.attrib.items() if k in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r")}
    muted = {"grid": COLOURS["rule"], "reference": LIGHT.muted, "front": LIGHT.muted}
    stroke = next((muted[k] for k in kinds if k in muted), own)
    dashes = next(((0, DASHES[k]) for k in kinds if k in DASHES), "solid")
    opacity = next((OPAQUE[k] for k in kinds if k in OPAQUE), 1.0)
    match element.tag.removeprefix(SVG):
        case "line":
            xs, ys = (at["x1"] + right, at["x2"] + right), (at["y1"] + down, at["y2"] + down)
            ax.add_line(Line2D(xs, ys, color=stroke, lw=0.8, ls=dashes, alpha=opacity))
        case "circle" if "dot" not in kinds:  # those are there to hover at
            middle = (at["cx"] + right, at["cy"] + down)
            ax.add_patch(Circle(middle, at["r"], facecolor=own, linewidth=0, alpha=opacity))
        case "path" if "mark" in kinds:
            face, edge = (LIGHT.background, own) if "hollow" in kinds else (own, LIGHT.background)
            width = 1.4 if "hollow" in kinds else 0.6
            outline = path_of(element.attrib["d"], right, down)
            ax.add_patch(PathPatch(outline, facecolor=face, edgecolor=edge, linewidth=width, zorder=3))
        case "path":
            outline = path_of(element.attrib["d"], right, down)
            curve = PathPatch(outline, fill=False, edgecolor=stroke, linewidth=1.3, linestyle=dashes, zorder=2.5)
            ax.add_patch(curve)
        case "text":
            side = next((s for k, s in (("middle", "center"), ("end", "right")) if k in kinds), "left")
            label = "label" in kinds
            ink = own if label else LIGHT.text if "axis" in kinds else LIGHT.muted
            made = write(ax, at["x"] + right, at["y"] + down, element.text or "", ink, ha=side, zorder=4)
            if label:
                made.set(weight="bold", path_effects=[withStroke(linewidth=2.5, foreground=LIGHT.background)])


def path_of(text: str, right: float, down: float) -> Outline:
    """The outline of a path with M, L and Z, or of a circle as two arcs."""
    numbers = [float(v) for v in re.findall(r"-?[\d.]+(?:e-?\d+)?", text)]
    if "a" in text:
        radius = numbers[2]
        return Outline.circle((numbers[0] + radius + right, numbers[1] + down), radius)
    points = [(x + right, y + down) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
    return Outline([*points, points[0]] if text.endswith("Z") else points, closed=text.endswith("Z"))


def wrap(text: str, letters: int) -> str:
    return "\n".join(textwrap.wrap(text, letters))


def write(ax: Axes, x: float, y: float, text: str, ink: str, size: float = 7.5, **more: Any) -> Text:
    """Text as it is: names of domains may contain $."""
    return ax.text(x, y, text, color=ink, size=size, parse_math=False, **more)


def targets(lines: list[MethodLine]) -> set[tuple[str, ...]]:
    """The sets of domains or clients that were held out."""
    return {tuple(r.unseen) for x in lines for r in x.records} - {()}


def caption(lines: list[MethodLine]) -> str:
    """Backbone, data, held-out targets, seeds and rounds, and a warning where methods cannot be compared."""
    records = [r for x in lines for r in x.records]
    backbones = ", ".join(sorted({r.backbone.name for r in records}))
    data = ", ".join(sorted({r.data.name for r in records}))
    held = len(targets(lines))
    seeds = sorted({x.scores["P"].shape[1] for x in lines})  # only seeds that have every target
    rounds = sorted({x.rounds[-1] for x in lines if not x.frozen} or {0})
    parts = [f"backbone {backbones}", f"data {data}"]
    parts.append(f"{held} held-out target{'s' * (held != 1)}" if held else "no client held out")
    parts += ["half of the classes held out"] * any(map(is_base_to_novel, records))
    parts.append(f"{' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])}")
    parts.append(f"{' or '.join(map(str, rounds))} round{'s' * (rounds != [1])}")
    if len({frozenset((r.seed, *r.unseen) for r in x.records) for x in lines}) > 1:
        parts.append("CAUTION: methods differ in targets or seeds")
    return " · ".join([*parts, "last round, test split"])
