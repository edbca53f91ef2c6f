"""How good the models are, by view: shared (the newcomer's row on clients that trained), personal (each client's own),
newcomer (the shared model on clients that nobody trained on). Accuracies are means over clients, each counted once."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedvlm.core import SPLITS, Cohort, Params
from fedvlm.data.federation import Federation
from fedvlm.evaluate.detection import MEASURES, SCORES
from fedvlm.evaluate.novel import base_to_novel
from fedvlm.method import Method

FIRST = next(iter(SCORES))  # MCM
EACH = 1000  # above this many clients a round's record holds summaries only


def evaluate(method: Method, federation: Federation, cohort: Cohort, shared: Params) -> dict[str, Any]:
    ids, up = cohort.ask("score", shared)
    count = up["count"].numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = {
            view: tuple(up[f"{view}.{what}"].double().numpy() / count for what in ("score", "loss"))
            for view in ("shared", "personal")
            if f"{view}.score" in up
        }
    if "personal" not in scores:  # nothing is private: everybody's own model is the shared one
        scores["personal"] = scores["shared"]
    unseen = np.isin(ids, federation.unseen)
    record: dict[str, Any] = {}
    for view, pick in (("shared", ~unseen), ("personal", ~unseen), ("newcomer", unseen)):
        found = scores.get("shared" if view == "newcomer" else view)
        if found is not None and pick.any():
            record[view] = summary(found[0][pick], found[1][pick])
            bent = up.get(f"{'personal' if view == 'personal' and method.personalises else 'shared'}.corrupted")
            if bent is not None:
                with np.errstate(invalid="ignore", divide="ignore"):
                    record[view]["corrupted"] = number(float(np.nanmean(bent.double().numpy()[pick] / count[pick, 2])))
    if federation.data.outside is not None:
        record |= detection(method, up, unseen)
    if federation.data.halves:
        record |= base_to_novel(method, federation, cohort, shared)
    if len(ids) <= EACH:
        record["clients"] = one_by_one(scores, [federation.names[i] for i in ids], unseen)
    bent = record.get("personal", {}).get("corrupted")
    record |= headline(record)
    return record | {"acc": record["P"]} | ({} if bent is None else {"cacc": bent})


def detection(method: Method, up: Params, unseen: np.ndarray) -> dict[str, Any]:
    """By view, as means over the clients that have test examples: the measures of the first score under their own names,
    those of the others as score.measure. At the top, those of the clients' own models."""
    tested, found = up[method.detects[0]].numpy() >= 0, {}
    for view, who in (("shared", tested & ~unseen), ("personal", tested & ~unseen), ("newcomer", tested & unseen)):
        source = "personal" if view == "personal" and method.personalises else "shared"
        if who.any() and source in method.views:
            found[view] = {
                measure if score == FIRST else f"{score}.{measure}": number(
                    float(up[f"{source}.{score}.{measure}"].double().numpy()[who].mean())
                )
                for score in SCORES
                for measure in MEASURES
            }
    return {"detection": found} | {m: found.get("personal", {}).get(m) for m in MEASURES}


def one_by_one(scores: dict, names: list[str], unseen: np.ndarray) -> dict[str, Any]:
    out: dict[str, Any] = {name: {} for name in names}
    for view, (accuracy, _) in scores.items():
        rows = [[None if v != v else v for v in row] for row in accuracy.round(6).tolist()]
        for name, row, away in zip(names, rows, unseen, strict=True):
            if not (away and view == "personal"):
                out[name][view] = dict(zip(SPLITS, row, strict=True))
    return out


def summary(accuracy: np.ndarray, loss: np.ndarray) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for j, split in enumerate(SPLITS):
        known = accuracy[~np.isnan(accuracy[:, j]), j]
        if len(known):
            out[split] = number(known.mean())
            out[f"{split}_loss"] = number(loss[~np.isnan(loss[:, j]), j].mean())
    return out | fairness(accuracy[:, SPLITS.index("test")])


def fairness(accuracy: np.ndarray) -> dict[str, float | None]:
    """How evenly it is spread over clients, on test: the mean of the worst and of the best tenth (at least one client),
    and the variance."""
    known = np.sort(accuracy[~np.isnan(accuracy)])
    if len(known) < 2:
        return {}
    tenth = max(1, len(known) // 10)
    return {
        "worst": number(known[:tenth].mean()),
        "best": number(known[-tenth:].mean()),
        "variance": number(known.var()),
    }


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
