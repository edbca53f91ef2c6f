"""How evenly a federation serves its clients, from run folders only: clients ranked by the test score of their personal
models, and the variance over clients of the generalisation gap (validation loss of the averaged model − that of the
client's own model). Means over runs."""

from __future__ import annotations

import numpy as np

from fedvlm.report.lines import MethodLine
from fedvlm.training.folder import RunFolder

PERCENTILES = np.linspace(0, 100, 101)


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
