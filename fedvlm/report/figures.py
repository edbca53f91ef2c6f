"""One picture of what federated adaptation buys over the frozen model, from run folders only.

Left: the clients' own models (P) against the shared model on held-out clients (G), with the way there, the frozen model
as crosshair. Middle: G and P by round. Right: the held-out clients one by one. Base-to-novel runs: base for P, novel for
G, and all four measures by round. Bars and bands are ± one standard error over seeds; the numbers are the tables' own
(`by_seed`; last round, test split), so the two cannot disagree.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from fedvlm.evaluate.protocols import MEASURES, by_seed, opened
from fedvlm.report.tables import grouped
from fedvlm.runs import Run

FROZEN = "zero-shot"
BUYS = "what adaptation buys over the frozen model"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MEANING = {"G": "{} on clients nobody has seen (G), %", "P": "{} of the clients' own models (P), %"}
MEANING |= {"novel": "{} on classes nobody trains on (novel), %", "base": "{} on all classes trained on (base), %"}
DRAWN = ("G", "P", *MEASURES)


class Look(NamedTuple):
    paper: str
    ink: str
    faint: str
    colours: tuple[str, ...]


# Okabe & Ito's palette (2008) is told apart by the colour-blind too; on dark paper it is lightened
LIGHT = Look("#ffffff", "#1f2933", "#6b7580", ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"))
DARK = Look("#14181d", "#e4e7eb", "#98a2ad", ("#4BA3E3", "#F0813C", "#2FC79C", "#E59CC6", "#EDB43C", "#A5D8F3"))


@dataclass(frozen=True)
class Line:
    """One method as it is drawn."""

    label: str
    infos: list[dict[str, Any]]
    rounds: list[int]
    scores: dict[str, np.ndarray]  # measure: [rounds, seeds] in percent, NaN where there is no such model
    colour: str
    marker: str

    @property
    def frozen(self) -> bool:
        return bool(self.infos[0]["method"] == FROZEN)

    def over(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard error over seeds, by round."""
        values = self.scores[metric]
        seeds = values.shape[1]
        mean = values.mean(1) if seeds else np.full(len(values), np.nan)
        return mean, values.std(1, ddof=1) / seeds**0.5 if seeds > 1 else np.zeros(len(values))

    def last(self, metric: str) -> tuple[float, float]:
        mean, error = self.over(metric)
        return float(mean[-1]), float(error[-1])


def figure(runs: list[Run], path: Path, look: Look = LIGHT) -> None:
    with styled(look):
        draw(gather(runs, look), look).savefig(path, format="png", dpi=200, facecolor=look.paper)


def styled(look: Look) -> AbstractContextManager[None]:
    style: Any = {
        "font.size": 8.5,
        "text.parse_math": False,
        "axes.titlelocation": "left",
        "axes.facecolor": look.paper,
    }
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), look.ink)
    style |= dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), look.faint)
    return matplotlib.rc_context(style)


def gather(runs: list[Run], look: Look) -> list[Line]:
    """A line a method, the frozen model first; each round scored as the tables score the last."""
    records = {r.info["identity"]: {x["round"]: x for x in r.rounds() if "personal" in x} for r in runs}
    lines: list[Line] = []
    for label, infos in sorted(grouped(runs).items(), key=lambda g: g[1][0]["method"] != FROZEN):
        known = [records[i["identity"]] or {i["result"]["last"]["round"]: i["result"]["last"]} for i in infos]
        rounds = sorted(set.intersection(*map(set, known)))
        table = []
        for k in rounds:
            then = [i | {"result": i["result"] | {"last": r[k]}} for i, r in zip(infos, known, strict=True)]
            table.append([[s.get(m) for m in DRAWN] for s in by_seed(then).values()])
        values = 100 * np.array(table, float).reshape(len(rounds), -1, len(DRAWN))
        k = sum(not x.frozen for x in lines)
        colour = look.faint if infos[0]["method"] == FROZEN else look.colours[k % len(look.colours)]
        marker = "D" if infos[0]["method"] == FROZEN else MARKERS[k % len(MARKERS)]
        by_name = {m: values[..., j] for j, m in enumerate(DRAWN)}
        lines.append(Line(label, infos, rounds, by_name, colour, marker))
    return lines


def draw(lines: list[Line], look: Look) -> Figure:
    halved = all(opened(i) for x in lines for i in x.infos)
    known = [m for m in DRAWN if any(np.isfinite(x.last(m)[0]) for x in lines)]
    axes = [m for m in (("novel", "base") if halved else ("G", "P")) if m in known]
    metrics = [m for m in MEASURES if m in known] if halved else axes
    rows, curved = by_client(lines), any(len(x.rounds) > 1 for x in lines)
    widths = [1.25, *([1.2] if curved and metrics else []), *([1.0] if rows else [])]
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.05, 0.985, 0.94), w_pad=0.12)
    fig = Figure(figsize=(4 * len(widths), max(5.0, 2 + 0.24 * len(rows), 1.7 * len(metrics))), layout=layout)
    panels = fig.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0]
    if len(axes) == 2:
        plane(panels[0].subplots(), lines, look, *axes)
    else:
        ladder(panels[0].subplots(), lines, axes[0] if axes else "P", look)
    if curved and metrics:
        stack = panels[1].subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
        for ax, metric in zip(stack, metrics, strict=True):
            curves(ax, lines, metric, look)
        stack[0].set_title("round by round")
        stack[-1].set_xlabel("round")
    if rows:
        dots(panels[-1].subplots(), lines, rows, look)
    fig.text(0.008, 0.015, caption(lines), fontsize=7.5, color=look.faint)
    return fig


def plane(ax: Axes, lines: list[Line], look: Look, up: str = "G", across: str = "P") -> None:
    """G over P. A method without a shared model has no G; it stands on the lower edge at its P. So, too, novel over base."""
    at = {line.label: (*line.last(across), *line.last(up)) for line in lines}
    both = [x for x in lines if np.isfinite(at[x.label]).all()]
    alone = [x for x in lines if np.isfinite(at[x.label][0]) and x not in both]
    base = next((x for x in both if x.frozen), None)
    for line in both:
        p, dp, g, dg = at[line.label]
        ax.plot(line.over(across)[0], line.over(up)[0], color=line.colour, lw=1.2, alpha=0.3)
        ax.errorbar(p, g, dg, dp, color=line.colour, marker=line.marker, ms=8, elinewidth=1.2, capsize=2.5, zorder=4)
    for line in alone:
        ax.plot(at[line.label][0], 0, "^", ms=9, color=line.colour, transform=ax.get_xaxis_transform(), clip_on=False)
    ax.margins(0.16, 0.14)
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    ax.set(xlim=(left, right), ylim=(low, high), xlabel=meaning(lines, across), ylabel=meaning(lines, up))
    plain = "shared and personal models" if up == "G" else "classes trained on, and others"
    ax.set_title(BUYS if base and len(lines) > 1 else plain)
    if base:
        p, _, g, _ = at[base.label]
        ax.axvline(p, color=look.faint, lw=0.9, ls="--", zorder=1)
        ax.axhline(g, color=look.faint, lw=0.9, ls="--", zorder=1)
        ax.fill_between([p, right], g, high, color=look.faint, alpha=0.07, lw=0, zorder=0)
    step = (high - low) * 0.045
    wanted = [low + step * (0.5 + k) for k in range(len(alone))]
    wanted += [at[x.label][2] - (step * 0.8 if x is base else 0) for x in both]
    for line, y in zip([*alone, *both], spread(wanted, step, low, high), strict=True):
        p, dp, g, _ = at[line.label]
        text = f"  {across} {p:.1f}, no {up}" if line in alone else f"  {up} {g:.1f}, {across} {p:.1f}"
        if base and line is not base and line in both:
            text = f"  {up} {g - at[base.label][2]:+.1f}, {across} {p - at[base.label][0]:+.1f}"
        side = 1 if p < (left + right) / 2 else -1
        x = p + side * (dp + (right - left) * 0.025)
        room = ((right - x) if side > 0 else (x - left)) / (right - left) / 0.0195  # in letters
        text = brief(line.label) + (text if len(brief(line.label) + text) < room else "")
        halo = [withStroke(linewidth=2.5, foreground=look.paper)]
        where: Any = {"ha": "left" if side > 0 else "right", "va": "center", "path_effects": halo}
        ax.text(x, y, text, color=line.colour, size=8, weight="bold", **where)


def ladder(ax: Axes, lines: list[Line], metric: str, look: Look) -> None:
    """One metric only (nobody was held out, or nothing is shared): a row a method."""
    for k, line in enumerate(reversed(lines)):
        value, error = line.last(metric)
        ax.errorbar(value, k, xerr=error, color=line.colour, marker=line.marker, ms=8, elinewidth=1.2, capsize=2.5)
        if np.isfinite(value):
            near: Any = {"xytext": (7, 7), "textcoords": "offset points"}
            ax.annotate(f"{value:.1f}", (value, k), **near, color=line.colour, weight="bold")
        if line.frozen:
            ax.axvline(value, color=look.faint, lw=0.9, ls="--", zorder=1)
    ax.set_yticks(range(len(lines)), [brief(x.label) for x in reversed(lines)])
    ax.set(xlabel=meaning(lines, metric), ylim=(-0.6, len(lines) - 0.4))
    ax.margins(x=0.2)
    ax.set_title(BUYS if lines[0].frozen and len(lines) > 1 else "after the last round")


def curves(ax: Axes, lines: list[Line], metric: str, look: Look) -> None:
    shown = [x for x in lines if np.isfinite(x.last(metric)[0])]
    final = max(x.rounds[-1] for x in lines)
    for line in shown:
        mean, error = line.over(metric)
        ax.plot(line.rounds, mean, color=line.colour, lw=1.8)
        ax.fill_between(line.rounds, mean - error, mean + error, color=line.colour, alpha=0.2, lw=0)
        ax.hlines(mean[-1], line.rounds[-1], final, color=line.colour, lw=0.9, ls="--", zorder=1)
    low, high = ax.get_ylim()
    gap = (high - low) * min(0.1, 1 / len(shown))
    for line, y in zip(shown, spread([x.last(metric)[0] for x in shown], gap, low, high), strict=True):
        ax.text(final * 1.03, y, brief(line.label, 16), color=line.colour, va="center")
    ax.set(xlim=(0, final), ylim=(low, high), ylabel=f"{metric}, %")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.grid(axis="y", color=look.faint, alpha=0.2, lw=0.6)


def meaning(lines: list[Line], metric: str) -> str:
    return MEANING[metric].format(score(lines))


def score(lines: list[Line]) -> str:
    """What was measured: accuracy, Dice."""
    return " and ".join(sorted({i["data"].get("metric", "accuracy") for x in lines for i in x.infos}))


def targets(lines: list[Line]) -> set[tuple[str, ...]]:
    return {tuple(i["config"]["unseen"]) for x in lines for i in x.infos} - {()}


def by_client(lines: list[Line]) -> dict[str, list[float]]:
    """Row → a value a line. Rows are the held-out targets or, where there is at most one, the clients."""
    found: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in lines])
    several = len(targets(lines)) > 1
    for k, info in ((k, i) for k, x in enumerate(lines) for i in x.infos):
        last, unseen = info["result"]["last"], info["result"]["unseen"]
        cells = {"+".join(info["config"]["unseen"]): last.get("G")}
        if not several:
            held = {n: ("shared", f"{n} (held out)") for n in unseen}
            views = ((v, *held.get(n, ("personal", n))) for n, v in last.get("clients", {}).items())
            cells = {name: v.get(view, {}).get("test") for v, view, name in views}
        for name, value in cells.items():
            if value is not None:
                found[name][k].append(100 * value)
    means = {n: [float(np.mean(v)) if v else np.nan for v in cells] for n, cells in found.items()}
    order = sorted(means, key=lambda n: (np.nan_to_num(means[n][0]), n))
    return {n: means[n] for n in order} if 1 < len(order) <= 30 else {}


def dots(ax: Axes, lines: list[Line], rows: dict[str, list[float]], look: Look) -> None:
    trained = [x for x in lines if not x.frozen]
    for k, line in enumerate(lines):
        rank = 0.0 if line.frozen else (len(trained) - 1) / 2 - trained.index(line)
        heights = np.arange(len(rows)) + rank * min(0.16, 0.7 / len(lines))  # equal values stay side by side
        mark: Any = {"marker": "|", "ms": 15, "mew": 2.2} if line.frozen else {"marker": line.marker, "ms": 5.5}
        ax.plot([v[k] for v in rows.values()], heights, color=line.colour, ls="", **mark)
    ax.hlines(np.arange(len(rows)) - 0.5, *ax.get_xlim(), color=look.faint, alpha=0.2, lw=0.6)
    ax.set_yticks(range(len(rows)), [brief(n, 22) for n in rows])
    ax.tick_params("y", length=0)
    ax.margins(x=0)
    ax.set_ylim(-0.5, len(rows) - 0.5)
    several = len(targets(lines)) > 1
    ax.set_xlabel(f"{score(lines)} when held out (G), %" if several else f"test {score(lines)}, %")
    ax.set_title(f"each {'target' if several else 'client'}{', zero-shot as |' * lines[0].frozen}")


def caption(lines: list[Line]) -> str:
    infos = [i for x in lines for i in x.infos]
    backbones = ", ".join(sorted({i["backbone"]["name"].split("@")[0] for i in infos}))
    sets = ", ".join(sorted({i["data"]["name"] for i in infos}))
    held, seeds = len(targets(lines)), sorted({x.scores["P"].shape[1] for x in lines})  # those that have every target
    rounds = sorted({x.rounds[-1] for x in lines if not x.frozen} or {0})
    parts = [f"backbone {backbones}", f"data {sets}"]
    parts.append(f"{held} held-out target{'s' * (held != 1)}" if held else "nobody held out")
    parts += ["half of the classes kept from everybody"] * any(map(opened, infos))
    parts.append(f"{' or '.join(map(str, seeds))} seed{'s (± s.e.)' if seeds[-1] > 1 else ' (no error known)'}")
    parts.append(f"{' or '.join(map(str, rounds))} round{'s' * (rounds != [1])}")
    if len({frozenset((i["config"]["seed"], *i["config"]["unseen"]) for i in x.infos) for x in lines}) > 1:
        parts.append("CAUTION: methods differ in targets or seeds")
    return " · ".join([*parts, "last round, test split"])


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Heights as near as can be to the wanted ones, `gap` apart and inside: isotonic regression of y − rank·gap."""
    order = [int(k) for k in np.argsort(wanted, kind="stable")]
    blocks: list[tuple[float, int]] = []  # mean, members
    for rank, k in enumerate(order):
        mean, count = wanted[k] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            other, members = blocks.pop()
            mean, count = (mean * count + other * members) / (count + members), count + members
        blocks.append((mean, count))
    flat = np.repeat([b[0] for b in blocks], [b[1] for b in blocks])
    inside = np.clip(flat, low, max(low, high - gap * (len(order) - 1))) + gap * np.arange(len(order))
    return [float(inside[order.index(k)]) for k in range(len(order))]


def brief(label: str, most: int = 26) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
