"""How evenly a federation serves its clients: who is worst off, and what averaging costs whom, from run folders only.

Left: each method's clients from the worst served to the best, own models on test. Right: the variance, over clients, of
the gap (what averaging costs a client, on validation), round by round, where a run recorded it. Means over runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedvlm.report.figures import LIGHT, Line, Look, brief, caption, gather, score, spread, styled
from fedvlm.runs import Run

RANKS = np.linspace(0, 100, 101)


def figure(runs: list[Run], path: Path, look: Look = LIGHT) -> None:
    with styled(look):
        draw(runs, look).savefig(path, format="png", dpi=200, facecolor=look.paper)


def served(line: Line) -> np.ndarray | None:
    """The score, in percent, of the client at each rank from 0 (worst) to 100 (best); None below two clients."""
    found = []
    for info in line.infos:
        clients, away = info["result"]["last"].get("clients", {}), set(info["result"]["unseen"])
        own = [v.get("personal", v.get("shared", {})).get("test") for n, v in clients.items() if n not in away]
        known = sorted(100 * v for v in own if v is not None)
        if len(known) > 1:
            found.append(np.interp(RANKS, np.linspace(0, 100, len(known)), known))
    return np.mean(found, axis=0) if found else None


def gaps(runs: list[Run], line: Line) -> tuple[list[int], np.ndarray] | None:
    """Rounds, and the variance of gaps in each."""
    mine = {i["identity"] for i in line.infos}
    told = [
        {x["round"]: x["gap_variance"] for x in r.rounds() if "gap_variance" in x}
        for r in runs
        if r.info["identity"] in mine
    ]
    rounds = sorted(set.intersection(*map(set, told))) if told else []
    return (rounds, np.mean([[t[k] for k in rounds] for t in told], axis=0)) if rounds else None


def draw(runs: list[Run], look: Look) -> Figure:
    lines = gather(runs, look)
    curves = {x.label: v for x in lines if (v := served(x)) is not None}
    costs = {x.label: told for x in lines if (told := gaps(runs, x)) is not None}
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.05, 0.985, 0.94), w_pad=0.12)
    fig = Figure(figsize=(10 if costs else 6, 5), layout=layout)
    left, *right = fig.subplots(1, 2 if costs else 1, squeeze=False)[0]
    for line in (x for x in lines if x.label in curves):
        left.plot(RANKS, curves[line.label], color=line.colour, lw=1.8)
        left.plot([0, 100], curves[line.label][[0, -1]], color=line.colour, marker=line.marker, ls="", ms=5)
    if curves:
        low, high = left.get_ylim()
        heights = spread([v[-1] for v in curves.values()], (high - low) * 0.05, low, high)
        for label, y in zip(curves, heights, strict=True):
            colour = next(x.colour for x in lines if x.label == label)
            left.text(103, y, brief(label, 20), color=colour, va="center")
    left.set(
        xlim=(0, 100),
        xlabel="clients, from the worst served to the best, %",
        ylabel=f"test {score(lines)} of its own model, %",
    )
    left.set_title("who is worst off")
    for ax in right:
        for line in (x for x in lines if x.label in costs):
            rounds, values = costs[line.label]
            ax.plot(rounds, np.log10(np.maximum(values, 1e-12)), color=line.colour, lw=1.6)
        ends = {label: float(np.log10(max(values[-1], 1e-12))) for label, (_, values) in costs.items()}
        low, high = ax.get_ylim()
        heights = spread(list(ends.values()), (high - low) * 0.05, low, high)
        last = max(rounds[-1] for rounds, _ in costs.values())
        for (label, _), y in zip(ends.items(), heights, strict=True):
            colour = next(x.colour for x in lines if x.label == label)
            ax.text(last * 1.03, y, brief(label, 20), color=colour, va="center")
        ax.set(xlim=(0, last), ylim=(low, high), xlabel="round", ylabel="variance of gaps over clients")
        ax.yaxis.set_major_formatter(lambda power, _: f"{10**power:.1g}")
        ax.set_title("what averaging costs, unevenly")
    for ax in (left, *right):
        ax.grid(axis="y", color=look.faint, alpha=0.2, lw=0.6)
    fig.text(0.008, 0.015, caption(lines), fontsize=7.5, color=look.faint)
    return fig
