"""TensorBoard: event files in RUN/tensorboard; see them with `tensorboard --logdir RUNS`."""

from __future__ import annotations

from collections.abc import Mapping

from fedvlm.training.folder import RunFolder


class Events:
    def __init__(self, run: RunFolder):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.folder / "tensorboard"))

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, round)

    def close(self) -> None:
        self.writer.close()


def open(run: RunFolder) -> Events:
    return Events(run)
