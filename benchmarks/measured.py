"""What own.py measures beside the records of runs, each kept as a small file, so that tables can be made elsewhere."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.config.config import Setup
from fedvlm.core.detection import auroc, fpr_at
from fedvlm.data.pool import Pools
from fedvlm.evaluation.protocols import or_nan
from fedvlm.parts import ridge
from fedvlm.parts.local.moments import CROSS, SECOND
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.planning import single_runs

SHRINK = 0.1  # of the covariance within classes, in mean eigenvalues


class Measured:
    def __init__(self, folder: Path, read: bool):
        self.folder, self.read = folder, read

    def knows(self, name: str) -> bool:
        return (self.folder / f"{name}.json").exists()

    def __call__(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured before under this name, or now; {} where nothing may be measured."""
        path = self.folder / f"{name}.json"
        if not self.knows(name):
            if self.read:
                return {}
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(measure()), encoding="utf-8")
            print(f"{name}: {path.read_text(encoding='utf-8')}", flush=True)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def cpu_seconds(pools: Pools, setup: Setup) -> dict[str, Any]:
    """Of one run in this process, less those of a run of no rounds: rows, scores and records."""
    pool = pools.encode(setup)
    one = single_runs(setup, pool)[0]
    spent, result = cpu_of_run(one, pool)
    idle, _ = cpu_of_run(one.with_(rounds=0), pool)
    megabytes = (result.bytes_up + result.bytes_down) / 1e6
    return {"seconds": max(spent - idle, 0.0), "mb": megabytes, "rounds": result.last["round"]}


def cpu_of_run(setup: Setup, pool: Any) -> tuple[float, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        run = train.train(PlannedRun(setup, pool, Path(folder, "run")), lambda record: None)
        return time.process_time() - begun, run.record.finished


def distance_scores(pools: Pools, setup: Setup, run: RunFolder) -> dict[str, Any]:
    """AUROC and FPR95 by Mahalanobis distance to the nearest class mean, both of all clients' moments; mean over clients."""
    saved = run.load()
    assert saved is not None
    second, cross = (saved[0].server[k].double() for k in (SECOND, CROSS))
    means, within = ridge.class_means(ridge.Moments(ridge.unpacked(second), cross))
    within = within + SHRINK * within.trace() / len(within) * torch.eye(len(within), dtype=within.dtype)
    whiten = torch.linalg.cholesky(torch.linalg.inv(within))
    pool = pools.load(setup)
    one = next(s for s in single_runs(setup, pool) if s.config.seed == run.record.seed)
    data = PlannedRun(one, pool).federation.data

    def nearness(x: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(x.double() @ whiten, means @ whiten).amin(1)

    outside = nearness(data.extras["outsiders"].x)
    pairs = [(nearness(data.x[low:high]), outside) for low, high in data.bounds[:, 2:] if high > low]
    areas, rates = ([or_nan(measure(*pair)) for pair in pairs] for measure in (auroc, fpr_at))
    return {"auroc": float(np.mean(areas)), "fpr95": float(np.mean(rates))}
