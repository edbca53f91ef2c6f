"""What the benchmarks that run whole methods share: running several setups in one queue, and summaries of their runs."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedvlm import api
from fedvlm.config import catalogue
from fedvlm.config.config import Setup, binding
from fedvlm.core.records import Number, Result, RoundRecord
from fedvlm.data.pool import Pools
from fedvlm.evaluation.protocols import by_seed
from fedvlm.parts.registry import AXES
from fedvlm.report.tables import DASH, plus_minus
from fedvlm.system import console
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.planning import LEAVE_ONE_OUT, single_runs
from fedvlm.training.processes import RunsFailed

Name = TypeVar("Name", bound=Hashable)


def run_each(setups: Mapping[Name, Setup], at_once: int, pools: Pools) -> dict[Name, list[RunFolder]]:
    """The finished runs of each setup (held-out domains × seeds), so many at once; 0 is one per core.

    Not by api.plan: that would put a single run into `out` itself, where no other fits."""
    jobs = jobs_of(setups, pools)
    done = iter(api.execute([job for part in jobs.values() for job in part], at_once).files)
    return {name: [next(done) for _ in part] for name, part in jobs.items()}


def jobs_of(setups: Mapping[Name, Setup], pools: Pools) -> dict[Name, list[PlannedRun]]:
    jobs = {}
    for name, setup in setups.items():
        pool = pools.encode(setup)
        jobs[name] = [PlannedRun(one, pool) for one in single_runs(setup, pool)]
    return jobs


def finished_each(setups: Mapping[Name, Setup], at_once: int, pools: Pools) -> dict[Name, list[RunFolder]]:
    """As run_each, but a setup with a run that failed is left out."""
    jobs = jobs_of(setups, pools)
    once = {job.folder: job for part in jobs.values() for job in part}  # two names may stand for the same runs
    try:
        api.execute(list(once.values()), at_once)
    except RunsFailed as error:
        console.note(str(error))
    found = {name: [RunFolder(job.folder) for job in part] for name, part in jobs.items()}
    return {
        name: runs for name, runs in found.items() if all((r.folder / "run.json").exists() and r.done for r in runs)
    }


class Shelf:
    """Finished runs of a folder by what was decided in them: to judge runs of another machine, without their data."""

    APART = ("unseen", "seed")  # a setup stands for several of these

    def __init__(self, folder: Path):
        self.runs: dict[str, list[RunFolder]] = {}
        for path in sorted(folder.glob("*/run.json")):
            run = RunFolder(path.parent)
            if run.done:
                record = run.record
                setup = Setup.from_record(record, run.folder)
                self.runs.setdefault(self.key(setup, record.data.name), []).append(run)

    def key(self, setup: Setup, data: str) -> str:
        """Folders of data count by their name; keys that are newer than a record have their defaults."""
        made = {
            axis: [part.name, {k.name: k.default for k in catalogue.keys(axis, part.name)} | part.settings]
            for axis in AXES
            for part in [setup.parts[axis]]
        }
        kept = {k: v for k, v in binding(setup.settings()).items() if k not in (*self.APART, "data")}
        kept["outsiders"] = Path(setup.config.outsiders).name
        return json.dumps({"data": data, **made, **kept}, sort_keys=True)

    def of(self, setups: Mapping[Name, Setup]) -> dict[Name, list[RunFolder]]:
        """Of the setups whose runs are all there."""
        found = {}
        for name, setup in setups.items():
            runs = self.runs.get(self.key(setup, Path(setup.config.data).stem.split(".")[0]), [])
            newest = {(r.record.seed, *r.record.unseen): r for r in sorted(runs, key=lambda r: r.record.started)}
            runs = [run for (seed, *_), run in newest.items() if seed in (setup.config.seeds or (setup.config.seed,))]
            if runs and len(runs) == len(setup.config.seeds or (0,)) * targets(runs[0], setup):
                found[name] = runs
        return found


def targets(run: RunFolder, setup: Setup) -> int:
    if setup.config.protocol != LEAVE_ONE_OUT:
        return 1
    return len(setup.config.unseen or run.record.data.domains)


def results(runs: Sequence[RunFolder]) -> list[Result]:
    return [run.record.finished for run in runs]


def last_rounds(runs: Sequence[RunFolder]) -> list[RoundRecord]:
    return [result.last for result in results(runs)]


def seed_scores(runs: Sequence[RunFolder], metric: str) -> dict[int, Number]:
    """G, P, C or a measure of base-to-novel for each seed that was run on every target, last round."""
    return {seed: scores.get(metric) for seed, scores in by_seed([r.record for r in runs]).items()}


def mean_std(values: Sequence[Number], factor: float = 1.0) -> str:
    """Mean ± standard deviation of factor · value; a dash where a value is missing."""
    known = [factor * v for v in values if v is not None]
    if not known or len(known) < len(values):
        return DASH
    return plus_minus(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None)


def megabytes_per_round(runs: Sequence[RunFolder]) -> float:
    """Sent in both directions, mean over the runs."""
    each = [(r.bytes_up + r.bytes_down) / max(1, r.last["round"]) for r in results(runs)]
    return float(np.mean(each)) / 1e6


def standard_error(values: np.ndarray) -> float:
    """Of the mean; NaN for a single value."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
