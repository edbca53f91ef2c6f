"""The charts with which the page compares methods, from run folders only.

The numbers are those of `lines.gather`, and so of the tables: last round, test split. Intervals stand in the ranking.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedvlm.core.records import MEASURES
from fedvlm.evaluation.protocols import is_base_to_novel
from fedvlm.report.axes import Drawn, indexed, label_points, name_curves, room, rows_axes
from fedvlm.report.client_charts import charts_of_clients, ends, ranked, variances
from fedvlm.report.columns import DEFINED
from fedvlm.report.lines import PLOTTED, MethodLine
from fedvlm.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, chart, shape_path
from fedvlm.system.table import ClientScores
from fedvlm.training.folder import RunFolder

FEW_POINTS = 5  # seeds whose points are drawn beside a mean
FRONT_FROM = 4  # methods from which on a front is drawn
MOST_ROWS = 10  # clients with a row of their own, where there are more than MANY
MANY = 30


class Comparison(NamedTuple):
    """The charts of a block."""

    plane: Drawn | None  # both goals at once
    clients: list[Drawn]
    rounds: list[Drawn]
    cost: list[Drawn]
    recorded: list[Drawn]  # weights and gaps


def comparison(
    runs: list[RunFolder], lines: list[MethodLine], lead: str, by_client: dict[str, ClientScores]
) -> Comparison:
    axes = axes_of(lines)
    curved = [m for m in (MEASURES if axes == ["novel", "base"] else axes) if is_known(lines, m)]
    return Comparison(
        plane(lines, *axes) if len(axes) == 2 and len(lines) > 1 else None,
        [*client_rows(by_client, lead), *ranked(lines)],
        [by_round(lines, m) for m in curved if any(len(x.rounds) > 1 for x in lines)],
        cost_chart(lines, axes[0], megabytes(runs, lines)) if axes else [],
        [*variances(runs, lines), *charts_of_clients(runs, lines)],
    )


def axes_of(lines: list[MethodLine]) -> list[str]:
    open_classes = all(is_base_to_novel(r) for x in lines for r in x.records)
    return [m for m in (("novel", "base") if open_classes else ("G", "P")) if is_known(lines, m)]


def is_known(lines: list[MethodLine], metric: str) -> bool:
    return any(math.isfinite(x.last(metric)[0]) for x in lines)


def word(metric: str) -> str:
    return DEFINED[metric].word


def plane(lines: list[MethodLine], up: str, across: str) -> Drawn:
    """Each method as a point, with those of its seeds as dots; dashed lines through the frozen model."""
    at = {k: (x.last(across)[0], x.last(up)[0]) for k, x in indexed(lines)}
    both = [(k, x) for k, x in indexed(lines) if np.isfinite(at[k]).all()]
    dots = {k: list(zip(x.scores[across][-1], x.scores[up][-1], strict=True)) for k, x in both}
    dots = {
        k: v if 1 < len(v) <= FEW_POINTS and not x.frozen else [] for (k, x), v in zip(both, dots.values(), strict=True)
    }
    every = [at[k] for k, _ in both] + [p for v in dots.values() for p in v]
    c = chart(
        f"{word(up)} against {word(across)}", [p for p, _ in every], [g for _, g in every], f"{word(across)}, % →"
    )
    c.y_label = f"↑ {word(up)}, %"
    for k, x in both:
        p, g = at[k]
        c.open_group(k, x.frozen)
        if x.frozen:
            c.add("line", x1=c.x(p), x2=c.x(p), y1=TOP, y2=HEIGHT - BOTTOM, cls="reference")
            c.add("line", x1=LEFT, x2=WIDTH - RIGHT, y1=c.y(g), y2=c.y(g), cls="reference")
        for a, b in dots[k]:
            c.add("circle", cx=c.x(a), cy=c.y(b), r=2, cls="seed")
        c.marker(k, p, g, f"{x.label}: {word(up)} {g:.1f} %, {word(across)} {p:.1f} %", x.frozen)
        c.close_group()
    label_points(c, [(k, x, *at[k]) for k, x in both])
    left_out = [x.label for k, x in indexed(lines) if (k, x) not in both]
    caption = "Up and to the right is better." + " Small dots: seeds." * any(map(bool, dots.values()))
    caption += " Dashed: zero-shot." * any(x.frozen for _, x in both)
    caption += f" Not drawn, because a value is missing: {', '.join(left_out)}." if left_out else ""
    return Drawn(f"{word(up).capitalize()} against {word(across)}", caption, str(c))


def ranking(lines: list[MethodLine]) -> Drawn:
    """A row for each method by the one goal that there is, the best on top."""
    metric = next((m for m in axes_of(lines)), "P")
    at = {k: x.last(metric)[0] for k, x in indexed(lines)}
    order = sorted(indexed(lines), key=lambda found: -np.nan_to_num(at[found[0]], nan=-1.0))
    c = rows_axes("methods ranked", [x.label for _, x in order], list(at.values()), f"{word(metric)}, %")
    for place, (k, x) in enumerate(order):
        if math.isfinite(at[k]):
            c.open_group(k, x.frozen)
            c.marker(k, at[k], place, f"{x.label}: {at[k]:.1f} %", x.frozen)
            c.close_group()
    return Drawn(word(metric).capitalize(), f"{DEFINED[metric].meaning}, %.", str(c))


def client_rows(by_client: dict[str, ClientScores], lead: str) -> list[Drawn]:
    """A row for each client of one method: as a new client, with its own model, and with the frozen model; the weakest
    first, and of many only these."""
    own, frozen = by_client.get(lead, {}), by_client.get("zero-shot", {})
    new, personal = own.get("G", {}), own.get("P", {})
    known = new or personal
    if len(known) < 2:
        return []
    names = sorted(known, key=lambda name: known[name])
    names = names if len(names) <= MANY else names[:MOST_ROWS]
    shown = {
        "circle hollow": ("as a new client", new),
        "circle": ("with its own model", personal),
        "diamond": ("zero-shot", frozen.get("P", {}) | frozen.get("G", {})),
    }
    values = [v[n] for _, v in shown.values() for n in names if n in v]
    c = rows_axes(f"clients of {lead}", names, values, "%")
    for style, (what, scores) in shown.items():
        shape, _, kind = style.partition(" ")
        c.parts.append(f'<g class="{"f-ref" if shape == "diamond" else "lead"}">')
        for place, name in enumerate(names):
            if name in scores:
                path = shape_path(shape, c.x(scores[name]), c.y(place), 4.5)
                c.add("path", f"{name}, {what}: {scores[name]:.1f} %", d=path, cls=f"mark {kind}".strip())
        c.close_group()
    many = f"The {MOST_ROWS} weakest of {len(known)}. " if len(known) > MANY else ""
    words = "○ as a new client, " * bool(new) + "● with its own model, ◇ zero-shot; the weakest first."
    return [Drawn(f"Clients of {lead}", f"{many}{words}", str(c))]


def by_round(lines: list[MethodLine], metric: str) -> Drawn:
    """A method that ends earlier than others goes on dotted at its last value."""
    shown = [(k, x) for k, x in indexed(lines) if math.isfinite(x.last(metric)[0])]
    values = [v for _, x in shown for v in x.over(metric)[0]]
    last = max(x.rounds[-1] for _, x in shown)
    names = room([x.label for _, x in shown])
    c = chart(f"{word(metric)} by round", [0.0, float(last)], values, "round", room=names)
    for k, x in shown:
        mean, _ = x.over(metric)
        c.open_group(k, x.frozen)
        if x.frozen:
            c.add("line", x1=LEFT, x2=c.x.end, y1=c.y(mean[-1]), y2=c.y(mean[-1]), cls="reference")
        elif x.rounds[-1] < last:
            c.add("line", x1=c.x(x.rounds[-1]), x2=c.x(last), y1=c.y(mean[-1]), y2=c.y(mean[-1]), cls="ended")
        tips = [f"{x.label}, round {r}: {v:.1f} %" for r, v in zip(x.rounds, mean, strict=True)]
        c.curve(k, [float(r) for r in x.rounds], mean.tolist(), tips)
        c.close_group()
    name_curves(c, ends(lines, {x.label: float(x.last(metric)[0]) for _, x in shown}))
    return Drawn(f"{word(metric).capitalize()} by round", f"{DEFINED[metric].meaning}, %.", str(c))


def megabytes(runs: list[RunFolder], lines: list[MethodLine]) -> dict[str, np.ndarray]:
    """The megabytes that each method sent until each of its rounds, in both directions, mean over runs."""
    sent: dict[str, dict[int, int]] = {}
    for run in runs:
        total, by_round = 0, dict[int, int]()
        for record in run.rounds():
            total += record.get("bytes_up", 0) + record.get("bytes_down", 0)
            by_round[record["round"]] = total
        sent[run.record.identity] = by_round
    out = {}
    for line in lines:
        each = [sent[r.identity] for r in line.records]
        whole = [r.finished.bytes_up + r.finished.bytes_down for r in line.records]
        out[line.label] = np.array(
            [np.mean([s.get(k, w) for s, w in zip(each, whole, strict=True)]) / 1e6 for k in line.rounds]
        )
    return out


def cost_chart(lines: list[MethodLine], metric: str, spent: dict[str, np.ndarray]) -> list[Drawn]:
    """One goal over the megabytes of a run, with the front of those that nothing dominates; nothing where all send alike."""
    at = {k: (float(spent[x.label][-1]), x.last(metric)[0]) for k, x in indexed(lines)}
    shown = [(k, x) for k, x in indexed(lines) if math.isfinite(at[k][1])]
    if len({round(at[k][0], 9) for k, x in shown if not x.frozen}) < 2:
        return []
    xs, ys = [at[k][0] for k, _ in shown], [at[k][1] for k, _ in shown]
    c = chart(f"{word(metric)} and cost", xs, ys, "MB sent in the whole run, logarithmic", log_x=True)
    c.y_label = f"↑ {word(metric)}, %"
    best = front(xs, ys)
    corners = [z for a, b in itertools.pairwise(best) for z in ((xs[b], ys[a]), (xs[b], ys[b]))]
    path = [(xs[best[0]], ys[best[0]]), *corners] if len(shown) >= FRONT_FROM else []
    if len(path) > 1:
        c.add("path", d="M" + "L".join(f"{c.x(a):g} {c.y(b):g}" for a, b in path), cls="front")
    for (k, x), mb, value in zip(shown, xs, ys, strict=True):
        c.open_group(k, x.frozen)
        c.marker(k, mb, value, f"{x.label}: {value:.1f} % at {mb:.3g} MB", x.frozen)
        c.close_group()
    label_points(c, [(k, x, *at[k]) for k, x in shown])
    caption = "On the line: no other method is at least as good for fewer bytes." * (len(path) > 1)
    return [Drawn(f"{word(metric).capitalize()} and cost", caption, str(c))]


def front(costs: Sequence[float], scores: Sequence[float]) -> list[int]:
    """The entries that no other one dominates, cheapest first."""
    out: list[int] = []
    for k in sorted(range(len(costs)), key=lambda k: (costs[k], -scores[k])):
        if not out or scores[k] > scores[out[-1]]:
            out.append(k)
    return out


def curve_table(lines: list[MethodLine], spent: dict[str, np.ndarray], most: int = 12) -> list[dict[str, str]]:
    """What the curves show, as rows of a table; of many rounds, evenly chosen ones."""
    metrics, rows = [m for m in PLOTTED if is_known(lines, m)], []
    for line in lines:
        places = np.unique(np.linspace(0, len(line.rounds) - 1, most).round().astype(int))
        for place in places:
            row = {"method": line.label, "round": str(line.rounds[place]), "MB": f"{spent[line.label][place]:.3g}"}
            for m in metrics:
                value = line.over(m)[0][place]
                row[m] = f"{value:.1f}" if math.isfinite(value) else "–"
            rows.append(row)
    return rows
