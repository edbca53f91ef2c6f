"""Leave-one-domain-out (FedOT §5.1): a[i][j] is the accuracy on domain j of the run that held domain i out.

G is the mean of the diagonal (the shared model on a domain nobody trained on), P of the rest (personal models), C of all;
S is P's counterpart of the shared model: its mean on the clients that train.
A single run is one row of that matrix, and its G, P and C are computed in the same way. Of a base-to-novel run, the four
measures are taken as recorded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from fedvlm.config.config import OPEN
from fedvlm.core.records import MEASURES, Number, RunRecord, Scores, Select, value_of

View = Literal["shared", "personal"]
FAR_BELOW = 0.1  # of the test score: more than expected from one model for all clients instead of one for each
Entry = tuple[float, bool]  # test accuracy (NaN where there is no such model), and whether nobody trained on it


def target(record: RunRecord) -> str:
    """The held-out domains or clients."""
    return "+".join(record.unseen) or "nobody"


def matrix_row(record: RunRecord, select: Select = "last", view: View = "personal") -> dict[str, Entry]:
    """One run's row of the matrix: domain → the shared model's accuracy where it was held out, otherwise that of its
    clients' personal models, or of the shared one (on the split that personal_split= says)."""
    scored, unseen = record.finished.at(select), set(record.finished.unseen)
    personal = "val" if record.config.get("personal_split") == "val" else "test"
    found: dict[str, list[float]] = defaultdict(list)
    held: dict[str, bool] = {}
    for name, views in scored.get("clients", {}).items():
        scores = views.get("shared" if name in unseen else view)
        domain = record.homes.get(name, name)
        held[domain] = name in unseen
        if scores is None:  # no such model
            found[domain].append(math.nan)
        elif (
            score := scores["test" if name in unseen else personal]
        ) is not None:  # None: a client without such images
            found[domain].append(score)
    if not found:  # too many clients to be recorded one by one
        whole = scored.get("P") if view == "personal" else scored.get("shared", {}).get(personal)
        found = {"held out": [or_nan(scored.get("G"))] * bool(unseen), "clients": [or_nan(whole)]}
        held = {"held out": True, "clients": False}
    return {d: (mean_or_none(v), held[d]) for d, v in found.items() if v}


def or_nan(value: Number) -> float:
    return math.nan if value is None else value


def mean_or_none(values: Sequence[float]) -> float:
    if len(values) == 1:  # most often: a domain is one client
        return float(values[0])
    import numpy as np  # late: the console imports this module in commands that must start fast

    return float(np.mean(values))


def mean_if_complete(values: Sequence[Number]) -> Number:
    """The mean; None where a value is missing."""
    known = [v for v in values if v is not None]
    return mean_or_none(known) if known and len(known) == len(values) else None


def matrix_summary(rows: list[dict[str, Entry]]) -> Scores:
    """G, P, C over the rows of a matrix; None where a value is missing or there is nothing to take a mean of."""
    entries = [entry for r in rows for entry in r.values()]
    kinds = {"G": [v for v, held in entries if held], "P": [v for v, held in entries if not held]}
    kinds["C"] = kinds["G"] + kinds["P"] if kinds["G"] else []
    return {k: mean_or_none(v) if v and not any(map(math.isnan, v)) else None for k, v in kinds.items()}


def is_base_to_novel(record: RunRecord) -> bool:
    return record.config.get("protocol") == OPEN


def measured(records: list[RunRecord], select: Select = "last") -> Scores:
    """local, base, novel, hm as means over runs, None where a run has no such value; {} where a run did not record them."""
    scored = [r.finished.at(select) for r in records]
    if not all(m in s for m in MEASURES for s in scored):
        return {}
    found = {m: [value_of(s, m) for s in scored] for m in MEASURES}
    return {m: mean_if_complete(values) for m, values in found.items()}


def by_seed(records: list[RunRecord], select: Select = "last") -> dict[int, Scores]:
    """G, S, P, C (and of base-to-novel its measures) for each seed that was run on every target."""
    seeds: dict[int, dict[str, RunRecord]] = defaultdict(dict)
    for record in records:
        seeds[record.seed][target(record)] = record
    targets = {target(r) for r in records}
    return {
        s: matrix_summary([matrix_row(r, select) for r in runs.values()])
        | {"S": matrix_summary([matrix_row(r, select, "shared") for r in runs.values()])["P"]}
        | measured(list(runs.values()), select)
        for s, runs in sorted(seeds.items())
        if runs.keys() == targets
    }


def by_client(records: list[RunRecord], select: Select = "last") -> dict[str, dict[str, float]]:
    """G, S and P of each client that was recorded: means over the runs in which it was held out, or trained."""
    found: dict[str, dict[str, list[float]]] = {"G": defaultdict(list), "S": defaultdict(list), "P": defaultdict(list)}
    for record in records:
        split = "val" if record.config.get("personal_split") == "val" else "test"
        for name, views in record.finished.at(select).get("clients", {}).items():
            shared, personal = views.get("shared", {}), views.get("personal", {})
            if name in record.finished.unseen:
                known = {"G": shared.get("test")}
            else:
                known = {"S": shared.get(split), "P": personal.get(split)}
            for metric, value in known.items():
                if value is not None:
                    found[metric][name].append(value)
    return {m: {name: mean_or_none(values) for name, values in each.items()} for m, each in found.items()}


def partial(records: list[RunRecord]) -> list[int]:
    """Seeds that miss a target that others have, and so are left out of the means."""
    return sorted({r.seed for r in records} - by_seed(records).keys())
