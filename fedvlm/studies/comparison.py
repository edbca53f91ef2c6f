"""A bench: several methods run alike, and the frozen model beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedvlm.api import Run, Runs, chosen, execute, new_pools, plan, prepared, runs
from fedvlm.config import catalogue
from fedvlm.config.config import TRAINING, Config, EngineKeys, Setup, resolve
from fedvlm.core.records import RunRecord
from fedvlm.core.tasks import CLASSIFICATION
from fedvlm.errors import FedvlmError
from fedvlm.report.gains import FROZEN
from fedvlm.report.tables import check_one_rule, fair_keys, grouped
from fedvlm.system.interrupts import shell_line
from fedvlm.training.folder import RunFolder, find_runs
from fedvlm.training.planning import LEAVE_ONE_OUT, check_parts, checked

if TYPE_CHECKING:
    from fedvlm.data.pool import Pool, Pools
    from fedvlm.training.planned_run import PlannedRun

SEEDS = (50, 77, 98)
MOST_NAMED = 8  # runs in an error


def setups_of(methods: Sequence[str], keys: Mapping[str, object], pools: Pools) -> list[Setup]:
    """A setup for each method, with seeds and protocol; the frozen model comes first where the backbone has a text tower:
    it costs one evaluation."""
    if not methods:
        raise FedvlmError("bench needs at least one method; `fedvlm ls methods` names them")
    given = {"seeds": SEEDS} | dict(keys)
    if "seed" in given:
        given["seeds"] = given.pop("seed")
    setups = [chosen(m, given) for m in methods]
    if any(s.config.federation for s in setups):
        raise FedvlmError(
            "bench does not take federation=; `fedvlm run` each method there, and `fedvlm compare` the runs"
        )
    check_one_rule({s.method.label: [fair_keys(s.settings()) | {"backbone": s.config.backbone}] for s in setups})
    check_parts(setups)
    pool = checked(setups[0], pools).pool  # refuses what it can before anything is encoded
    if "protocol" not in given and "unseen" not in given and len(pool.source.domains) >= 3:
        setups = [chosen(m, given | {"protocol": LEAVE_ONE_OUT}) for m in methods]
    return frozen(setups, pool) + setups


def frozen(setups: list[Setup], pool: Pool) -> list[Setup]:
    """The frozen model's setup; none where it is among the methods, or cannot classify by class names."""
    if any(trains_nothing(s) for s in setups) or pool.task.text is None or pool.source.task_type is not CLASSIFICATION:
        return []
    config, keys = setups[0].config, catalogue.run_keys().values()
    known = {k.name: getattr(config, k.name) for k in keys if k.purpose not in (*TRAINING, EngineKeys.purpose)}
    return [resolve(FROZEN, {k: v for k, v in known.items() if v != getattr(Config(), k)})]


def trains_nothing(setup: Setup) -> bool:
    return setup.parts["adapter"].name == "none"


def best_runs(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The best run of each row of a table by validation (`evaluation.views.selection`), that of the best row first; of the
    frozen model only where there is no other."""
    from fedvlm.evaluation.views import selection  # imports torch

    groups = grouped(list(runs))
    trained = {name: group for name, group in groups.items() if group[0].method.name != FROZEN} or groups
    folders = {r.record.identity: r for r in runs}

    def score(record: RunRecord) -> float:
        found = selection(record.finished.last)
        return -math.inf if math.isnan(found) else found

    means = {name: sum(map(score, group)) / len(group) for name, group in trained.items()}
    order = sorted(trained, key=lambda name: -means[name])
    return [folders[max(trained[name], key=score).identity] for name in order]


def one_run(name: str, trust: bool, command: Sequence[str]) -> Run:
    """The run that a command takes; of a folder with several an error, which names the best by validation. command: the
    words that follow fedvlm, with {} where the run stands."""
    found = runs(name, trust=trust)
    if len(found) == 1:
        return found[0]
    best = best_runs([r for r in found.files if r.done])
    lines = [
        shell_line(["fedvlm", *(str(run.folder) if w == "{}" else w for w in command)]) for run in best[:MOST_NAMED]
    ]
    more = f"\n… and {len(best) - MOST_NAMED} more rows" if len(best) > MOST_NAMED else ""
    raise FedvlmError(
        f"{name} holds {len(found)} runs; give one of them. The best of each method by validation, the best method first:\n"
        + "\n".join(lines)
        + more
    )


def next_steps(runs: Runs) -> list[str]:
    """The place of the runs, and a command each for a page, a table and predictions with the run that validation finds
    best."""
    root = runs[0].folder.parent
    others = len(find_runs([str(root)])) > len({r.folder for r in runs})
    commands = [["report", str(root)], ["compare", str(root), "--csv", "table.csv"]]
    commands += [["predict", str(best_runs(runs.files)[0].folder), "IMAGE"]]
    where = f"{len(runs)} runs in {root}" + (", among others (out=FOLDER keeps a bench's together)" if others else "")
    return [where, *("next: " + shell_line(["fedvlm", *words]) for words in commands)]


def bench_folder(setup: Setup) -> Path:
    """The folder that holds the runs of a bench."""
    from fedvlm.system.machine import runs_home

    return Path(setup.config.out) if setup.config.out else runs_home()


def bench(methods: Sequence[str], **keys: object) -> Runs:
    """Runs several methods alike: seeds 50, 77, 98 unless given, and leave-one-domain-out where the data has three or more
    domains and neither protocol= nor unseen= is given; zero-shot is added where the backbone has a text tower.

    A key of a method with several values, such as lr=[0.001, 0.01], is a sweep: studies/sweep.py says how it chooses."""
    planned, notes = compared(methods, prepared(keys))
    return Runs(execute(planned, planned[0].setup.config.jobs).members, notes)


def compared(methods: Sequence[str], given: dict[str, object]) -> tuple[list[PlannedRun], list[str]]:
    """The runs of a bench, swept keys chosen, and what their table has to say of the choice."""
    from fedvlm.studies.sweep import Sweep, separated

    fixed, search = separated(methods, given)
    pools = new_pools()
    setups = setups_of(methods, fixed, pools)
    setups, notes = Sweep(setups, search, pools).chosen() if search else (setups, [])
    return plan(setups, pools), notes
