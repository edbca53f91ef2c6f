"""The page's charts of single clients: their scores, and their weights and gaps by round."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from fedvlm.report import fairness
from fedvlm.report.axes import Drawn, End, indexed, name_curves, room
from fedvlm.report.lines import MethodLine
from fedvlm.report.svg import chart, colour, hue
from fedvlm.training.folder import RunFolder

MANY = 20  # clients from which on they are ranked
FEW_CLIENTS = 8  # that get a curve each; of more, percentiles are drawn
PERCENTILES = (0, 25, 50, 75, 100)


def ranked(lines: list[MethodLine]) -> list[Drawn]:
    """All clients from worst to best, where there are many."""
    most = max(len(r.finished.last.get("clients", {})) for x in lines for r in x.records)
    found = {x.label: v for x in lines if (v := fairness.ranked_scores(x)) is not None} if most >= MANY else {}
    if not found:
        return []
    ys = np.concatenate(list(found.values())).tolist()
    c = chart("clients ranked by score", [0, 100], ys, "clients from worst to best, percentile", room=room([*found]))
    for k, x in ((k, x) for k, x in indexed(lines) if x.label in found):
        c.open_group(k, x.frozen)
        tips = [
            f"{x.label}, percentile {p:.0f}: {v:.1f} %"
            for p, v in zip(fairness.PERCENTILES, found[x.label], strict=True)
        ]
        c.curve(k, fairness.PERCENTILES.tolist(), found[x.label].tolist(), tips)
        c.close_group()
    name_curves(c, ends(lines, {label: float(v[-1]) for label, v in found.items()}))
    return [
        Drawn("Clients ranked", "Score of the personal models, clients from worst to best; mean over runs.", str(c))
    ]


def variances(runs: list[RunFolder], lines: list[MethodLine]) -> list[Drawn]:
    found = {x.label: v for x in lines if (v := fairness.gap_variances(runs, x)) is not None}
    if not found:
        return []
    xs = [float(r) for rounds, _ in found.values() for r in rounds]
    ys = [float(v) for _, values in found.values() for v in values]
    c = chart("variance of the generalisation gap", xs, ys, "round", log_y=True, room=room([*found]))
    for k, x in ((k, x) for k, x in indexed(lines) if x.label in found):
        rounds, values = found[x.label]
        c.open_group(k, x.frozen)
        tips = [f"{x.label}, round {r}: {v:.3g}" for r, v in zip(rounds, values, strict=True)]
        c.curve(k, [float(r) for r in rounds], values.tolist(), tips)
        c.close_group()
    name_curves(c, ends(lines, {label: float(v[-1]) for label, (_, v) in found.items()}))
    words = "Variance over clients of the generalisation gap, on a logarithmic scale; lower: clients are served more evenly."
    return [Drawn("Variance of the gap", words, str(c))]


def charts_of_clients(runs: list[RunFolder], lines: list[MethodLine]) -> list[Drawn]:
    """Weights and gaps of the clients, a chart for each method whose own change from round to round."""
    out = []
    for line in lines:
        identities = {r.identity for r in line.records}
        members = [r for r in runs if r.record.identity in identities]
        for name, words in (
            ("weights", "Weight of each client in the merge"),
            ("gaps", "Generalisation gap of each client: validation loss of the shared model − that of its own"),
        ):
            values = recorded_values(members, name)
            if any(
                abs(v[c] - first) > 1e-6 for v in values.values() for c, first in values[min(values)].items() if c in v
            ):
                out.append(client_curves(f"{line.label}: {name}", words, values))
    return out


def recorded_values(runs: list[RunFolder], name: str) -> dict[int, dict[str, float]]:
    """Round → client → value, mean over runs."""
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in (x for r in runs for x in r.rounds()):
        given = record.get(name)
        for client, value in given.items() if isinstance(given, dict) else ():
            if isinstance(value, int | float) and math.isfinite(value):
                found[record["round"]][client].append(float(value))
    return {k: {c: sum(v) / len(v) for c, v in clients.items()} for k, clients in sorted(found.items()) if clients}


def client_curves(title: str, words: str, values: dict[int, dict[str, float]]) -> Drawn:
    names = list(dict.fromkeys(c for clients in values.values() for c in clients))
    curves: dict[str, list[float]] = {}
    if len(names) <= FEW_CLIENTS:
        curves = {n: [v.get(n, math.nan) for v in values.values()] for n in names}
        how = "a curve for each client"
    else:
        each = [np.percentile(list(v.values()), PERCENTILES) for v in values.values()]
        curves = {f"percentile {p}": [float(e[j]) for e in each] for j, p in enumerate(PERCENTILES)}
        how = f"percentiles {', '.join(map(str, PERCENTILES))} of {len(names)} clients"
    rounds = [float(k) for k in values]
    c = chart(title, rounds, [v for ys in curves.values() for v in ys], "round", room=room([*curves]))
    for k, (name, ys) in enumerate(curves.items()):
        c.parts.append(f'<g class="{hue(k)}">')
        c.curve(k, rounds, ys, [f"{name}, round {r:.0f}: {v:.3g}" for r, v in zip(rounds, ys, strict=True)])
        c.close_group()
    last = {name: next((v for v in reversed(ys) if math.isfinite(v)), math.nan) for name, ys in curves.items()}
    name_curves(c, [End(n, hue(k), v) for k, (n, v) in enumerate(last.items()) if math.isfinite(v)])
    return Drawn(title, f"{words}, mean over runs; {how}.", str(c))


def ends(lines: list[MethodLine], last: dict[str, float]) -> list[End]:
    """The ends of the curves of methods that have a last value."""
    return [
        End(x.label, colour(k, x.frozen), last[x.label], k)
        for k, x in indexed(lines)
        if math.isfinite(last.get(x.label, math.nan))
    ]
