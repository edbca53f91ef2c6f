"""Leave-one-domain-out (FedOT §5.1): a[i][j] is the accuracy on domain j of the run that held domain i out.

G is the mean of the diagonal (the shared model on a domain nobody trained on), P of the rest (personal models), C of all.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np


def matrix(results: list[dict[str, Any]], select: str = "last") -> tuple[list[str], np.ndarray]:
    """Domains, and a[held out][tested]; NaN where a method has no such model or a run is missing."""
    domains = sorted({d for r in results for d in r["unseen"]})
    a = np.full((len(domains), len(domains)), np.nan)
    for r in results:
        held = domains.index(r["unseen"][0])
        for name, views in r[select]["clients"].items():
            if name in domains:
                view = views.get("shared" if name in r["unseen"] else "personal", {})
                value = view.get("test")
                a[held, domains.index(name)] = np.nan if value is None else value
    return domains, a


def summary(a: np.ndarray) -> dict[str, float | None]:
    diagonal = np.eye(len(a), dtype=bool)
    out = {"G": a[diagonal], "P": a[~diagonal], "C": a.reshape(-1)}
    return {k: None if np.isnan(v).any() or not v.size else float(v.mean()) for k, v in out.items()}


def by_seed(infos: list[dict[str, Any]], select: str = "last") -> dict[int, dict[str, float | None]]:
    """G, P, C for each seed that has every target; other runs count by themselves."""
    seeds: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for info in infos:
        seeds[info["config"]["seed"]].append(info)
    targets = {tuple(i["result"]["unseen"]) for i in infos}
    one_out = len(targets) > 1 and all(len(t) == 1 for t in targets)
    out: dict[int, dict[str, float | None]] = {}
    for seed, group in sorted(seeds.items()):
        results = [i["result"] for i in group]
        if one_out and {tuple(r["unseen"]) for r in results} == targets:
            out[seed] = summary(matrix(results, select)[1])
        elif not one_out:
            out[seed] = single(results[-1][select], results[-1]["unseen"])
    return out


def single(record: dict[str, Any], unseen: list[str]) -> dict[str, float | None]:
    """One run's G and P, and their mean over all clients as C."""
    clients = record.get("clients", {})
    values = [v.get("shared" if k in unseen else "personal", {}).get("test") for k, v in clients.items()]
    known = [v for v in values if v is not None]
    whole = bool(unseen) and len(known) == len(values) and bool(known)
    return {"G": record.get("G"), "P": record.get("P"), "C": float(np.mean(known)) if whole else None}
