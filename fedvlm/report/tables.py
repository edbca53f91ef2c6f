"""Run folders → one row a method: G, P, C (or local, base, novel, hm) with mean ± standard deviation over seeds, and the
paper's numbers beside."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.config import recipe
from fedvlm.core import FedvlmError
from fedvlm.evaluate.protocols import MEASURES, by_seed, opened, partial, target
from fedvlm.runs import Run, binding

METRICS = ("G", "P", "C")
KINDS = (METRICS, MEASURES)  # of the usual protocols, and of base-to-novel
EVERY = (*METRICS, *MEASURES)
FAIR = ("worst", "best")  # of the clients' own models, in percent
TOLD = ("cacc", "auroc", "fpr95")  # under corruptions, and outsiders told from insiders; own models, in percent
DASH = "–"


@dataclass
class Table:
    columns: list[str]
    rows: list[dict[str, str]]
    notes: list[str] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)  # the same rows as numbers (percent, MB, seconds)


def summarise(runs: list[Run], select: str = "last", apart: bool = True) -> Table:
    """select: `last` round, or `selected` on validation; never the best on test. apart=False puts all of a method's
    runs into one row whatever their settings (where each target has a learning rate of its own)."""
    groups = grouped(runs, apart)
    values = [
        {"method": name} | scores(g, select) | fairness(g, select) | costs(g) | paper(g) for name, g in groups.items()
    ]
    infos = [i for group in groups.values() for i in group]
    kinds = [kind for kind in KINDS if any((kind is MEASURES) == opened(i) for i in infos)]
    shown = ["method", *(m for kind in kinds for m in kind)]
    keys = {by_paper(kind): [f"paper_{m}" for m in kind] for kind in kinds}
    keys |= {"worst 10 %": ["worst"], "gap variance": ["gap_variance"]}
    keys |= {"corrupted": ["cacc"], "AUROC": ["auroc"], "FPR95": ["fpr95"]}
    shown += [column for column, needs in keys.items() if any(v.get(k) is not None for v in values for k in needs)]
    shown += ["MB up/round", "shared", "private", "seconds"]
    published = any(by_paper(kind) in shown for kind in KINDS)
    return Table(shown, [cells(v) for v in values], notes(groups, select, published), values)


def scores(infos: list[dict[str, Any]], select: str) -> dict[str, Any]:
    """Every measure in percent with its standard deviation over seeds; None where a method has no such model."""
    seeds = by_seed(infos, select)
    out: dict[str, Any] = {"runs": len(infos), "seeds": len(seeds)}
    for metric in EVERY:
        found = [100 * v for s in seeds.values() if (v := s.get(metric)) is not None]
        whole = bool(found) and len(found) == len(seeds)
        out[metric] = float(np.mean(found)) if whole else None
        out[f"{metric}_std"] = float(np.std(found, ddof=1)) if whole and len(found) > 1 else None
    out["judged"] = "hm" if all(map(opened, infos)) else "C"  # what `against` compares
    return out | {"by_seed": {s: 100 * v for s, one in seeds.items() if (v := one.get(out["judged"])) is not None}}


def by_paper(kind: tuple[str, ...]) -> str:
    """The column of the published numbers."""
    return f"paper {'/'.join(kind)}"


def shown_of(table: Table) -> list[str]:
    """Which measures a table has."""
    return [c for c in table.columns if c in EVERY]


def fairness(infos: list[dict[str, Any]], select: str) -> dict[str, Any]:
    """The worst and best tenth of the clients' own models in percent, and the variance of what averaging costs them."""
    results = [i["result"] for i in infos]
    found = {key: [r[select].get("personal", {}).get(key) for r in results] for key in FAIR}
    found |= {key: [r[select].get(key) for r in results] for key in TOLD}
    found["gap_variance"] = [r.get("gap_variance") for r in results]
    return {
        k: None if any(x is None for x in v) else float(np.mean(v)) * (100 if k in (*FAIR, *TOLD) else 1)
        for k, v in found.items()
    }


def costs(infos: list[dict[str, Any]]) -> dict[str, Any]:
    results = [i["result"] for i in infos]
    rounds = [max(1, r["last"]["round"]) for r in results]
    wire = {way: [r[f"bytes_{way}"] / n / 1e6 for r, n in zip(results, rounds, strict=True)] for way in ("up", "down")}
    return {
        **{f"{way}_mb": float(np.mean(sizes)) for way, sizes in wire.items()},
        "seconds": float(np.mean([r["seconds"] for r in results])),
        **results[0]["parameters"],
    }


def paper(infos: list[dict[str, Any]]) -> dict[str, Any]:
    kind = MEASURES if opened(infos[0]) else METRICS
    return {f"paper_{m}": n for m, n in paper_numbers(infos[0]).items() if m in kind}


def cells(value: dict[str, Any]) -> dict[str, str]:
    """A row as text."""
    row = {m: plus_minus(value[m], value[f"{m}_std"]) for m in EVERY}
    for kind in KINDS:
        if any(f"paper_{m}" in value for m in kind):
            row[by_paper(kind)] = " / ".join(plus_minus(value.get(f"paper_{m}"), None) for m in kind)
    return row | {
        "method": value["method"],
        "worst 10 %": plus_minus(value["worst"], None),
        "corrupted": plus_minus(value["cacc"], None),
        "AUROC": plus_minus(value["auroc"], None),
        "FPR95": plus_minus(value["fpr95"], None),
        "gap variance": DASH if value["gap_variance"] is None else f"{value['gap_variance']:.3g}",
        "MB up/round": f"{value['up_mb']:.3g}",
        "shared": f"{value['shared']:,}",
        "private": f"{value['private']:,}",
        "seconds": f"{value['seconds']:.3g}",
    }


def grouped(runs: list[Run], apart: bool = True) -> dict[str, list[dict[str, Any]]]:
    """Finished runs by method; where one method was run with several settings, the settings that differ are named."""
    infos = [r.info for r in runs]
    unfinished = [r.folder.name for r, i in zip(runs, infos, strict=True) if "result" not in i]
    infos = [i for i in infos if "result" in i]
    if not infos:
        raise FedvlmError(f"no finished run: {', '.join(unfinished[:5])} can go on with `fedvlm resume`")
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for info in infos:
        kinds[info["method"], json.dumps(settings(info), sort_keys=True) if apart else ""].append(info)
    out: dict[str, list[dict[str, Any]]] = {}
    for (method, _), members in kinds.items():
        twins = [settings(v[0]) for (m, _), v in kinds.items() if m == method]
        mine = settings(members[0])
        differ = [k for k in mine if apart and any(t.get(k) != mine[k] for t in twins)]
        label = " ".join([method, *(f"{k}={short(mine[k])}" for k in differ)])
        out[label] = members
    return out


def settings(info: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs different methods: all but the seed, the target and where it ran."""
    config = info["config"]
    flat = {
        k: v for k, v in binding(config).items() if k not in ("method", "seed", "unseen", "engine", "chunk", "threads")
    }
    for axis in ("adapter", "local", "merge"):
        (name, fields), *_ = flat.pop(axis).items()
        flat |= {axis: name, **fields}
    return flat | {"data": info["data"]["fingerprint"], "backbone": info["backbone"]["name"]}


def short(value: Any) -> str:
    return (
        ",".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def paper_numbers(info: dict[str, Any]) -> dict[str, Any]:
    try:
        return recipe(info["method"]).published.get(info["data"]["name"], {})
    except FedvlmError:
        return {}


def plus_minus(mean: float | None, std: float | None) -> str:
    if mean is None:
        return DASH
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def notes(groups: dict[str, list[dict[str, Any]]], select: str, published: bool) -> list[str]:
    infos = [i for group in groups.values() for i in group]
    backbones = sorted({i["backbone"]["name"].split("@")[0] for i in infos})
    sets = sorted({f"{i['data']['name']} ({i['data']['images']:,} examples)" for i in infos})
    seeds = sorted({i["config"]["seed"] for i in infos})
    targets = sorted({target(i) for i in infos})
    split = sorted({"/".join(f"{s:g}" for s in i["config"]["split"]) for i in infos})
    metrics = " and ".join(sorted({i["data"].get("metric", "accuracy") for i in infos}))
    view = "last round" if select == "last" else "round chosen on the training clients' validation split"
    out = [
        f"{', '.join(sets)}; backbone {', '.join(backbones)}; split {', '.join(split)}; held out: {', '.join(targets)}; "
        f"seeds {', '.join(map(str, seeds))}",
        f"test {metrics} in %, {view}; ± std over seeds",
    ]
    if not all(map(opened, infos)):
        out.append("G: shared model on held-out clients, P: personal models, C: all")
    if any(map(opened, infos)):
        out.append(
            "local: clients' own models on test images of the classes they train on, base: of all classes that anybody "
            "trains on, novel: of classes that nobody trains on, hm: harmonic mean of base and novel"
        )
    for name, group in groups.items():
        if gaps := partial(group):
            out.append(f"{name}: seeds {', '.join(map(str, gaps))} are left out, they miss targets that others have")
    if published:
        sources = sorted({p["source"] for i in infos if (p := paper_numbers(i)) and "source" in p})
        out.append(f"the paper's numbers are with another backbone and are no target here: {'; '.join(sources)}")
    return out


def against(table: Table, base: str = "zero-shot") -> list[str]:
    """Whether each method beats the frozen model on C (base-to-novel: on hm) by more than two standard errors; says so
    either way. The error is of the difference seed by seed: both methods see the same splits."""
    rows = {v["method"]: v for v in table.values}
    out = []
    for name, row in rows.items():
        common = sorted(row["by_seed"].keys() & rows[base]["by_seed"].keys()) if base in rows and name != base else []
        if not common or row["judged"] != rows[base]["judged"]:
            continue
        judged = row["judged"]
        gains = np.array([row["by_seed"][s] - rows[base]["by_seed"][s] for s in common])
        gain = float(gains.mean())
        if len(common) == 1:
            out.append(f"{name} against {base}: {judged} {gain:+.1f} (one seed, so no error is known)")
            continue
        error = float(gains.std(ddof=1) / len(common) ** 0.5)
        verdict = "beats" if gain > 2 * error else "does NOT beat"
        out.append(
            f"{name} {verdict} {base} by more than two standard errors ({judged} {gain:+.1f} ± {error:.1f}, "
            f"{len(common)} seeds)"
        )
    return out


def write_csv(table: Table, path: Path) -> None:
    measures = shown_of(table)
    names = [
        "method",
        *measures,
        *(f"{m}_std" for m in measures),
        "seeds",
        "runs",
        "up_mb",
        "down_mb",
        "shared",
        "private",
        "seconds",
        *FAIR,
        "gap_variance",
    ]
    names += [f"paper_{m}" for m in measures if any(f"paper_{m}" in v for v in table.values)]
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({k: "" if v.get(k) is None else v[k] for k in names} for v in table.values)


def latex(table: Table) -> str:
    measures = shown_of(table)
    best = {m: max((v[m] for v in table.values if v[m] is not None), default=None) for m in measures}
    head = " & ".join(["Method", *measures])
    lines = [rf"\begin{{tabular}}{{l{'r' * len(measures)}}}", r"\toprule", rf"{head} \\", r"\midrule"]
    for row, value in zip(table.rows, table.values, strict=True):
        cells = [row["method"].replace("_", r"\_").replace("%", r"\%")]
        for m in measures:
            text = row[m].replace("±", r"$\pm$").replace(DASH, "--")
            cells.append(rf"\textbf{{{text}}}" if value[m] is not None and value[m] == best[m] else text)
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *("% " + n for n in table.notes)])
