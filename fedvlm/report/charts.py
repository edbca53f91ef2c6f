"""The charts with which the page compares methods, from run folders only: see `comparison_charts` for the list.

The numbers are those of `figures.gather`, and so of the tables: last round, test split, ± one standard error over seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedvlm.core.records import MEASURES
from fedvlm.evaluation.protocols import is_base_to_novel
from fedvlm.report.axes import Drawn, indexed, label_points, name_curves, room, rows_axes
from fedvlm.report.client_charts import charts_of_clients, client_rows, ends, ranked, variances
from fedvlm.report.figures import AXIS_LABELS, PLOTTED, MethodLine, score_name
from fedvlm.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, bounds, chart, colour, dashed, element, marker
from fedvlm.training.folder import RunFolder

UNEVEN = 10  # times as many megabytes of one method as of another: a logarithmic axis


class LegendEntry(NamedTuple):
    """An entry of the legend."""

    number: int  # of its colour, marker and dashes
    label: str
    style: str
    svg: str


def legend(lines: list[MethodLine]) -> list[LegendEntry]:
    return [LegendEntry(k, x.label, colour(k, x.frozen), curve_sample(k, x.frozen)) for k, x in indexed(lines)]


def curve_sample(method: int, frozen: bool) -> str:
    """A piece of its curve with its marker."""
    line = element("path", d="M2 8H38", cls=f"curve {dashed(method)}")
    return line + element("path", d=marker(method, frozen, 20, 8), cls="mark")


def comparison_charts(runs: list[RunFolder], lines: list[MethodLine]) -> dict[str, list[Drawn]]:
    """Heading → charts."""
    axes = axes_of(lines)
    curves = [m for m in (MEASURES if axes == ["novel", "base"] else axes) if is_known(lines, m)]
    spent = megabytes(runs, lines)
    found = {
        "Accuracy and cost": [
            *([plane(lines, *axes)] if len(axes) == 2 else [row_chart(lines, m) for m in axes]),
            *pareto(lines, axes, spent),
        ],
        "Convergence": [
            *(by_round(lines, m) for m in curves if any(len(x.rounds) > 1 for x in lines)),
            *(by_megabytes(lines, m, spent) for m in curves if any(np.ptp(v) > 0 for v in spent.values())),
        ],
        "Accuracy by client": [*client_rows(lines), *ranked(lines)],
        "Weights and gaps by round": [*variances(runs, lines), *charts_of_clients(runs, lines)],
    }
    return {heading: charts for heading, charts in found.items() if charts}


def axes_of(lines: list[MethodLine]) -> list[str]:
    open_classes = all(is_base_to_novel(r) for x in lines for r in x.records)
    return [m for m in (("novel", "base") if open_classes else ("G", "P")) if is_known(lines, m)]


def is_known(lines: list[MethodLine], metric: str) -> bool:
    return any(math.isfinite(x.last(metric)[0]) for x in lines)


def axis(lines: list[MethodLine], metric: str) -> str:
    return AXIS_LABELS[metric].format(score_name(lines))


def plane(lines: list[MethodLine], up: str, across: str) -> Drawn:
    """Each method as a point with its interval, and its path over rounds; dashed lines through the frozen model."""
    at = {k: (*x.last(across), *x.last(up)) for k, x in indexed(lines)}
    both = [(k, x) for k, x in indexed(lines) if np.isfinite(at[k]).all()]
    ends = [at[k] for k, _ in both]
    xs = [p + side * d for p, d, _, _ in ends for side in (-1, 1)]
    ys = [g + side * d for _, _, g, d in ends for side in (-1, 1)]
    c = chart(f"{up} against {across} for each method", wider(xs), wider(ys), f"{across}, %")
    for k, x in both:
        p, dp, g, dg = at[k]
        c.open_group(k, x.frozen)
        if x.frozen:
            c.add("line", x1=c.x(p), x2=c.x(p), y1=TOP, y2=HEIGHT - BOTTOM, cls="reference")
            c.add("line", x1=LEFT, x2=WIDTH - RIGHT, y1=c.y(g), y2=c.y(g), cls="reference")
        path = [(a, b) for a, b in zip(x.over(across)[0], x.over(up)[0], strict=True) if c.holds(a, b)]
        if len(path) > 1:
            c.add("path", d="M" + "L".join(f"{c.x(a):g} {c.y(b):g}" for a, b in path), cls="trail")
        c.add("line", x1=c.x(p - dp), x2=c.x(p + dp), y1=c.y(g), y2=c.y(g), cls="interval")
        c.add("line", x1=c.x(p), x2=c.x(p), y1=c.y(g - dg), y2=c.y(g + dg), cls="interval")
        c.marker(
            k, p, g, f"{x.label}: {up} {g:.1f} ± {dg:.1f}, {across} {p:.1f} ± {dp:.1f} (standard errors)", x.frozen
        )
        c.close_group()
    label_points(c, [(k, x, at[k][0], at[k][2]) for k, x in both])
    left_out = [x.label for k, x in indexed(lines) if (k, x) not in both]
    caption = f"Up: {axis(lines, up)}. Across: {axis(lines, across)}. Bars: ± one standard error over seeds"
    caption += "; thin lines: earlier rounds."
    caption += f" Not drawn, because a value is missing: {', '.join(left_out)}." if left_out else ""
    return Drawn(f"{up} against {across}", caption, str(c))


def wider(values: Sequence[float]) -> list[float]:
    """Widen the range of the values by a third on both sides, for some of the path; early rounds may be far away."""
    low, high = bounds(values)
    return [low - (high - low) / 3, high + (high - low) / 3]


def row_chart(lines: list[MethodLine], metric: str) -> Drawn:
    """A row for each method, where there is one metric only."""
    ends = {k: x.last(metric) for k, x in indexed(lines)}
    values = [v + s * e for v, e in ends.values() for s in (-1, 1)]
    c = rows_axes(f"{metric} of each method", [x.label for x in lines], values, f"{metric}, %")
    for place, (k, x) in enumerate(indexed(lines)):
        value, error = ends[k]
        if math.isfinite(value):
            c.open_group(k, x.frozen)
            c.add("line", x1=c.x(value - error), x2=c.x(value + error), y1=c.y(place), y2=c.y(place), cls="interval")
            c.marker(k, value, place, f"{x.label}: {metric} {value:.1f} ± {error:.1f} (standard error)", x.frozen)
            c.close_group()
    return Drawn(metric, f"{axis(lines, metric)}, ± one standard error over seeds.", str(c))


def by_round(lines: list[MethodLine], metric: str) -> Drawn:
    return curves(lines, metric, "round", {x.label: np.array(x.rounds, float) for x in lines}, "by round", "{:.0f}")


def by_megabytes(lines: list[MethodLine], metric: str, spent: dict[str, np.ndarray]) -> Drawn:
    whole = [v[-1] for v in spent.values() if v[-1] > 0]
    log, words = max(whole) > UNEVEN * min(whole), "MB sent in both directions, all clients"
    words += ", logarithmic" if log else ""
    return curves(lines, metric, words, spent, "by megabytes", "{:.3g} MB", log)


def curves(
    lines: list[MethodLine],
    metric: str,
    x_label: str,
    xs: dict[str, np.ndarray],
    how: str,
    form: str,
    log: bool = False,
) -> Drawn:
    """Methods that end earlier than others are continued at their last value, dashed."""
    shown = [(k, x) for k, x in indexed(lines) if math.isfinite(x.last(metric)[0])]
    spread = [v for _, x in shown for m, e in [x.over(metric)] for v in (*(m - e), *(m + e))]
    every = np.concatenate([xs[x.label] for _, x in shown]).tolist()
    c = chart(f"{metric} {how}", every, spread, x_label, log, room=room([x.label for _, x in shown]))
    for k, x in shown:
        mean, error = x.over(metric)
        at = xs[x.label]
        c.open_group(k, x.frozen)
        if x.frozen:
            c.add("line", x1=LEFT, x2=c.x.end, y1=c.y(mean[-1]), y2=c.y(mean[-1]), cls="reference")
        elif at[-1] < max(every):
            c.add("line", x1=c.x(at[-1]), x2=c.x(max(every)), y1=c.y(mean[-1]), y2=c.y(mean[-1]), cls="ended")
        c.band(at.tolist(), (mean - error).tolist(), (mean + error).tolist())
        tips = [
            f"{x.label}, {'round ' if x_label == 'round' else ''}{form.format(a)}: {metric} {m:.1f} ± {e:.1f}"
            for a, m, e in zip(at, mean, error, strict=True)
        ]
        c.curve(k, at.tolist(), mean.tolist(), tips)
        c.close_group()
    name_curves(c, ends(lines, {x.label: float(x.last(metric)[0]) for _, x in shown}))
    return Drawn(f"{metric} {how}", f"{axis(lines, metric)}, {how}; bands: ± one standard error over seeds.", str(c))


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


def pareto(lines: list[MethodLine], axes: list[str], spent: dict[str, np.ndarray]) -> list[Drawn]:
    """A chart for each cost in which methods differ: accuracy (the mean of the metrics) over it, with the front."""
    score = {x.label: float(np.mean([x.last(m)[0] for m in axes])) if axes else math.nan for x in lines}
    costs: dict[str, Callable[[MethodLine], float]] = {
        "rounds": lambda x: float(x.rounds[-1]),
        "MB": lambda x: float(spent[x.label][-1]),
        "seconds": lambda x: float(np.mean([r.finished.seconds for r in x.records])),
    }
    return [
        cost_chart(lines, name, {x.label: cost(x) for x in lines}, score, axes)
        for name, cost in costs.items()
        if len({round(cost(x), 9) for x in lines if not x.frozen and math.isfinite(score[x.label])}) > 1
    ]


def cost_chart(
    lines: list[MethodLine], name: str, cost: dict[str, float], score: dict[str, float], axes: list[str]
) -> Drawn:
    shown = [(k, x) for k, x in indexed(lines) if math.isfinite(score[x.label])]
    xs, ys = [cost[x.label] for _, x in shown], [score[x.label] for _, x in shown]
    of = f"{' and '.join(axes)}{', mean' if len(axes) > 1 else ''}"
    c = chart(
        f"{of} against {name}", xs, ys, f"{name}, logarithmic" + ("; 0 at the left" if 0 in xs else ""), log_x=True
    )
    best = front(xs, ys)
    corners = [z for a, b in itertools.pairwise(best) for z in ((xs[b], ys[a]), (xs[b], ys[b]))]
    path = [(xs[best[0]], ys[best[0]]), *corners] if best else []
    if len(path) > 1:
        c.add("path", d="M" + "L".join(f"{c.x(a):g} {c.y(b):g}" for a, b in path), cls="front")
    for j, (k, x) in enumerate(shown):
        c.open_group(k, x.frozen)
        note = "" if j in best else "; another method is at least as good at a lower cost"
        c.marker(k, xs[j], ys[j], f"{x.label}: {ys[j]:.1f} at {xs[j]:.3g} {name}{note}", x.frozen)
        c.close_group()
    label_points(c, [(k, x, cost[x.label], score[x.label]) for k, x in shown])
    caption = f"{of}, %, against {name} per run. On the line: no other method is at least as good at a lower cost."
    return Drawn(f"Accuracy against {name}", caption, str(c))


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
