"""A figure of how evenly a federation serves its clients, made from run folders only.

Left: the clients of each method ranked by the test score of their personal models. Right: the variance over clients of
the generalisation gap (validation loss of the averaged model − that of the client's own model) by round, where a run
recorded it. Means over runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedvlm.report.figures import (
    LIGHT,
    MethodLine,
    Picture,
    Theme,
    caption,
    gather,
    score_name,
    settled,
    shorten,
    spaced,
    styled,
    write_picture,
)
from fedvlm.training.folder import RunFolder

PERCENTILES = np.linspace(0, 100, 101)
SMALLEST = 1e-12  # variances are drawn as logarithms


def fairness_of(runs: list[RunFolder], theme: Theme = LIGHT) -> Picture:
    """The figure, not written anywhere."""
    with styled(theme):
        return settled(draw_fairness(runs, theme))


def fairness_figure(runs: list[RunFolder], path: Path, theme: Theme = LIGHT) -> None:
    """Writes the figure as a PNG file."""
    write_picture(fairness_of(runs, theme), path, theme)


def ranked_scores(line: MethodLine) -> np.ndarray | None:
    """The score in percent of the client at each percentile, 0 the worst; None for fewer than two clients.
    Held-out clients are left out."""
    found = []
    for record in line.records:
        clients, unseen = record.finished.last.get("clients", {}), set(record.finished.unseen)
        own = [v.get("personal", v.get("shared", {})).get("test") for n, v in clients.items() if n not in unseen]
        known = sorted(100 * v for v in own if v is not None)
        if len(known) > 1:
            found.append(np.interp(PERCENTILES, np.linspace(0, 100, len(known)), known))
    return np.mean(found, axis=0) if found else None


def gap_variances(runs: list[RunFolder], line: MethodLine) -> tuple[list[int], np.ndarray] | None:
    """The rounds that all runs of a method recorded, and the variance of the gap in each; None where there is none."""
    identities = {r.identity for r in line.records}
    by_run = [
        {x["round"]: x["gap_variance"] for x in r.rounds() if "gap_variance" in x}
        for r in runs
        if r.record.identity in identities
    ]
    rounds = sorted(set.intersection(*map(set, by_run))) if by_run else []
    return (rounds, np.mean([[v[k] for k in rounds] for v in by_run], axis=0)) if rounds else None


def draw_fairness(runs: list[RunFolder], theme: Theme) -> Picture:
    lines = gather(runs, theme)
    ranked = {x.label: v for x in lines if (v := ranked_scores(x)) is not None}
    variances = {x.label: found for x in lines if (found := gap_variances(runs, x)) is not None}
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.05, 0.985, 0.94), w_pad=0.12)
    fig = Picture(figsize=(10 if variances else 6, 5), layout=layout)
    left, *right = fig.subplots(1, 2 if variances else 1, squeeze=False)[0]
    plot_ranked(left, lines, ranked)
    for ax in right:
        plot_variances(ax, lines, variances)
    for ax in (left, *right):
        ax.grid(axis="y", color=theme.muted, alpha=0.2, lw=0.6)
    fig.text(0.008, 0.015, caption(lines), fontsize=7.5, color=theme.muted)
    return fig


def plot_ranked(ax: Axes, lines: list[MethodLine], ranked: dict[str, np.ndarray]) -> None:
    for line in (x for x in lines if x.label in ranked):
        ax.plot(PERCENTILES, ranked[line.label], color=line.colour, lw=1.8)
        ax.plot([0, 100], ranked[line.label][[0, -1]], color=line.colour, marker=line.marker, ls="", ms=5)
    if ranked:
        low, high = ax.get_ylim()
        label_curves(ax, lines, {label: float(v[-1]) for label, v in ranked.items()}, 103, low, high)
    ax.set(
        xlim=(0, 100),
        xlabel="clients ranked from worst to best, percentile",
        ylabel=f"test {score_name(lines)} of the personal model, %",
    )
    ax.set_title("scores of the clients")


def plot_variances(ax: Axes, lines: list[MethodLine], variances: dict[str, tuple[list[int], np.ndarray]]) -> None:
    for line in (x for x in lines if x.label in variances):
        rounds, values = variances[line.label]
        ax.plot(rounds, np.log10(np.maximum(values, SMALLEST)), color=line.colour, lw=1.6)
    ends = {label: float(np.log10(max(values[-1], SMALLEST))) for label, (_, values) in variances.items()}
    low, high = ax.get_ylim()
    last = max(rounds[-1] for rounds, _ in variances.values())
    label_curves(ax, lines, ends, last * 1.03, low, high)
    ax.set(xlim=(0, last), ylim=(low, high), xlabel="round", ylabel="variance over clients")
    ax.yaxis.set_major_formatter(lambda power, _: f"{10**power:.1g}")
    ax.set_title("generalisation gap")


def label_curves(ax: Axes, lines: list[MethodLine], ends: dict[str, float], x: float, low: float, high: float) -> None:
    """Writes each method's label at `x`, near the end of its curve."""
    colours = {line.label: line.colour for line in lines}
    heights = spaced(list(ends.values()), (high - low) * 0.05, low, high)
    for label, y in zip(ends, heights, strict=True):
        ax.text(x, y, shorten(label, 20), color=colours[label], va="center")
