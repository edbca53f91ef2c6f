"""How good the models are, by view: shared (the newcomer's row on clients that trained), personal (each client's own),
newcomer (the shared model on clients that nobody trained on). Accuracies are means over clients, each counted once."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedvlm.core import SPLITS, Cohort, Params
from fedvlm.data.federation import Federation
from fedvlm.method import Method

EACH = 1000  # above this many clients a round's record holds summaries only


def evaluate(method: Method, federation: Federation, cohort: Cohort, shared: Params) -> dict[str, Any]:
    ids, up = cohort.ask("score", shared)
    count = up["count"].numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = {
            view: (up[f"{view}.correct"].numpy() / count, up[f"{view}.loss"].numpy() / count)
            for view in ("shared", "personal")
            if f"{view}.correct" in up
        }
    scores.setdefault("personal", scores.get("shared"))
    unseen = np.isin(ids, federation.unseen)
    record: dict[str, Any] = {}
    for view, pick in (("shared", ~unseen), ("personal", ~unseen), ("newcomer", unseen)):
        found = scores.get("shared" if view == "newcomer" else view)
        if found is not None and pick.any():
            record[view] = summary(found[0][pick], found[1][pick])
    if len(ids) <= EACH:
        record["clients"] = {
            federation.names[i]: {
                view: {s: number(acc[k, j]) for j, s in enumerate(SPLITS)}
                for view, (acc, _) in scores.items()
                if not (view == "personal" and unseen[k])
            }
            for k, i in enumerate(ids)
        }
    return record | headline(record)


def summary(accuracy: np.ndarray, loss: np.ndarray) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for j, split in enumerate(SPLITS):
        known = accuracy[~np.isnan(accuracy[:, j]), j]
        if len(known):
            out[split] = number(known.mean())
            out[f"{split}_loss"] = number(loss[~np.isnan(loss[:, j]), j].mean())
    return out


def headline(record: dict[str, Any]) -> dict[str, float | None]:
    """G: newcomer view; P: personal view; both on test. Null where there is no such client or no shared model."""
    return {
        "G": record.get("newcomer", {}).get("test"),
        "P": record.get("personal", {}).get("test"),
    }


def selection(record: dict[str, Any]) -> float:
    """What rounds and learning rates are chosen by: validation accuracy of the clients that trained, shared and
    personal views alike. The shared view is in it because a personal one can stay high while the shared model rots."""
    views = [record[v]["val"] for v in ("shared", "personal") if "val" in record.get(v, {})]
    return float(np.mean(views)) if views else float("nan")


def number(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 6)
