"""How good the models are, by view: shared (the shared model on clients that trained), personal (each client's own model),
newcomer (the shared model on clients that nobody trained on). Values are means over clients, each counted once."""

from __future__ import annotations

import numpy as np

from fedvlm.core.cohort import Cohort
from fedvlm.core.data import SCORED, SPLITS
from fedvlm.core.detection import SCORES
from fedvlm.core.metric import Additive, Metric
from fedvlm.core.records import ClientScores, Number, RoundRecord, Scores
from fedvlm.core.state import Message, Reply
from fedvlm.data.clients import Federation
from fedvlm.evaluation.novel import base_to_novel
from fedvlm.rounds.method import METRICS, Method

MAX_LISTED = 1000  # with more clients a round's record holds summaries only
MEASURES = ("auroc", "fpr95")


def evaluate(
    method: Method, federation: Federation, cohort: Cohort, message: Message, personal_split: str = "test"
) -> RoundRecord:
    """personal_split: the split that P is taken from."""
    reply = cohort.ask("score", message)
    extras, unseen = federation.data.extras, np.isin(reply.ids, federation.unseen)
    count = reply.values["count"].numpy()
    scores = {v: per_client(method.metrics["score"], reply, f"{v}.score", count) for v in method.views}
    losses = {v: per_client(method.metrics["loss"], reply, f"{v}.loss", count) for v in method.views}
    if "personal" not in scores:  # nothing is private: everybody's own model is the shared one
        scores["personal"], losses["personal"] = scores["shared"], losses["shared"]
    record: RoundRecord = {}
    for view, pick in (("shared", ~unseen), ("personal", ~unseen), ("newcomer", unseen)):
        source = "shared" if view == "newcomer" else view
        if source in scores and pick.any():
            summary = summary_of_clients(scores[source][pick], losses[source][pick])
            if "corrupted" in extras:
                name = f"{source if source in method.views else 'shared'}.corrupted"
                values = reply.values[name].double().numpy()[pick]
                with np.errstate(invalid="ignore", divide="ignore"):
                    summary["corrupted"] = number_or_none(float(np.nanmean(values / count[pick, 2])))
            record[view] = summary  # type: ignore[literal-required]
    if "outsiders" in extras:
        record |= detection(method, reply, unseen)
    if method.base_and_novel:
        record |= base_to_novel(method, federation, cohort, message)
    if own := {k: m for k, m in method.metrics_for(extras).items() if k not in METRICS}:
        record["metrics"] = {k: by_view(method, m, reply, k, count, unseen) for k, m in own.items()}
    if missing := np.setdiff1d(cohort.ids, reply.ids).tolist():
        record["missing"] = [federation.names[i] for i in missing]
    if len(reply.ids) <= MAX_LISTED:
        record["clients"] = scores_of_clients(scores, [federation.names[i] for i in reply.ids], unseen)
    record["G"] = record.get("newcomer", {}).get("test")  # the shared model on clients nobody trained on
    record["P"], record["acc"] = (record.get("personal", {}).get(split) for split in (personal_split, "test"))
    if "corrupted" in extras:
        record["cacc"] = record.get("personal", {}).get("corrupted")
    return record


def per_client(metric: Metric, reply: Reply, name: str, count: np.ndarray) -> np.ndarray:
    """The values of each client: [clients, 2] by split or, for metrics without splits, [clients, 1] on test."""
    statistic = reply.values[name].double().numpy()
    if isinstance(metric, Additive) and not metric.extra:
        columns = [metric.result(statistic[:, j], count[:, j]) for j in map(SPLITS.index, SCORED)]
        return np.stack(columns, axis=1)
    return metric.result(statistic, count[:, SPLITS.index("test")])[:, None]


def by_view(
    method: Method, metric: Metric, reply: Reply, name: str, count: np.ndarray, unseen: np.ndarray
) -> dict[str, Scores]:
    """A metric's mean over clients by view and split; of additive ones also the value of all clients' examples together
    (`test_pooled`), since a client's few examples say little about, say, calibration."""
    found: dict[str, Scores] = {}
    for view, pick in (("shared", ~unseen), ("personal", ~unseen), ("newcomer", unseen)):
        wanted = "shared" if view == "newcomer" else view
        source = wanted if wanted in method.views else "shared"
        if source not in method.views or not pick.any():
            continue
        values = per_client(metric, reply, f"{source}.{name}", count)[pick]
        splits = SCORED if values.shape[1] == len(SCORED) else ("test",)
        means = {split: mean(values[:, j]) for j, split in enumerate(splits)}
        if isinstance(metric, Additive):
            at = SPLITS.index("test")
            total = reply.values[f"{source}.{name}"].double().numpy()[pick]
            total = total if metric.extra else total[:, at]
            pooled = metric.result(total.sum(0, keepdims=True), count[pick, at].sum(keepdims=True))
            means["test_pooled"] = number_or_none(float(pooled[0]))
        found[view] = means
    return found


def detection(method: Method, reply: Reply, unseen: np.ndarray) -> RoundRecord:
    """Detection measures by view, as means over clients that have test examples: those of the first score under their
    own names, those of the others as score.measure. At the top level, those of the personal models."""
    found: dict[str, Scores] = {}
    for view, who in (("shared", ~unseen), ("personal", ~unseen), ("newcomer", unseen)):
        source = "personal" if view == "personal" and method.has_personal_models else "shared"
        if source not in method.views:
            continue
        values = {m: reply.values[f"{source}.{m}"].double().numpy() for m in MEASURES}
        tested = who & (values["auroc"][:, 0] >= 0)
        if tested.any():
            found[view] = {
                m if j == 0 else f"{score}.{m}": number_or_none(float(values[m][tested, j].mean()))
                for j, score in enumerate(SCORES)
                for m in MEASURES
            }
    top = found.get("personal", {})
    return {"detection": found, "auroc": top.get("auroc"), "fpr95": top.get("fpr95")}


def scores_of_clients(scores: dict[str, np.ndarray], names: list[str], unseen: np.ndarray) -> dict[str, ClientScores]:
    out: dict[str, ClientScores] = {name: {} for name in names}
    for view, accuracy in scores.items():
        rows = [[None if v != v else v for v in row] for row in accuracy.round(6).tolist()]
        for name, row, held_out in zip(names, rows, unseen, strict=True):
            if not (held_out and view == "personal"):
                out[name][view] = dict(zip(SCORED, row, strict=True))  # type: ignore[literal-required]
    return out


def summary_of_clients(accuracy: np.ndarray, loss: np.ndarray) -> Scores:
    out: Scores = {}
    for j, split in enumerate(SCORED):
        known = accuracy[~np.isnan(accuracy[:, j]), j]
        if len(known):
            out[split] = number_or_none(known.mean())
            out[f"{split}_loss"] = number_or_none(loss[~np.isnan(loss[:, j]), j].mean())
    return out | fairness(accuracy[:, SCORED.index("test")])


def fairness(accuracy: np.ndarray) -> Scores:
    """How evenly it is spread over clients, on test: the mean of the worst and of the best tenth (at least one client),
    and the variance."""
    known = np.sort(accuracy[~np.isnan(accuracy)])
    if len(known) < 2:
        return {}
    tenth = max(1, len(known) // 10)
    return {
        "worst": number_or_none(known[:tenth].mean()),
        "best": number_or_none(known[-tenth:].mean()),
        "variance": number_or_none(known.var()),
    }


def selection(record: RoundRecord) -> float:
    """The criterion for choosing rounds and learning rates: validation accuracy of the clients that trained, the mean of
    the shared and personal views. Personal models alone can stay good while the shared one gets worse."""
    views = [s["val"] for s in (record.get("shared"), record.get("personal")) if s and "val" in s]
    return float(np.mean([np.nan if v is None else v for v in views])) if views else float("nan")


def mean(values: np.ndarray) -> Number:
    known = values[~np.isnan(values)]
    return number_or_none(float(known.mean())) if len(known) else None


def number_or_none(value: float) -> Number:
    return None if np.isnan(value) else round(float(value), 6)
