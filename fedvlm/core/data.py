"""The examples of a few clients, side by side, in batches of equal length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.seeds import keys, shuffled
from fedvlm.core.state import aligned

SPLITS = ("train", "val", "test")
SCORED = SPLITS[1:]  # what models are scored on: nothing is chosen or reported by training images
WINDOW = 64  # steps planned ahead: one large client among many small ones must not cost memory for all


class Batch(NamedTuple):
    """A step's examples of a few clients, side by side."""

    x: Tensor  # [clients, examples, ...]
    y: Tensor  # [clients, examples, ...]
    weight: Tensor  # [clients, examples]: 1/(real examples), 0 for padding
    step: int = 0  # which of a client's batches this is, the same for all clients side by side
    drawn: tuple[int, ...] = ()  # seed and round: with the step, what random numbers of this batch depend on

    def mean(self, each: Tensor) -> Tensor:
        """The mean over real examples, one number per client."""
        return (each * self.weight).sum(-1)


class Extra(NamedTuple):
    """Further examples to evaluate on, carried by engines without knowing what they are for."""

    x: Tensor
    y: Tensor | None = None
    # x[i] belongs to example i of the pool, and so to its client; else everybody may read all of it
    aligned: bool = False

    def to(self, device: torch.device | str) -> Extra:
        return self._replace(x=self.x.to(device), y=None if self.y is None else self.y.to(device))


@dataclass(frozen=True)
class Data:
    """The examples of a few clients, side by side, in one round of a run.

    A client's rows are contiguous in the pool: train, then val, then test; `bounds` [clients, 4] holds the offsets.
    """

    x: Tensor
    y: Tensor
    bounds: np.ndarray
    ids: np.ndarray
    seed: int = 0
    round: int = 0
    rounds: int = 1
    extras: dict[str, Extra] = field(default_factory=dict)  # "outsiders", "corrupted", "base", "novel", …

    def __len__(self) -> int:
        return len(self.ids)

    def counts(self, split: str) -> np.ndarray:
        at = SPLITS.index(split)
        return self.bounds[:, at + 1] - self.bounds[:, at]  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of losses and weights: that of x where it is float32 or float64 (not pixels, characters,
        float16)."""
        return self.x.dtype if self.x.dtype in (torch.float32, torch.float64) else torch.get_default_dtype()

    def tensor(self, values: np.ndarray) -> Tensor:
        """A tensor of these values on the device of the examples."""
        return torch.from_numpy(values).to(self.x.device)

    def sizes(self) -> Tensor:
        return self.tensor(self.counts("train")).to(self.dtype)

    def class_counts(self, classes: int) -> Tensor:
        """Training examples by client and class, [clients, classes]."""
        lengths = self.counts("train")
        owner = np.repeat(np.arange(len(self)), lengths)
        cells = self.tensor(owner * classes) + self.y[self.tensor(stretches(self.bounds[:, 0], lengths))]
        return torch.bincount(cells, minlength=len(self) * classes).view(len(self), classes).to(self.dtype)

    def batches(self, size: int, epochs: int = 1) -> Iterator[Batch]:
        """Shuffled training batches. Clients must be ordered largest first: those still training are then always a prefix,
        and a client that is done is left out (a zero gradient would still change its momentum)."""
        counts = self.counts("train")
        if (np.diff(counts) > 0).any():
            raise ValueError("clients must be ordered by training examples, largest first")
        orders = [shuffled(keys(self.seed, self.round, e, clients=self.ids), counts) for e in range(epochs)]
        order = np.stack(orders) + np.repeat(self.bounds[:, 0], counts)  # [epochs, examples]
        starts = np.cumsum(counts) - counts
        steps = -(-counts // size)  # a client starts its next epoch without waiting for larger ones
        total, lane = int(steps.max(initial=0)) * epochs, np.arange(size)
        for low in range(
            0, total, WINDOW
        ):  # planned [step, client, lane] at once, for clients that still train at `low`
            at = np.arange(low, min(low + WINDOW, total))[:, None]
            n = int((steps * epochs > low).sum())
            epoch, first = np.divmod(at, steps[:n])
            left = counts[:n] - first * size
            epoch = np.minimum(epoch, epochs - 1)  # a client past its last step is removed below
            where = (starts[:n] + first * size)[..., None] + np.minimum(lane, left[..., None] - 1)
            rows = self.tensor(order[epoch[..., None], where])
            real = (lane < left[..., None]) / np.minimum(left, size)[..., None]
            labels = self.y[rows] if self.y.dim() == 1 else rows  # masks are too large to be copied ahead of time
            plan = (rows, labels, self.tensor(real).to(self.dtype))
            for step, active, *parts in zip(
                at[:, 0].tolist(), (at < steps[:n] * epochs).sum(1).tolist(), *plan, strict=True
            ):
                which, label, weight = parts if active == n else (part[:active] for part in parts)
                y = label if self.y.dim() == 1 else self.y[label]
                yield Batch(self.take(which), y, weight, step, (self.seed, self.round))

    def take(self, rows: Tensor) -> Tensor:
        """x[rows] in a quarter of the time on a CPU (benchmarks/steps.py)."""
        return self.x.index_select(0, rows.reshape(-1)).view(*rows.shape, *self.x.shape[1:])

    def part(self, low: int, high: int) -> Tensor:
        """The examples of these rows."""
        return aligned(self.x[low:high])

    def blocks(self, limit: int = 2048) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        """Every example once, for evaluating one model on all clients: x [1, m, ...], y [m], and the cell of each example,
        3 × (position of its client) + split. 2,048 examples at a time keep a hidden layer in the CPU cache."""
        place = np.argsort(self.bounds[:, 0], kind="stable")
        bounds = self.bounds[place]
        lengths = np.diff(bounds, axis=1)
        cells = np.repeat((3 * place[:, None] + np.arange(3)).reshape(-1), lengths.reshape(-1))
        together = bool((bounds[1:, 0] == bounds[:-1, 3]).all())  # contiguous in the pool: no copy needed
        rows = None if together else stretches(bounds[:, 0], lengths.sum(1))
        for first in range(0, len(cells), limit):
            cell = cells[first : first + limit]
            low = int(bounds[0, 0]) + first
            part = slice(low, low + len(cell)) if rows is None else self.tensor(rows[first : first + len(cell)])
            yield aligned(self.x[part])[None], self.y[part], cell

    def lanes(self, limit: int = 4096) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        """Every example once, for evaluating one model per client: x [clients, m, ...], y [clients, m], cells (−1 is
        padding). Yields prefixes of the clients, so the order largest first wastes least."""
        lengths = np.diff(self.bounds, axis=1)
        total = lengths.sum(1)
        width = int(max(min(16, limit), limit // max(1, len(self))))
        width = min(width, max(1, int(total.max(initial=0))))  # a single small client is not padded to a whole block
        lane = np.arange(width)
        split = np.repeat(np.tile(np.arange(3), len(self)), lengths.reshape(-1))
        starts = np.concatenate([[0], np.cumsum(total)])[:-1]
        for first in range(0, int(total.max(initial=0)), width):
            active = int(np.flatnonzero(total > first)[-1]) + 1
            left = total[:active] - first
            real = lane < left[:, None]
            at = first + np.clip(lane, 0, np.maximum(left[:, None] - 1, -first))
            rows = self.tensor(np.where(real, self.bounds[:active, 0, None] + at, self.bounds[0, 0]))
            where = np.minimum(starts[:active, None] + at, len(split) - 1)
            cells = np.where(real, 3 * np.arange(active)[:, None] + split[where], -1)
            yield self.take(rows), self.y[rows], cells


def stretches(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers start … start + length − 1 of each stretch, one after the other."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))
