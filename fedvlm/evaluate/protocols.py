"""Leave-one-domain-out (FedOT §5.1): a[i][j] is the accuracy on domain j of the run that held domain i out.

G is the mean of the diagonal (the shared model on a domain nobody trained on), P of the rest (personal models), C of all.
A single run is one row of that matrix, and its G, P and C are read off alike. Of a base-to-novel run, the four measures
are taken as recorded.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

OPEN = "base-to-novel"  # the protocol that keeps half of the classes from everybody (evaluate/novel.py)
MEASURES = ("local", "base", "novel", "hm")  # its measures
Entry = tuple[float, bool]  # test accuracy (NaN where there is no such model), and whether nobody trained on it


def target(info: dict[str, Any]) -> str:
    return "+".join(info["config"]["unseen"]) or "nobody"


def row(info: dict[str, Any], select: str = "last") -> dict[str, Entry]:
    """One run's row of the matrix: domain → the shared model's accuracy where it was held out, else its clients' own."""
    record, unseen = info["result"][select], set(info["result"]["unseen"])
    homes = info.get("homes", {})
    found: dict[str, list[float]] = defaultdict(list)
    held: dict[str, bool] = {}
    for name, views in record.get("clients", {}).items():
        view = views.get("shared" if name in unseen else "personal")
        domain = homes.get(name, name)
        held[domain] = name in unseen
        if view is None:  # no such model
            found[domain].append(np.nan)
        elif view["test"] is not None:  # a client without a test image says nothing
            found[domain].append(view["test"])
    if not found:  # too many clients to be recorded one by one
        found = {"held out": [as_number(record.get("G"))] * bool(unseen), "clients": [as_number(record.get("P"))]}
        held = {"held out": True, "clients": False}
    return {d: (float(np.mean(v)), held[d]) for d, v in found.items() if v}


def as_number(value: float | None) -> float:
    return np.nan if value is None else value


def summary(rows: list[dict[str, Entry]]) -> dict[str, float | None]:
    """G, P, C over the rows of a matrix; None where a value is missing or there is nothing to take a mean of."""
    entries = [entry for r in rows for entry in r.values()]
    kinds = {"G": [v for v, held in entries if held], "P": [v for v, held in entries if not held]}
    kinds["C"] = kinds["G"] + kinds["P"] if kinds["G"] else []
    return {k: float(np.mean(v)) if v and not np.isnan(v).any() else None for k, v in kinds.items()}


def opened(info: dict[str, Any]) -> bool:
    """Whether a run kept classes from everybody."""
    return info["config"].get("protocol") == OPEN


def measured(infos: list[dict[str, Any]], select: str = "last") -> dict[str, float | None]:
    """local, base, novel, hm as means over runs that recorded them; nothing where one did not."""
    records = [i["result"][select] for i in infos]
    if not all(m in r for m in MEASURES for r in records):
        return {}
    found = {m: [r[m] for r in records] for m in MEASURES}
    return {m: None if None in v else float(np.mean(v)) for m, v in found.items()}


def by_seed(infos: list[dict[str, Any]], select: str = "last") -> dict[int, dict[str, float | None]]:
    """G, P, C (and of base-to-novel its measures) for each seed that was run on every target."""
    seeds: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for info in infos:
        seeds[info["config"]["seed"]][target(info)] = info
    targets = {target(i) for i in infos}
    return {
        s: summary([row(i, select) for i in runs.values()]) | measured(list(runs.values()), select)
        for s, runs in sorted(seeds.items())
        if runs.keys() == targets
    }


def partial(infos: list[dict[str, Any]]) -> list[int]:
    """Seeds that miss a target others have, and so are left out of the means."""
    return sorted({i["config"]["seed"] for i in infos} - by_seed(infos).keys())
