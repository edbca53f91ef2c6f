"""Weights & Biases: an offline run in RUN/wandb, to be sent by `wandb sync`; WANDB_MODE=online sends it while it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fedvlm.training.folder import RunFolder


class Tracked:
    def __init__(self, run: RunFolder):
        import wandb

        record = run.record
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedvlm"),
            name=run.name,
            group=record.method.label,
            dir=str(run.folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config={"method": record.method.label, "data": record.data.name, **record.config},
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
            reinit="create_new",
        )

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=round)

    def close(self) -> None:
        self.run.finish()


def open(run: RunFolder) -> Tracked:
    return Tracked(run)
