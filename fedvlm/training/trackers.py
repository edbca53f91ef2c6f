"""Experiment trackers that also get the numbers of each round (log=); rounds.jsonl has them in any case.

Each is a context that yields a function of (round, numbers), and is imported only where it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from fedvlm.core.records import RoundRecord
from fedvlm.errors import FedvlmError
from fedvlm.training.folder import RunFolder

NESTED = ("shared", "personal", "newcomer", "effects", "metrics", "detection", "base_to_novel")  # not by client

Write = Callable[[int, Mapping[str, float]], None]


@contextlib.contextmanager
def tensorboard(run: RunFolder) -> Iterator[Write]:
    """Event files in RUN/tensorboard; see them with `tensorboard --logdir RUNS`."""
    from torch.utils.tensorboard import SummaryWriter

    def write(round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, round)

    with SummaryWriter(str(run.folder / "tensorboard")) as writer:
        yield write


@contextlib.contextmanager
def wandb(run: RunFolder) -> Iterator[Write]:
    """An offline run in RUN/wandb, to be sent by `wandb sync`; WANDB_MODE=online sends it while it runs."""
    import wandb

    record = run.record
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", "fedvlm"),
        name=run.name,
        group=record.method.label,
        dir=str(run.folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config={"method": record.method.label, "data": record.data.name, **record.config},
        settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
        reinit="create_new",
    ) as tracked:
        yield lambda round, numbers: tracked.log(dict(numbers), step=round)


@contextlib.contextmanager
def mlflow(run: RunFolder) -> Iterator[Write]:
    """A store in RUN/mlflow.db (`mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`); MLFLOW_TRACKING_URI names
    another place, such as a server."""
    from mlflow import MlflowClient

    here = f"sqlite:///{(run.folder / 'mlflow.db').absolute().as_posix()}"
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or here)
    found = client.get_experiment_by_name("fedvlm")
    experiment = found.experiment_id if found else client.create_experiment("fedvlm")
    tracked, record = client.create_run(experiment, run_name=run.name).info.run_id, run.record
    for key, value in {"method": record.method.label, "data": record.data.name, "seed": record.seed}.items():
        client.log_param(tracked, key, value)

    def write(round: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        for name, value in numbers.items():
            client.log_metric(tracked, re.sub(r"[^\w./ :-]", "_", name), value, now, round)

    try:
        yield write
    finally:
        client.set_terminated(tracked)


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


def check_trackers(names: Sequence[str]) -> None:
    """An error where a tracker's package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise FedvlmError(f'log={name} needs {name}; install it with `pip install "fedvlm[tracking]"`')


@contextlib.contextmanager
def open_trackers(names: Sequence[str], run: RunFolder) -> Iterator[Callable[[RoundRecord], None]]:
    """A function that writes a round's record to these trackers."""
    check_trackers(names)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(TRACKERS[name](run)) for name in names]

        def write(record: RoundRecord) -> None:
            for one in writers:
                one(record["round"], numbers(record))

        yield write


def numbers(record: RoundRecord) -> dict[str, float]:
    """The record's numbers by name, nested ones as a path: P, loss, shared/test, metrics/ece/personal/test."""
    found: dict[str, float] = {}

    def collect(entry: Mapping[str, object], path: str) -> None:
        for key, value in entry.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and (path or key != "round"):
                found[path + key] = float(value)
            elif isinstance(value, dict) and (path or key in NESTED):
                collect(value, f"{path}{key}/")

    collect(record, "")
    return found
