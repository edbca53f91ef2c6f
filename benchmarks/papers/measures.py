"""A table's measures from run records, one value for each seed, and the interval of their mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from fedvlm.core.records import MEASURES, Number, RunRecord, Select, value_of
from fedvlm.evaluation.protocols import by_seed, matrix_row, matrix_summary, mean_if_complete
from fedvlm.predict import questions
from fedvlm.report.gains import quantile
from fedvlm.training.folder import RunFolder
from papers.manifest import PERCENT


def half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval of a mean; None for a single value."""
    degrees = len(values) - 1
    return float(quantile(degrees) * stdev(values) / len(values) ** 0.5) if degrees > 0 else None


def seed_values(measure: str, runs: Sequence[RunFolder], names: Mapping[str, str], select: Select) -> list[float]:
    """The measure's value for each seed, as papers print it (percents as percents); [] where one is missing.

    names: the manifest's name of a domain → the folder's."""
    name, _, place = measure.partition("@")
    target, _, domain = place.partition("/")
    target, domain = names.get(target, target), names.get(domain, domain)
    if place and name in ("G", "P", "C"):
        runs = [r for r in runs if target in r.record.unseen]
        values = _each(runs, lambda run: _cell(run.record, name, target, domain, select))
    elif measure == "cacc" and not any("cacc" in r.record.finished.last for r in runs):
        values = _each(runs, _mean_corrupted)
    elif name in ("G", "P", "C", *MEASURES) and not place:
        values = [scores.get(name) for scores in by_seed([r.record for r in runs], select).values()]
    else:
        values = _each(runs, lambda run: _single(run, name, target, select))
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return []
    factor = 100.0 if name in PERCENT else 1e4 if name == "variance" else 1.0
    return [factor * v for v in known]


def _each(runs: Sequence[RunFolder], value: Callable[[RunFolder], Number]) -> list[Number]:
    """The mean over the runs of each seed."""
    seeds: dict[int, list[Number]] = defaultdict(list)
    for run in runs:
        seeds[run.record.seed].append(value(run))
    return [mean_if_complete(seeds[s]) for s in sorted(seeds)]


def _cell(record: RunRecord, name: str, target: str, domain: str, select: Select) -> Number:
    """Of the run that held `target` out: its score on `domain`, or G, P, C of its row of the matrix."""
    entries = matrix_row(record, select)
    if domain or name == "G":
        score = entries.get(domain or target)
        return None if score is None or score[0] != score[0] else score[0]
    return matrix_summary([entries])[name]


def _mean_corrupted(run: RunFolder) -> Number:
    """Over the kinds of corruption that the run was asked about."""
    asked = [e.scores[f"cacc@{e.name}"] for e in questions.read_answers(run.folder) if e.kind == "corrupt"]
    return mean_if_complete([scores.get("personal") for scores in asked]) if asked else None


def _single(run: RunFolder, name: str, place: str, select: Select) -> Number:
    record = run.record
    result, scored = record.finished, record.finished.at(select)
    if place:
        if name == "acc":
            score = matrix_row(record, select).get(place)
            return None if score is None else score[0]
        measure = f"{name}@{place}"
        if measure not in scored and scored["round"] == result.last["round"]:  # the models that `fedvlm evaluate` asks
            return questions.answer(run.folder, measure)
        return value_of(scored, measure)
    if name in ("worst", "best"):
        return scored.get("personal", {}).get(name)
    if name == "variance":
        scores = [
            s
            for views in scored.get("clients", {}).values()
            if (s := views.get("personal", {}).get("test")) is not None
        ]
        return fmean((s - fmean(scores)) ** 2 for s in scores) if scores else None
    if name == "cosine":
        return mean_if_complete([r["cosine"] for r in run.rounds() if "cosine" in r])
    if name == "condition":
        return mean_if_complete(list(scored.get("condition", {}).values()))
    if name == "acc":
        return value_of(scored, "acc") if "acc" in scored else matrix_summary([matrix_row(record, select)])["P"]
    costs = {
        "seconds": result.seconds,
        "mb": result.bytes_up / max(1, result.last["round"]) / 1e6,
        "parameters": result.parameters.get("shared"),
        "gap_variance": result.gap_variance,
    }
    return costs[name] if name in costs else value_of(scored, name)
