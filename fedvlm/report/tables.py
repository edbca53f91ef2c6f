"""Tables from run folders: one row per method with G, S, P, C (or local, base, novel, hm) as mean ± standard deviation over
seeds, costs, the numbers published in the method's paper, and the further metrics that were recorded (metrics=)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from fedvlm.config import catalogue
from fedvlm.config.config import POOL, POOLED, TRAINING, binding
from fedvlm.core.records import MEASURES, Number, RunRecord, Select, Settings, Value, value_of
from fedvlm.errors import FedvlmError
from fedvlm.evaluation.protocols import (
    FAR_BELOW,
    by_client,
    by_seed,
    is_base_to_novel,
    mean_if_complete,
    partial,
    target,
)
from fedvlm.report.columns import DEFINED, Measure
from fedvlm.report.gains import FROZEN, GOALS, Verdict, verdict
from fedvlm.report.headline import answers, headline
from fedvlm.system.formatting import counted
from fedvlm.system.table import BEST, LEVEL, ClientScores, SeedScores, Table
from fedvlm.training.folder import RunFolder

METRICS = ("G", "S", "P", "C")
NEED_HELD_OUT = ("G", "C")  # have a value only where clients are held out
PROTOCOL_METRICS = (METRICS, MEASURES)  # of the usual protocols, and of base-to-novel
ALL_METRICS = (*METRICS, *MEASURES)
TENTHS = ("worst", "best")  # mean accuracy of the worst and of the best tenth of the clients, personal models
ROBUSTNESS = ("cacc", "auroc", "fpr95")  # accuracy on corrupted images, detection of outsiders; personal models
NOVEL = ("base", "novel", "hm")
SHARED_NOVEL = "shared base/novel/hm"
DASH = "–"  # no such value

Numbers = dict[str, Number]  # a row of the table; counts are integers
Groups = dict[str, list[RunRecord]]  # finished runs by the label of their row


def summarise(runs: list[RunFolder], select: Select = "last", apart: bool = True, fair: bool = False) -> Table:
    """The table of these runs.

    select: the round that is reported, "last" or "selected" (the best on validation, never on test).
    apart: whether runs of one method with different settings are separate rows; False where the settings differ by
    design, such as a learning rate chosen for each target.
    fair: rows that were not run under one rule are an error; otherwise a note names the difference, and no row is called
    the best.
    """
    groups = grouped(runs, apart)
    rules = rules_of(groups, select)
    unlike = differences(rules)
    if fair:
        check_one_rule(rules)
    values = {
        name: scores(g, select) | shared_novel(g, select) | fairness_columns(g, select) | costs(g) | published_values(g)
        for name, g in groups.items()
    }
    known = {"method", *(key for row in values.values() for key in row)}
    further = {m: m if m not in known else f"metrics.{m}" for m in further_metrics(groups, select)}  # metric → its key
    for name, group in groups.items():
        values[name] |= {k: v for m, key in further.items() for k, v in further_values(group, m, key, select).items()}
    records = [r for group in groups.values() for r in group]
    shown = [
        metrics for metrics in PROTOCOL_METRICS if any((metrics is MEASURES) == is_base_to_novel(r) for r in records)
    ]
    held_out = any(r.unseen for r in records)
    # column → its values; the first ones stand in the first block where a terminal is narrow
    asked = {"corrupted": ["cacc"], "AUROC": ["auroc"], "FPR95": ["fpr95"]}
    optional = {paper_column(metrics): [f"paper_{m}" for m in metrics] for metrics in shown}
    optional |= {SHARED_NOVEL: [f"shared_{m}" for m in NOVEL], "gap variance": ["gap_variance"]}

    def known_of(columns: dict[str, list[str]]) -> list[str]:
        return [c for c, keys in columns.items() if any(v.get(k) is not None for v in values.values() for k in keys)]

    usual = [m for m in ("S", "C") if METRICS in shown and (held_out or m not in NEED_HELD_OUT)]
    first = [m for metrics in shown for m in (("G", "P") if metrics is METRICS else MEASURES)]
    columns = ["method", *(m for m in first if held_out or m not in NEED_HELD_OUT)]
    columns += [*further.values(), *known_of(asked), *usual, *known_of({"worst": ["worst"]})]
    columns += ["rounds", "MB", "seconds", *known_of(optional), "shared", "private"]
    has_published = any(paper_column(metrics) in columns for metrics in PROTOCOL_METRICS)
    each = {name: seed_scores(groups[name], select) for name in comparable(groups, rules)}
    by_clients = {name: client_scores(groups[name], select) for name in each}
    ranked = {} if unlike else each
    found = [v for m in columns if m in ALL_METRICS and (v := verdict(ranked, m, by_clients))]
    notes = [*table_notes(groups, columns, select, has_published, further, unlike), *best_note(found)]
    goal = next((m for goals in GOALS for m in goals if m in columns), "P")
    order = sorted(values, key=lambda name: -(values[name][goal] or 0.0))
    table = Table(
        columns,
        [format_row(name, values[name], list(further.values())) for name in order],
        notes,
        values=[{"method": name, **values[name]} for name in order],
        by_seed=each,
        bold={(v.highest, v.measure) for v in found if v.best},
        level={(name, v.measure) for v in found if not v.best for name in v.level},
        by_client=by_clients,
        titles={c: DEFINED[c].title for c in columns if c in DEFINED} | further_titles(records, further),
        warnings=warnings_of(groups, select, unlike),
        unlike=unlike,
    )
    return replace(table, head=[headline(table), *answers(table)])


def scores(records: list[RunRecord], select: Select) -> Numbers:
    """Every metric in percent with its standard deviation over seeds; None where a method has no such model."""
    seeds = by_seed(records, select)
    out: Numbers = {"runs": len(records), "seeds": len(seeds)}
    for metric in ALL_METRICS:
        known = [100 * v for s in seeds.values() if (v := s.get(metric)) is not None]
        complete = bool(known) and len(known) == len(seeds)
        out[metric] = float(np.mean(known)) if complete else None
        out[f"{metric}_std"] = float(np.std(known, ddof=1)) if complete and len(known) > 1 else None
    return out


def seed_scores(records: list[RunRecord], select: Select) -> SeedScores:
    seeds = by_seed(records, select)
    return {m: {s: 100 * v for s, one in seeds.items() if (v := one.get(m)) is not None} for m in ALL_METRICS}


def client_scores(records: list[RunRecord], select: Select) -> ClientScores:
    return {m: {c: 100 * v for c, v in each.items()} for m, each in by_client(records, select).items()}


def best_note(found: list[Verdict]) -> list[str]:
    """What the marks mean; nothing without marks."""
    rule = "best: the 95 % interval of its difference to every other row, paired over seeds, is above 0"
    return [f"{BEST} {rule}; {LEVEL} level with the highest"] if any(v.best or v.level for v in found) else []


def paper_column(metrics: tuple[str, ...]) -> str:
    """The name of the column with published numbers."""
    return f"paper {'/'.join(in_papers(metrics))}"


def in_papers(metrics: tuple[str, ...]) -> list[str]:
    """Papers give personal models the place of S."""
    return [m for m in metrics if m != "S"]


def shared_novel(records: list[RunRecord], select: Select) -> Numbers:
    """The shared model's measures of base-to-novel beside the personal models', where clients have their own."""
    found = [r.finished.at(select).get("base_to_novel", {}) for r in records]
    views = [f.get("shared", {}) if f.get("shared") != f.get("personal") else {} for f in found]
    return {f"shared_{m}": percent(mean_if_complete([v.get(m) for v in views])) for m in NOVEL}


def fairness_columns(records: list[RunRecord], select: Select) -> Numbers:
    """The worst and best tenth of the clients, robustness (all in percent), and the variance over clients of the
    generalisation gap; means over runs, None where a run did not record it."""
    results = [r.finished for r in records]
    found = {key: [r.at(select).get("personal", {}).get(key) for r in results] for key in TENTHS}
    found |= {key: [value_of(r.at(select), key) for r in results] for key in ROBUSTNESS}
    percents = {key: percent(mean_if_complete(values)) for key, values in found.items()}
    return percents | {"gap_variance": mean_if_complete([r.gap_variance for r in results])}


def further_metrics(groups: Groups, select: Select) -> list[str]:
    """The metrics of `metrics=`, each once, in order of appearance."""
    records = [r.finished.at(select) for group in groups.values() for r in group]
    return list(dict.fromkeys(m for record in records for m in record.get("metrics", {})))


def further_values(records: list[RunRecord], metric: str, key: str, select: Select) -> Numbers:
    """A further metric of the personal models on test, as means over runs: the mean over clients and, as KEY_pooled,
    the value of all clients' examples together; in percent where the metric is a share; None where a run did not record
    it."""
    found = [r.finished.at(select).get("metrics", {}).get(metric, {}).get("personal", {}) for r in records]
    splits = {key: "test", f"{key}_pooled": "test_pooled"}
    means = {k: mean_if_complete([scores.get(split) for scores in found]) for k, split in splits.items()}
    return {k: percent(v) if is_share(records, metric) else v for k, v in means.items()}


def is_share(records: list[RunRecord], metric: str) -> bool:
    """Whether a metric is shown in percent."""
    return all(m.percent for r in records for m in r.metrics if m.name == metric)


def percent(value: Number) -> Number:
    return None if value is None else value * 100


def costs(records: list[RunRecord]) -> Numbers:
    """Rounds, MB, seconds (means over runs), and the number of shared and private parameters."""
    results = [r.finished for r in records]
    rounds = [max(1, r.last["round"]) for r in results]
    up = [r.bytes_up / n / 1e6 for r, n in zip(results, rounds, strict=True)]
    down = [r.bytes_down / n / 1e6 for r, n in zip(results, rounds, strict=True)]
    return {
        "rounds": float(np.mean([r.last["round"] for r in results])),
        "mb": float(np.mean([r.bytes_up + r.bytes_down for r in results])) / 1e6,
        "up_mb": float(np.mean(up)),
        "down_mb": float(np.mean(down)),
        "seconds": float(np.mean([r.seconds for r in results])),
        **results[0].parameters,
    }


def published_values(records: list[RunRecord]) -> Numbers:
    """What the method's paper reports for this data set, in percent; empty where it reports nothing."""
    metrics = MEASURES if is_base_to_novel(records[0]) else METRICS
    numbers = {m: n for m, n in records[0].published.items() if m in metrics}
    return {f"paper_{m}": n for m, n in numbers.items() if isinstance(n, int | float)}


def format_row(name: str, value: Numbers, further: list[str]) -> dict[str, str]:
    row = {m: plus_minus(value[m], value[f"{m}_std"]) for m in ALL_METRICS}
    for metrics in PROTOCOL_METRICS:
        if any(f"paper_{m}" in value for m in metrics):
            row[paper_column(metrics)] = slashed(value.get(f"paper_{m}") for m in in_papers(metrics))
    return row | {
        "method": name,
        SHARED_NOVEL: slashed(value[f"shared_{m}"] for m in NOVEL),
        "worst": plus_minus(value["worst"], None),
        "corrupted": plus_minus(value["cacc"], None),
        "AUROC": plus_minus(value["auroc"], None),
        "FPR95": plus_minus(value["fpr95"], None),
        "gap variance": formatted(value["gap_variance"], ".3g"),
        "rounds": formatted(value["rounds"], "g"),
        "MB": formatted(value["mb"], ".3g"),
        "shared": formatted(value.get("shared"), ","),
        "private": formatted(value.get("private"), ","),
        "seconds": formatted(value["seconds"], ".3g"),
        **{key: plus_minus(value[key], None) for key in further},
    }


def slashed(values: Iterable[Number]) -> str:
    return " / ".join(plus_minus(v, None) for v in values)


def formatted(value: Number, form: str) -> str:
    return DASH if value is None else format(value, form)


def grouped(runs: list[RunFolder], apart: bool = True) -> Groups:
    """Finished runs by label: the method's name and, where one method was run with several settings, those that differ."""
    every = [(r.folder.name, r.record) for r in runs]
    records = [record for _, record in every if record.result is not None]
    if not records:
        unfinished = [name for name, _ in every]
        raise FedvlmError(f"no finished run: {', '.join(unfinished[:5])} can be continued with `fedvlm resume`")
    groups: dict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    for record in records:
        key = json.dumps(settings(record), sort_keys=True) if apart else ""
        groups[record.method.label, key].append(record)
    out: Groups = {}
    for (method, _), members in groups.items():
        others = [settings(v[0]) for (m, _), v in groups.items() if m == method]
        own = settings(members[0])
        differing = [k for k in own if apart and any(o.get(k) != own[k] for o in others)]
        out[" ".join([method, *(f"{k}={named(own[k], k, others)}" for k in differing)])] = members
    return dict(sorted(out.items(), key=lambda row: row[1][0].method.name != FROZEN))  # the reference first


def named(value: Value, key: str, others: list[Settings]) -> str:
    """A setting as labels show it: data and backbones by name, with the fingerprint where another has the same name."""
    text = format_value(value)
    if key not in ("data", "backbone"):
        return text
    name = text.rpartition("@")[0]
    return name if {str(o[key]) for o in others if str(o[key]).rpartition("@")[0] == name} == {text} else text


def settings(record: RunRecord) -> Settings:
    """The settings by which `grouped` separates runs: all but the seed, the held-out target and where it ran. A part's
    setting whose name is taken (by the run or by another part) is PART.NAME, as on the command line."""
    varies = catalogue.with_trait("varies")
    flat: Settings = {k: v for k, v in binding(record.config).items() if k not in varies}
    parts = {"adapter": record.adapter, "local": record.local, "merge": record.merge}
    for axis, part in parts.items():
        flat[axis] = f"{part.name}@{part.digest}" if part.digest else part.name
        flat |= {k if k not in flat else f"{axis}.{k}": v for k, v in part.settings.items()}
    return flat | {"data": data_id(record), "backbone": backbone_id(record)}


def rule(record: RunRecord, select: Select = "selected") -> Settings:
    """What the rows of a fair table have in common, of one run. A run that holds a domain out is the same whether it was
    asked for alone or as one of leave-one-domain-out."""
    found = fair_keys(record.config, select) | {"data": data_id(record), "backbone": backbone_id(record)}
    return found | {"unseen": target(record)}


def rules_of(groups: Groups, select: Select) -> dict[str, list[Settings]]:
    """The rule of each run, by row, with those settings of the training that were given for a row of this table."""
    given = given_effort(groups)
    return {
        name: [rule(r, select) | {k: v for k, v in effort(r).items() if k in given} for r in group]
        for name, group in groups.items()
    }


def comparable(groups: Groups, rules: dict[str, list[Settings]]) -> list[str]:
    """The rows that may be compared with the first one, which is the frozen model where there is one."""
    first = next(iter(groups))
    alike = [name for name in groups if not differences({first: rules[first], name: rules[name]})]
    return [name for name in alike if name not in references(groups)]


def references(groups: Groups) -> list[str]:
    """Rows that train on the images of all clients together and are not scored by the clients of the others: each domain is
    one, whatever partition the others have."""
    clients = {name: {c for r in group for c in r.clients if c != POOL} for name, group in groups.items()}
    pooled = [name for name, group in groups.items() if group[0].config.get("partition") == POOLED]
    other = next((clients[name] for name in groups if name not in pooled), None)
    return [name for name in pooled if other not in (None, clients[name])]


@cache
def effort_keys() -> set[str]:
    """The settings of parts that say how much is computed, and how it is averaged."""
    kinds = catalogue.load().parts.values()
    return {k.name for known in kinds for part in known.values() for k in part.keys if "effort" in k.traits}


def given_effort(groups: Groups) -> set[str]:
    """Keys of `effort_keys` that somebody gave; the others are the recipes' own. None in a sweep of one method, which
    compares just these."""
    records = [r for group in groups.values() for r in group]
    one_method = len({r.method.name for r in records if r.rounds}) < 2
    return set() if one_method else {key for r in records for key in r.given} & effort_keys()


def effort(record: RunRecord) -> Settings:
    """The settings of the training that a method may have of its own; a method that trains nothing has none."""
    if not record.rounds or record.method.name == FROZEN:
        return {}
    parts = (record.adapter, record.local, record.merge)
    found = {k: record.config[k] for k in catalogue.with_trait("tuned") if k in record.config}
    return found | {k: v for part in parts for k, v in part.settings.items() if k in effort_keys()}


def fair_keys(config: Settings, select: Select = "selected") -> Settings:
    """The keys of a run in which rows of a fair table agree. Those of the training say nothing of a run that trains nothing,
    and one that trains on the images of all clients together has no partition (see `references`)."""
    found: Settings = {}
    for name, key in catalogue.run_keys().items():
        value = config.get(name, key.default)
        idle = key.purpose in TRAINING and config["rounds"] == 0
        if key.fair(select) and not idle and (name, value) != ("partition", POOLED):
            found[name] = value if key.binds(value) else key.default
    return found


def differences(rows: dict[str, list[Settings]], free: Collection[str] = ()) -> list[str]:
    """The differences between the rows of a table, in words: their rules by name, of each run one. `free`: keys that
    may differ."""
    found = []
    for key in dict.fromkeys(k for rules in rows.values() for one in rules for k in one if k not in free):
        values: dict[str, list[str]] = defaultdict(list)
        for name, rules in rows.items():
            if known := sorted({format_value(one[key]) for one in rules if key in one}):
                values[", ".join(known)].append(name)
        if len(values) > 1:
            words = [
                f"{value} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})" for value, names in values.items()
            ]
            found.append(f"{key} {' and '.join(words)}")
    return found


def check_one_rule(rows: dict[str, list[Settings]], free: Collection[str] = ()) -> None:
    """An error where rows of one table were not run alike."""
    if found := differences(rows, free):
        raise FedvlmError(
            f"rows of one table must follow the same protocol, and these differ in {'; '.join(found)}; run them alike "
            "(the same rounds=, seeds=, backbone=), or see them side by side with `fedvlm compare`, without --fair"
        )


def data_id(record: RunRecord) -> str:
    """NAME@FINGERPRINT."""
    return f"{record.data.name}@{record.data.fingerprint}"


def backbone_id(record: RunRecord) -> str:
    """NAME@FINGERPRINT."""
    return f"{record.backbone.name}@{record.backbone.fingerprint}"


def format_value(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def plus_minus(mean: Number, std: Number) -> str:
    if mean is None:
        return DASH
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def table_notes(
    groups: Groups,
    columns: Sequence[str],
    select: Select,
    has_published: bool,
    further: dict[str, str],
    unlike: Sequence[str] = (),
) -> list[str]:
    """What a reader needs to know of the numbers: data, backbone, split, targets, seeds, and what the metrics are; further
    ones by name, with their columns."""
    records = [r for group in groups.values() for r in group]
    backbones = sorted({r.backbone.name for r in records})
    data = sorted({r.data.name + (f" ({r.data.images:,} examples)" if r.data.images else "") for r in records})
    seeds = sorted({r.seed for r in records})
    targets = sorted({target(r) for r in records})
    split = sorted({"/".join(split_sizes(r)) for r in records})
    metrics = " and ".join(sorted({r.data.metric for r in records}))
    chosen = "last round" if select == "last" else "round chosen on the training clients' validation split"
    out = [
        f"{', '.join(data)}; backbone {', '.join(backbones)}; split {', '.join(split)}; held out: {', '.join(targets)}; "
        f"seeds {', '.join(map(str, seeds))}",
        f"test {metrics} in %, {chosen}" + ("; ± standard deviation over seeds" if len(seeds) > 1 else ""),
    ]
    if unlike:
        out.append(f"rows that follow different protocols and do not compare methods: {'; '.join(unlike)}")
    else:
        out[-1] += f"; {'same protocol for all rows: ' if len(groups) > 1 else ''}{', '.join(budget(records))}"
    own = {name: [effort(r) for r in group] for name, group in groups.items()}
    if len({r.method.name for r in records}) > 1 and (found := differences(own, given_effort(groups))):
        out.append(f"settings that belong to the methods and differ: {'; '.join(found)}")
    if pooled := references(groups):
        out.append(
            f"{', '.join(pooled)}: trains and is scored on other clients; for reference, not compared with the others"
        )
    out += [
        f"{name}: {counted(rounds, 'round')}, after which more would change nothing"
        for name, group in groups.items()
        if 0 < (rounds := max(r.finished.last["round"] for r in group)) < min(r.rounds for r in group)
    ]
    if not all(map(is_base_to_novel, records)):
        out.append(f"scored on: {'; '.join(sorted({scored_on(r) for r in records}))}")
    out.append(definitions(columns))
    for ending, share in ((", in %", True), ("", False)):
        if columns := [column for metric, column in further.items() if is_share(records, metric) == share]:
            out.append(f"{', '.join(columns)}: personal models, mean over clients and runs{ending}")
    for name, group in groups.items():
        if untested := without_tests(group[0], select):
            out.append(f"{name}: own clients is the mean over {untested}, which have test images")
        if incomplete := partial(group):
            out.append(
                f"{name}: seeds {', '.join(map(str, incomplete))} are left out because they lack targets that other "
                "seeds have"
            )
        out += [
            f"{name}: {text}"
            for text in (*far_below_notes(group, select), *incidents(group, select), *privacy_lines(group))
        ]
    if has_published:
        sources = sorted({str(r.published["source"]) for r in records if "source" in r.published})
        out.append(
            f"the paper's numbers were measured with another backbone and are not comparable: {'; '.join(sources)}"
        )
    return out


def definitions(columns: Sequence[str]) -> str:
    """The note that says what the columns are; the page has these words elsewhere."""
    known = [DEFINED[c] for c in columns if c in DEFINED and DEFINED[c].meaning]
    return "; ".join(f"{m.word}{f' ({m.letter})' * bool(m.letter)}: {m.meaning}" for m in known)


def further_titles(records: list[RunRecord], further: dict[str, str]) -> dict[str, str]:
    """Headings of further metrics, with unit and direction."""
    lower = {m.name for r in records for m in r.metrics if m.lower_is_better}
    return {key: Measure(key, "", "", "%" * is_share(records, m), m in lower).title for m, key in further.items()}


def warnings_of(groups: Groups, select: Select, unlike: Sequence[str]) -> list[str]:
    """The notes that a reader needs before relying on the answer, the most important first."""
    out = [f"rows that follow different protocols and do not compare methods: {'; '.join(unlike)}"] if unlike else []

    def untested(group: list[RunRecord]) -> list[str]:
        return list(filter(None, [without_tests(group[0], select)]))

    kinds: list[Callable[[list[RunRecord]], list[str]]] = [
        lambda group: far_below_notes(group, select),
        lambda group: [f"own clients is the mean over {n}, which have test images" for n in untested(group)],
        lambda group: incidents(group, select),
    ]
    out += [f"{name}: {text}" for kind in kinds for name, group in groups.items() for text in kind(group)]
    own = {name: [effort(r) for r in group] for name, group in groups.items()}
    if len(groups) > 1 and not unlike and (found := differences(own, given_effort(groups))):
        out.append(f"settings that belong to the methods and differ: {'; '.join(found)}")
    return out


def without_tests(record: RunRecord, select: Select) -> str:
    """150 of 200 clients: those with a score; "" where all have one."""
    clients = record.finished.at(select).get("clients", {})
    own = [views["personal"].get("test") for views in clients.values() if "personal" in views]
    known = sum(v is not None for v in own)
    return f"{known} of {counted(len(own), 'client')}" if known < len(own) else ""


def far_below_notes(records: list[RunRecord], select: Select) -> list[str]:
    """A warning where the shared model, which `predict` uses, is much worse than the personal models."""
    found = scores(records, select)
    shared, personal = found["S"], found["P"]
    if shared is None or personal is None or personal - shared <= 100 * FAR_BELOW:
        return []
    return [
        f"the shared model (S {shared:.1f}) is far below the personal models (P {personal:.1f}); `fedvlm predict RUN IMAGE` "
        "uses the shared one, --client NAME a client's own"
    ]


def budget(records: list[RunRecord]) -> list[str]:
    """What of the rule is not in the other notes."""
    rounds = sorted({r.rounds for r in records if r.rounds})
    shots = sorted({f"{format_value(r.config['shots'])} shots" for r in records if r.config.get("shots")})
    return [f"{' or '.join(map(str, rounds)) or 'no'} round{'s' * (rounds != [1])}", *shots]


def scored_on(record: RunRecord) -> str:
    """The images that G and P are measured on, in words."""
    config = record.config
    held_out = "all" if config.get("unseen_split") == "all" else "test"
    split = "validation" if config.get("personal_split") == "val" else "test"
    owners = {"domain": "of the client's domain", "all": "of all clients that train", "unseen": "of held-out clients"}
    owners = owners if split == "test" else {}
    owner = owners.get(str(config.get("score")), "of the client itself")
    return (f"G on {held_out} images of held-out clients, " if record.unseen else "") + f"P on {split} images {owner}"


def incidents(group: list[RunRecord], select: Select) -> list[str]:
    """What makes these numbers less than they seem: rounds that changed nothing, and clients that are not in them."""
    results = [r.finished for r in group]
    void, rounds = sum(r.void for r in results), sum(r.rounds for r in group)
    out = [f"{void} of {counted(rounds, 'round')} changed nothing (see `void` in rounds.jsonl)"] if void else []
    if bounded := sum(r.bounded for r in results):
        limits = "/".join(dict.fromkeys(format_value(r.config.get("bound", "bound=")) for r in group))
        out.append(
            f"in {bounded} of {counted(rounds, 'round')} a client's update was scaled down to {limits} times the median "
            "length (bound=0 switches this off)"
        )
    for words, names in (
        (
            "that did not answer and are not in the scores",
            {n for r in results for n in r.at(select).get("missing", [])},
        ),
        ("in quarantine after replies that were refused", {n for r in results for n in r.quarantined}),
    ):
        if names:
            out.append(f"clients {words}: {', '.join(sorted(names)[:10])}{', …' if len(names) > 10 else ''}")
    return out


def privacy_lines(group: list[RunRecord]) -> list[str]:
    """What these runs spent, each distinct line once; of several targets or seeds the largest ε comes first."""
    spent = [r.finished.privacy for r in group if r.finished.privacy]
    return list(dict.fromkeys(p.line for p in sorted(spent, key=lambda p: -p.epsilon)))


def split_sizes(record: RunRecord) -> list[str]:
    """Train, val and test, in percent."""
    if record.data.split:
        return [f"{100 * n / sum(record.data.split):.3g}" for n in record.data.split]
    split = record.config["split"]
    return [f"{s:g}" for s in split if isinstance(s, int | float)] if isinstance(split, list) else []
