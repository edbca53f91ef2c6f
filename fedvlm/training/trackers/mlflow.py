"""MLflow: a store in RUN/mlflow.db (`mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`); MLFLOW_TRACKING_URI names
another place, such as a server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from fedvlm.training.folder import RunFolder


class Tracked:
    def __init__(self, run: RunFolder):
        from mlflow import MlflowClient

        here = f"sqlite:///{(run.folder / 'mlflow.db').absolute().as_posix()}"
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or here)
        found = self.client.get_experiment_by_name("fedvlm")
        experiment = found.experiment_id if found else self.client.create_experiment("fedvlm")
        self.id = self.client.create_run(experiment, run_name=run.name).info.run_id
        record = run.record
        for key, value in {"method": record.method.label, "data": record.data.name, "seed": record.seed}.items():
            self.client.log_param(self.id, key, value)

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        for name, value in numbers.items():
            self.client.log_metric(self.id, re.sub(r"[^\w./ :-]", "_", name), value, now, round)

    def close(self) -> None:
        self.client.set_terminated(self.id)


def open(run: RunFolder) -> Tracked:
    return Tracked(run)
