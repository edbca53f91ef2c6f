"""All clients in this process, a chunk of them side by side."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter
from fedvlm.core.data import Data
from fedvlm.core.state import Answer, Message, Params, Reply, State, nbytes, on_device
from fedvlm.engines.base import Engine, Job, finite
from fedvlm.engines.device_rows import DeviceRows
from fedvlm.engines.rows import Rows, WriteGuard
from fedvlm.errors import FedvlmError
from fedvlm.parts.failures import explained
from fedvlm.rounds import steps
from fedvlm.rounds.method import Method
from fedvlm.system.devices import blocks_at_once, memory

Warn = Callable[[str], None]
CPU = torch.device("cpu")
ROWS_SHARE = 8  # of a GPU's memory, one part in so many may hold private rows
ONE_BY_ONE = 1000  # clients up to which their final outputs are computed one client at a time


class Stacked(Engine):
    """An engine that runs a chunk of clients at a time, in this process."""

    def __init__(
        self,
        method: Method,
        data: Data,
        chunk: int = 0,
        rows: Path | None = None,
        warn: Warn = print,
        device: str = "cpu",
        guard: WriteGuard = contextlib.nullcontext,
        several: bool = False,
        name: Callable[[int], str] = str,
    ):
        """`data` holds every client, at position = id. chunk=0: as many side by side as the measured rule says.
        Client steps run on the device, together with the examples. `guard`, `several`: see Rows. `name`: a client's, for
        messages."""
        self.chunk = chunk or stack(method, device)
        self.rows: Rows | DeviceRows = Rows(method.newcomer, len(data), rows, guard, several)
        self.warn, self.device = warn, torch.device(device)
        if device != "cpu":
            extras = {k: v.to(device) for k, v in data.extras.items()}
            data = replace(data, x=data.x.to(device), y=data.y.to(device), extras=extras)
            method = method.to(self.device)
            room = memory(self.device) // ROWS_SHARE
            self.rows = DeviceRows(self.rows, method.newcomer, self.device, room)
        self.method, self.data, self.name = method, data, name

    @classmethod
    def open(cls, job: Job) -> Engine:
        chunk = job.setup.config.chunk or stack(job.method, job.device)
        if job.setup.config.engine == "stacked":  # asked for by name, not chosen by the rule
            chunk = max(2, chunk)
        return cls.with_chunk(job, chunk)

    @classmethod
    def with_chunk(cls, job: Job, chunk: int) -> Engine:
        if job.setup.config.workers > 1:
            from fedvlm.engines.spread import Spread

            return Spread(job, chunk)
        rows, name = job.folder / "rows.bin", job.federation.names.__getitem__
        return cls(job.method, job.data, chunk, rows, job.log, job.device, name=name)

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        chosen, ids = steps.step_of(step), in_order(ids, self.data, self.chunk)
        home = device_of_params(message.shared)  # replies go where the message comes from: there the merge computes
        message = message.to(self.device)
        method = self.method.for_message(message)
        with explained(f"step {step}, round {round}", *method.parts):
            prepared = chosen.prepare(method, message)
        ragged = chosen.schema(method, self.data.extras).ragged
        last_row = round - 1 if chosen.trains and not exchange else round
        first = 0
        while first < len(ids):
            part = ids[first : first + self.chunk]
            try:
                own = self.rows.read(part, last_row)
                data = self.at(part, round)
                with steps.explained_by_client(step, method, own, message, data, prepared, self.name):
                    answer = chosen.run(method, own, message, data, prepared)
            except torch.OutOfMemoryError as error:
                self.narrow(error)
                continue
            first += len(part)
            answer = answer._replace(values=on_device(answer.values, CPU), shared=on_device(answer.shared, home))
            part, answer = self.finite_only(part, answer, step, round)
            if chosen.trains:
                self.rows.write(part, answer.own, round)
            if ragged:
                yield from one_by_one(part, answer, ragged)
            elif len(part):
                yield Reply(part, answer.values, answer.shared)
        if isinstance(self.rows, DeviceRows):
            self.rows.finish_writing()

    def placed(self, state: State) -> State:
        if self.device == CPU or not self.method.merges_anywhere:
            return state
        return state._replace(shared=on_device(state.shared, self.device))

    def finite_only(self, ids: np.ndarray, answer: Answer, step: str, round: int) -> tuple[np.ndarray, Answer]:
        """The answer without clients that diverged; with privacy nobody is left out for what is in the data."""
        if self.method.privacy and step == "train":
            return ids, answer
        good = np.logical_and.reduce([finite(p, len(ids)) for p in (answer.own, answer.values, answer.shared)])
        if good.all():
            return ids, answer
        names = ", ".join(str(i) for i in ids[~good])
        self.warn(f"round {round}: client {names} diverged (its {step} reply is not finite) and is left out")
        keep = torch.from_numpy(np.flatnonzero(good))
        return ids[good], Answer(*({k: v[keep] for k, v in part.items()} for part in answer))

    def narrow(self, error: Exception) -> None:
        """Fewer clients side by side, after the GPU's memory ran out; a client's result does not depend on the others."""
        if isinstance(self.rows, DeviceRows) and self.rows.release():
            return  # the room of rows that are on disk, too, may be enough
        if self.chunk == 1:
            raise FedvlmError(
                "the GPU's memory does not hold a single client's step; give a smaller batch=, precision=half or device=cpu"
            ) from error
        self.chunk //= 2
        self.warn(f"the GPU's memory is full: from here on {self.chunk} clients side by side (chunk={self.chunk})")

    def at(self, ids: np.ndarray, round: int) -> Data:
        """These clients' data in this round."""
        d = self.data
        return replace(d, bounds=d.bounds[ids], ids=d.ids[ids], round=round)

    @torch.no_grad()
    def outputs(self, message: Message, round: int) -> Params:
        """The models' outputs, with `label`, `client` and `row` (of the pool) of each example. Up to ONE_BY_ONE clients
        are computed one at a time, so that the last bits do not depend on who else is there."""
        found: dict[str, list[Tensor]] = defaultdict(list)
        message = message.to(self.device)
        method = self.method.for_message(message)
        adapter, task = method.adapter, method.task
        shared = adapter.prepare(task, method.shared_model(message), {}) if method.has_shared_model else {}
        tests = self.data.counts("test")
        tested, width = np.flatnonzero(tests), 1 if len(self.data) <= ONE_BY_ONE else self.chunk
        if width > 1:  # clients of similar size waste no padding
            tested = tested[np.argsort(tests[tested], kind="stable")]
        for first in range(0, len(tested), width):
            ids = tested[first : first + width]
            data = self.at(ids, round)
            views = {"shared": shared} if method.has_shared_model else {}
            if method.has_personal_models:
                own = self.rows.read(ids, round)
                views["personal"] = adapter.prepare(task, method.personal_models(own, message, data), shared)
            for rows, real in tests_of(data, max(1, adapter.limits.examples * blocks_at_once(self.device) // len(ids))):
                at, whose = data.tensor(rows), torch.from_numpy(np.nonzero(real)[0])
                keep = torch.from_numpy(real)
                found["label"].append(self.data.y[at].cpu()[keep])
                found["client"].append(torch.from_numpy(data.ids)[whose])
                found["row"].append(torch.from_numpy(rows)[keep])
                for view, params in views.items():
                    block = data.take(at if view == "personal" else at.reshape(1, -1))
                    for name, compute in (("logits", adapter.logits), ("features", adapter.features)):
                        value = compute(task, params, block).cpu()
                        found[f"{view}.{name}"].append(value.reshape(*rows.shape, *value.shape[2:])[keep])
        joined = {k: torch.cat(v).contiguous() for k, v in found.items()}
        if width == 1:
            return joined
        order = torch.argsort(joined["row"])
        return {k: v[order] for k, v in joined.items()}

    def close(self) -> None:
        self.rows.flush()


def in_order(ids: np.ndarray, data: Data, chunk: int) -> np.ndarray:
    """Order clients for chunks: those of similar size finish together (see Data.batches)."""
    ids = np.sort(ids)
    return ids if chunk == 1 else ids[np.argsort(-data.counts("train")[ids], kind="stable")]


def tests_of(data: Data, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows of these clients' test examples, [clients, at most width], and which are real; others are padding."""
    low, counts = data.bounds[:, 2, None], data.counts("test")[:, None]
    for first in range(0, int(counts.max(initial=0)), width):
        at = first + np.arange(min(width, int(counts.max()) - first))
        yield low + np.minimum(at, counts - 1), at < counts


def device_of_params(params: Params) -> torch.device:
    return next((v.device for v in params.values()), CPU)


def one_by_one(ids: np.ndarray, answer: Answer, ragged: list[str]) -> Iterator[Reply]:
    """A reply per client, without the padding of ragged values."""
    for at, i in enumerate(ids):
        values = {k: v[at : at + 1] for k, v in answer.values.items()}
        values |= {k: values[k][:, : int(answer.lengths[k][at])] for k in ragged}
        yield Reply(np.array([i]), values, {k: v[at : at + 1] for k, v in answer.shared.items()})


def stack(method: Method, device: str = "cpu") -> int:
    """How many clients to train side by side: as many as keep their parameters within 4 MiB, near the size of a core's
    cache; a larger chunk gains nothing (benchmarks/speed.py measures it). On a GPU, as many as fit; of networks, which
    compute their clients in turn and gain little, 256 MiB."""
    size = nbytes(method.initial) + nbytes(method.newcomer)
    most = max_clients(method.adapter, device)
    doublings = 20 if device == "cpu" else 26 if method.adapter.limits.clients == 1 else 28
    return int(max(1, min(most, (4 << doublings) // max(1, size))))


def max_clients(adapter: Adapter, device: str) -> int:
    """The adapter's limit: that of a CPU, times the GPU's memory in units of 16 GiB."""
    return adapter.limits.clients * blocks_at_once(torch.device(device))
