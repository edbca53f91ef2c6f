"""One figure that compares methods with each other and with the frozen model, made from run folders only.

Left: the personal models (P) against the shared model on held-out clients (G), with the path over rounds; dashed lines
mark the frozen model. Middle: G and P by round. Right: each held-out target, or each client. For base-to-novel runs the
left panel has base and novel in place of P and G, and the middle one all four metrics. Bars and bands are ± one standard
error over seeds. The numbers come from the same function as those of the tables (`by_seed`; last round, test split).
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from fedvlm.config import catalogue
from fedvlm.config.families import FAMILIES, family
from fedvlm.core.records import MEASURES, RoundRecord, RunRecord, Scores
from fedvlm.evaluation.protocols import by_seed, is_base_to_novel
from fedvlm.report.columns import DEFINED
from fedvlm.report.gains import FROZEN
from fedvlm.report.svg import PER_FAMILY
from fedvlm.report.tables import grouped
from fedvlm.system import files
from fedvlm.training.folder import RunFolder

GAIN_TITLE = "gain over the frozen model"
MARKERS = ("o", "s", "^", "D", "v", "P", "*")  # as svg.SHAPES
PLOTTED = ("G", "P", *MEASURES)
MARKS = 14  # seven shapes, filled and hollow
MOST_ROWS = 30  # of the panel with a row per target or client; beyond, it is left out


class Theme(NamedTuple):
    background: str
    text: str
    muted: str  # grid, notes, and the frozen model
    colours: tuple[str, ...]  # of the families of methods, as in FAMILIES


# distances in CIELAB with protanopia, deuteranopia and tritanopia: at least 16 (light) and 19 (dark)
LIGHT = Theme(
    *("#ffffff", "#1f2933", "#5f6b77"),
    ("#6c2482", "#0a62b3", "#ac4b00", "#197e44", "#014a43", "#d02f3f", "#5f6b77"),
)
DARK = Theme(
    *("#14181d", "#e4e7eb", "#a4afba"),
    ("#e5b3ff", "#4a90e7", "#faa258", "#25e1a0", "#a5fff1", "#f35464", "#a4afba"),
)


@dataclass(frozen=True)
class MethodLine:
    """One method: its scores, and how it is drawn."""

    label: str
    records: list[RunRecord]
    rounds: list[int]
    scores: dict[str, np.ndarray]  # metric → [rounds, seeds] in percent, NaN where there is no such model
    colour: str
    marker: str
    number: int = -1  # PER_FAMILY × its family + its mark; the frozen model's is negative

    @property
    def frozen(self) -> bool:
        return is_frozen(self.records)

    def over(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard error over seeds, by round."""
        values = self.scores[metric]
        seeds = values.shape[1]
        mean = values.mean(1) if seeds else np.full(len(values), np.nan)
        return mean, values.std(1, ddof=1) / seeds**0.5 if seeds > 1 else np.zeros(len(values))

    def last(self, metric: str) -> tuple[float, float]:
        """Mean and standard error over seeds in the last round."""
        mean, error = self.over(metric)
        return float(mean[-1]), float(error[-1])


class Picture(Figure):
    """A matplotlib figure that notebooks show without pyplot, which keeps figures in global state."""

    def _repr_png_(self) -> bytes:
        out = BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()


def drawn(runs: list[RunFolder], theme: Theme = LIGHT) -> Picture:
    """The figure, not written anywhere."""
    with styled(theme):
        return settled(draw_figure(gather(runs, theme), theme))


def figure(runs: list[RunFolder], path: Path, theme: Theme = LIGHT) -> None:
    """Writes the figure as a PNG file."""
    write_picture(drawn(runs, theme), path, theme)


def write_picture(picture: Picture, path: Path, theme: Theme) -> None:
    files.write(path, png(picture, theme))


def png(picture: Picture, theme: Theme) -> bytes:
    out = BytesIO()
    with styled(theme):
        picture.savefig(out, format="png", dpi=200)
    return out.getvalue()


def settled(picture: Picture) -> Picture:
    """Draws it once: matplotlib creates ticks on the first draw, with the settings of that moment."""
    picture.draw_without_rendering()
    return picture


def styled(theme: Theme) -> AbstractContextManager[None]:
    """matplotlib's settings for this theme, for the duration of a `with` block."""
    return matplotlib.rc_context(
        {
            "font.size": 8.5,
            "text.parse_math": False,  # names of domains may contain $
            "text.color": theme.text,
            "figure.facecolor": theme.background,
            "axes.titlelocation": "left",
            "axes.facecolor": theme.background,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.labelcolor": theme.text,
            "axes.edgecolor": theme.muted,
            "xtick.color": theme.muted,
            "ytick.color": theme.muted,
            "xtick.labelcolor": theme.text,
            "ytick.labelcolor": theme.text,
        }
    )


def is_frozen(records: list[RunRecord]) -> bool:
    return records[0].method.name == FROZEN


def gather(runs: list[RunFolder], theme: Theme) -> list[MethodLine]:
    """One line per method, the frozen model first; every round is scored as the tables score the last."""
    scored = {r.record.identity: {x["round"]: x for x in r.rounds() if "personal" in x} for r in runs}
    groups, lines = grouped(runs), list[MethodLine]()
    numbers = numbers_of(groups)
    for label, records in sorted(groups.items(), key=lambda g: not is_frozen(g[1])):
        by_round = [scored[r.identity] or {r.finished.last["round"]: r.finished.last} for r in records]
        rounds = sorted(set.intersection(*map(set, by_round)))
        table = []
        for k in rounds:
            then = [ended_with(record, found[k]) for record, found in zip(records, by_round, strict=True)]
            table.append([[s.get(m) for m in PLOTTED] for s in by_seed(then).values()])
        values = 100 * np.array(table, float).reshape(len(rounds), -1, len(PLOTTED))
        k = numbers[label]
        colour = theme.muted if k < 0 else theme.colours[k // PER_FAMILY]
        marker = "D" if k < 0 else MARKERS[k % PER_FAMILY % len(MARKERS)]
        scores = {m: values[..., j] for j, m in enumerate(PLOTTED)}
        lines.append(MethodLine(label, records, rounds, scores, colour, marker, k))
    return lines


def numbers_of(groups: dict[str, list[RunRecord]]) -> dict[str, int]:
    """The number of each method, which is its colour and mark: the same everywhere, and the next one that is free where
    another row has it."""
    known = catalogue.load().methods
    families = {m.name: family(m.name, *m.parts.split(" × ")[::2]) for m in known}

    def place(label: str) -> int:
        """The place of the method among those of its family."""
        name, about = groups[label][0].method.name, family_of(groups[label][0])
        marks = [n for n, found in families.items() if found == about]
        return marks.index(name) if name in marks else len(marks)

    found: dict[str, int] = {}
    for label in sorted(groups, key=place):
        if is_frozen(groups[label]):
            found[label] = -1 - sum(k < 0 for k in found.values())
            continue
        home = PER_FAMILY * list(FAMILIES).index(family_of(groups[label][0]))
        tries = [home + (place(label) + k) % MARKS for k in range(MARKS)]
        found[label] = next((k for k in tries if k not in found.values()), tries[0])
    return found


def family_of(record: RunRecord) -> str:
    """That of the method in the catalogue; of other methods and networks, by what they train."""
    about = record.method
    built_in = {m.name: m.parts.split(" × ") for m in catalogue.load().methods} if not about.on + about.path else {}
    adapter, _, merge = built_in.get(about.name, [record.adapter.name, "", record.merge.name])
    return family(about.name, adapter, merge)


def ended_with(record: RunRecord, last: RoundRecord) -> RunRecord:
    """The record with this round as the last."""
    return replace(record, result=replace(record.finished, last=last))


def draw_figure(lines: list[MethodLine], theme: Theme) -> Picture:
    base_to_novel = all(is_base_to_novel(r) for x in lines for r in x.records)
    known = [m for m in PLOTTED if any(np.isfinite(x.last(m)[0]) for x in lines)]
    axes = [m for m in (("novel", "base") if base_to_novel else ("G", "P")) if m in known]
    metrics = [m for m in MEASURES if m in known] if base_to_novel else axes
    rows, has_rounds = scores_by_row(lines), any(len(x.rounds) > 1 for x in lines)
    widths = [1.25, *([1.2] if has_rounds and metrics else []), *([1.0] if rows else [])]
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.05, 0.985, 0.94), w_pad=0.12)
    fig = Picture(figsize=(4 * len(widths), max(5.0, 2 + 0.24 * len(rows), 1.7 * len(metrics))), layout=layout)
    panels = fig.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0]
    if len(axes) == 2:
        plot_two_metrics(panels[0].subplots(), lines, theme, *axes)
    else:
        plot_one_metric(panels[0].subplots(), lines, axes[0] if axes else "P", theme)
    if has_rounds and metrics:
        stack = panels[1].subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
        for ax, metric in zip(stack, metrics, strict=True):
            plot_rounds(ax, lines, metric, theme)
        stack[0].set_title("by round")
        stack[-1].set_xlabel("round")
    if rows:
        plot_rows(panels[-1].subplots(), lines, rows, theme)
    fig.text(0.008, 0.015, caption(lines), fontsize=7.5, color=theme.muted)
    return fig


def plot_two_metrics(ax: Axes, lines: list[MethodLine], theme: Theme, up: str = "G", across: str = "P") -> None:
    """Each method as a point, `up` over `across`. One without a value of `up` (no shared model) is on the lower edge."""
    at = {line.label: (*line.last(across), *line.last(up)) for line in lines}
    both = [x for x in lines if np.isfinite(at[x.label]).all()]
    only_across = [x for x in lines if np.isfinite(at[x.label][0]) and x not in both]
    base = next((x for x in both if x.frozen), None)
    for line in both:
        p, dp, g, dg = at[line.label]
        ax.plot(line.over(across)[0], line.over(up)[0], color=line.colour, lw=1.2, alpha=0.3)
        ax.errorbar(p, g, dg, dp, color=line.colour, marker=line.marker, ms=8, elinewidth=1.2, capsize=2.5, zorder=4)
    for line in only_across:
        ax.plot(at[line.label][0], 0, "^", ms=9, color=line.colour, transform=ax.get_xaxis_transform(), clip_on=False)
    ax.margins(0.16, 0.14)
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    ax.set(xlim=(left, right), ylim=(low, high), xlabel=axis_label(lines, across), ylabel=axis_label(lines, up))
    title = "shared and personal models" if up == "G" else "classes trained on and novel classes"
    ax.set_title(GAIN_TITLE if base and len(lines) > 1 else title)
    if base:
        p, _, g, _ = at[base.label]
        ax.axvline(p, color=theme.muted, lw=0.9, ls="--", zorder=1)
        ax.axhline(g, color=theme.muted, lw=0.9, ls="--", zorder=1)
        ax.fill_between([p, right], g, high, color=theme.muted, alpha=0.07, lw=0, zorder=0)
    step = (high - low) * 0.045
    wanted = [low + step * (0.5 + k) for k in range(len(only_across))]
    wanted += [at[x.label][2] - (step * 0.8 if x is base else 0) for x in both]
    for line, y in zip([*only_across, *both], spaced(wanted, step, low, high), strict=True):
        p, dp, g, _ = at[line.label]
        text = f"  {across} {p:.1f}, no {up}" if line in only_across else f"  {up} {g:.1f}, {across} {p:.1f}"
        if base and line is not base and line in both:
            text = f"  {up} {g - at[base.label][2]:+.1f}, {across} {p - at[base.label][0]:+.1f}"
        side = 1 if p < (left + right) / 2 else -1
        x = p + side * (dp + (right - left) * 0.025)
        room = ((right - x) if side > 0 else (x - left)) / (right - left) / 0.0195  # in characters
        text = shorten(line.label) + (text if len(shorten(line.label) + text) < room else "")
        outline = [withStroke(linewidth=2.5, foreground=theme.background)]
        ha = "left" if side > 0 else "right"
        ax.text(x, y, text, color=line.colour, size=8, weight="bold", ha=ha, va="center", path_effects=outline)


def plot_one_metric(ax: Axes, lines: list[MethodLine], metric: str, theme: Theme) -> None:
    """A row per method, for runs with one metric only (no client held out, or nothing shared)."""
    for k, line in enumerate(reversed(lines)):
        value, error = line.last(metric)
        ax.errorbar(value, k, xerr=error, color=line.colour, marker=line.marker, ms=8, elinewidth=1.2, capsize=2.5)
        if np.isfinite(value):
            ax.annotate(
                f"{value:.1f}", (value, k), (7, 7), textcoords="offset points", color=line.colour, weight="bold"
            )
        if line.frozen:
            ax.axvline(value, color=theme.muted, lw=0.9, ls="--", zorder=1)
    ax.set_yticks(range(len(lines)), [shorten(x.label) for x in reversed(lines)])
    ax.set(xlabel=axis_label(lines, metric), ylim=(-0.6, len(lines) - 0.4))
    ax.margins(x=0.2)
    ax.set_title(GAIN_TITLE if lines[0].frozen and len(lines) > 1 else "after the last round")


def plot_rounds(ax: Axes, lines: list[MethodLine], metric: str, theme: Theme) -> None:
    """One metric by round. A method with fewer rounds than others is continued as a dashed line at its last value."""
    shown = [x for x in lines if np.isfinite(x.last(metric)[0])]
    final = max(x.rounds[-1] for x in lines)
    for line in shown:
        mean, error = line.over(metric)
        ax.plot(line.rounds, mean, color=line.colour, lw=1.8)
        ax.fill_between(line.rounds, mean - error, mean + error, color=line.colour, alpha=0.2, lw=0)
        ax.hlines(mean[-1], line.rounds[-1], final, color=line.colour, lw=0.9, ls="--", zorder=1)
    low, high = ax.get_ylim()
    gap = (high - low) * min(0.1, 1 / len(shown))
    for line, y in zip(shown, spaced([x.last(metric)[0] for x in shown], gap, low, high), strict=True):
        ax.text(final * 1.03, y, shorten(line.label, 16), color=line.colour, va="center")
    ax.set(xlim=(0, final), ylim=(low, high), ylabel=f"{metric}, %")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.grid(axis="y", color=theme.muted, alpha=0.2, lw=0.6)


def axis_label(lines: list[MethodLine], metric: str) -> str:
    """new clients G, accuracy in %."""
    measure = DEFINED[metric]
    return f"{measure.word} {measure.letter}, {score_name(lines)} in %"


def score_name(lines: list[MethodLine]) -> str:
    """The score that was recorded: accuracy, or Dice for segmentation."""
    return " and ".join(sorted({r.data.metric for x in lines for r in x.records}))


def targets(lines: list[MethodLine]) -> set[tuple[str, ...]]:
    """The sets of domains or clients that were held out."""
    return {tuple(r.unseen) for x in lines for r in x.records} - {()}


def scores_by_row(lines: list[MethodLine]) -> dict[str, list[float]]:
    """Row → a value per line, worst first. A row is a held-out target or, where there is at most one target, a client.
    Empty for one row or more than MOST_ROWS."""
    found: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in lines])
    several = len(targets(lines)) > 1
    for k, record in ((k, r) for k, x in enumerate(lines) for r in x.records):
        cells = {"+".join(record.unseen): record.finished.last.get("G")} if several else scores_by_client(record)
        for name, value in cells.items():
            if value is not None:
                found[name][k].append(100 * value)
    means = {n: [float(np.mean(v)) if v else np.nan for v in cells] for n, cells in found.items()}
    order = sorted(means, key=lambda n: (np.nan_to_num(means[n][0]), n))
    return {n: means[n] for n in order} if 1 < len(order) <= MOST_ROWS else {}


def scores_by_client(record: RunRecord) -> Scores:
    """Test scores in the last round: of the shared model for held-out clients, otherwise of the personal models."""
    out: Scores = {}
    for name, views in record.finished.last.get("clients", {}).items():
        held = name in record.finished.unseen
        view = views.get("shared", {}) if held else views.get("personal", {})
        out[f"{name} (held out)" if held else name] = view.get("test")
    return out


def plot_rows(ax: Axes, lines: list[MethodLine], rows: dict[str, list[float]], theme: Theme) -> None:
    trained = [x for x in lines if not x.frozen]
    for k, line in enumerate(lines):
        rank = 0.0 if line.frozen else (len(trained) - 1) / 2 - trained.index(line)
        heights = np.arange(len(rows)) + rank * min(0.16, 0.7 / len(lines))  # offset: equal values must not overlap
        marker, size, edge = ("|", 15.0, 2.2) if line.frozen else (line.marker, 5.5, 1.0)
        values = [v[k] for v in rows.values()]
        ax.plot(values, heights, color=line.colour, ls="", marker=marker, ms=size, mew=edge)
    ax.hlines(np.arange(len(rows)) - 0.5, *ax.get_xlim(), color=theme.muted, alpha=0.2, lw=0.6)
    ax.set_yticks(range(len(rows)), [shorten(n, 22) for n in rows])
    ax.tick_params("y", length=0)
    ax.margins(x=0)
    ax.set_ylim(-0.5, len(rows) - 0.5)
    several = len(targets(lines)) > 1
    ax.set_xlabel(f"{score_name(lines)} when held out (G), %" if several else f"test {score_name(lines)}, %")
    ax.set_title(f"each {'target' if several else 'client'}{', zero-shot as |' * lines[0].frozen}")


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
    parts.append(f"{' or '.join(map(str, seeds))} seed{'s (± s.e.)' if seeds[-1] > 1 else ' (error unknown)'}")
    parts.append(f"{' or '.join(map(str, rounds))} round{'s' * (rounds != [1])}")
    if len({frozenset((r.seed, *r.unseen) for r in x.records) for x in lines}) > 1:
        parts.append("CAUTION: methods differ in targets or seeds")
    return " · ".join([*parts, "last round, test split"])


def spaced(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Heights of labels: as close as possible to the wanted ones, at least `gap` apart and between `low` and `high`
    (isotonic regression of y − rank·gap)."""
    order = [int(k) for k in np.argsort(wanted, kind="stable")]
    blocks: list[tuple[float, int]] = []  # mean, number of members
    for rank, k in enumerate(order):
        mean, count = wanted[k] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            other, members = blocks.pop()
            mean, count = (mean * count + other * members) / (count + members), count + members
        blocks.append((mean, count))
    flat = np.repeat([b[0] for b in blocks], [b[1] for b in blocks])
    inside = np.clip(flat, low, max(low, high - gap * (len(order) - 1))) + gap * np.arange(len(order))
    return [float(inside[order.index(k)]) for k in range(len(order))]


def shorten(label: str, most: int = 26) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
