"""What a GPU changes: rows that stay there, bfloat16, fused steps. Tried on the CPU by its other name, cpu:0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import example, same, small_adapter
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedvlm.config.config import resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.descent import Optimiser, OptimiserSettings
from fedvlm.data.pool import Pools
from fedvlm.engines import stacked
from fedvlm.engines.device_rows import DeviceRows
from fedvlm.engines.rows import Rows
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.parts.adapters.network import Norm
from fedvlm.parts.merge.mean import Mean
from fedvlm.rounds.guard import Guard
from fedvlm.rounds.method import Method
from fedvlm.system.devices import ON_CPU, Places, visible
from fedvlm.training import processes
from fedvlm.training.folder import STATE, RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.train import train

NEWCOMER = {"w": torch.zeros(3), "b": torch.full((), 7.0)}
DEVICE = torch.device("cpu:0")


def rows_of(value: float, clients: int = 1):
    return {"w": torch.full((clients, 3), value), "b": torch.full((clients,), value)}


@pytest.mark.parametrize("room", [1 << 20, 20, 0])
def test_rows_on_a_device_are_those_on_disk(tmp_path, room):
    """With room for all rows, for one, and for none: a round reads what was written before it, as from the file."""
    disk = Rows(NEWCOMER, 3, tmp_path / "rows.bin")
    held = DeviceRows(disk, NEWCOMER, DEVICE, room)
    same(held.read(np.array([0, 1]), 0), {"w": torch.zeros(2, 3), "b": torch.full((2,), 7.0)})
    for round in (1, 2):
        for i in (0, 1):
            held.write(np.array([i]), rows_of(10.0 * round + i), round)
    assert len(held.held) == min(2, room // 16)
    for upto in (1, 2):
        assert held.read(np.array([0, 1, 2]), upto)["b"].tolist() == [10.0 * upto, 10.0 * upto + 1, 7]
    held.finish_writing()
    assert disk.read(np.array([1]), 2)["b"].tolist() == [21]
    assert held.release() == (room > 0) and not held.held
    assert held.read(np.array([1]), 2)["b"].tolist() == [21]


def test_a_row_that_another_process_trained_since_is_read_from_disk(tmp_path):
    one, other = (
        DeviceRows(Rows(NEWCOMER, 3, tmp_path / "rows.bin", several=True), NEWCOMER, DEVICE, 1 << 20) for _ in range(2)
    )
    for round, held in enumerate((one, other), 1):
        held.write(np.array([2]), rows_of(float(round)), round)
        held.finish_writing()
    assert one.read(np.array([2]), 1)["b"].tolist() == [1]
    assert one.read(np.array([2]), 2)["b"].tolist() == [2]


def test_a_disk_that_is_full_is_told_at_the_end_of_the_round(monkeypatch):
    held = DeviceRows(Rows(NEWCOMER, 2), NEWCOMER, DEVICE, 1 << 20)

    def full(*_: object) -> None:
        raise FedvlmError("no space left")

    monkeypatch.setattr(held.rows, "write", full)
    held.write(np.array([0]), rows_of(1.0), 1)
    with pytest.raises(FedvlmError, match="no space"):
        held.finish_writing()


def test_memory_that_is_full_first_costs_the_rows_there(double, monkeypatch):
    task, data = example("linear")
    method = Method.build(small_adapter("linear"), registry.find("local", "ditto")(batch=4), Mean(), task, 5)
    engine = Stacked(method, data, 2, device="cpu:0")
    state = method.round(method.init(6), Cohort(engine, np.arange(5), 1))
    assert isinstance(engine.rows, DeviceRows) and len(engine.rows.held) == 5
    engine.narrow(torch.OutOfMemoryError())
    assert not engine.rows.held and engine.chunk == 2
    engine.narrow(torch.OutOfMemoryError())
    assert engine.chunk == 1
    assert len(Cohort(engine, np.arange(6), 1).ask("score", state.message()).ids) == 6


class Mixed(Exception):
    pass


class Apart(TorchFunctionMode):
    """cpu:0 as a device of its own: an operation on tensors of both is an error, as with a GPU. Results of operations that
    torch does not show here (gradients) may be mixed with either."""

    FIRST = ("__getitem__", "__setitem__", "index_select", "gather", "copy_")  # where the first one is counts
    NEW = ("zeros", "ones", "empty", "full", "arange", "randn", "tensor", "eye", "from_numpy", "cpu")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__" and getattr(func.__self__, "__name__", "") == "device":
            return getattr(args[0], "place", None) or func(*args)
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor) and a.dim()]
        places = {a.place for a in (given[:1] if name in self.FIRST else given) if hasattr(a, "place")}
        named = kwargs.get("device")
        if name == "to":
            named = next((a for a in (*args[1:], named) if isinstance(a, str | torch.device)), None)
        if named is not None or name in self.NEW:
            places = {torch.device(named or "cpu")}
        if len(places) > 1 or (name == "numpy" and places == {DEVICE}):
            raise Mixed(f"{name}: {places}")
        found = func(*args, **kwargs)
        if found is not None and places:
            for one in (o for o in tree_leaves(found) if isinstance(o, torch.Tensor)):
                if any(one is a and getattr(a, "place", None) not in places for a in given):
                    found = one = one.view_as(one)  # `to` gave back what it got
                one.place = next(iter(places))
        return found


@pytest.mark.parametrize("adapter", ["linear", "unet"])
def test_nothing_on_a_gpu_meets_what_is_not(adapter):
    """Two rounds of the mean with personal copies, gaps and updates that are cut short, scores, and the final outputs."""
    task, data = example(adapter)
    local = registry.find("local", "sgd")(batch=4, keep=True, momentum=0.9)
    method = Method.build(small_adapter(adapter), local, Mean(gaps=True, cosine=True), task, 5)
    with Apart():
        engine = Stacked(method, data, 2, device="cpu:0")
        guard = Guard(method, tuple("abcdef"), np.diff(data.bounds, axis=1), data.extras, 1.01, lambda text: None)
        state = engine.placed(method.init(6))
        for round in (1, 2):
            state = method.round(state, Cohort(engine, np.arange(5), round, guard=guard))
            assert {v.place for v in state.shared.values()} == {DEVICE} and guard.end_round(round)["bounded"]
            Cohort(engine, np.arange(6), round, guard=guard).ask("score", state.message())
        assert {v.device.type for v in engine.outputs(state.message(), 2).values()} == {"cpu"}
        with pytest.raises(Mixed):
            next(iter(state.shared.values())) + torch.ones(1)


def test_where_the_merge_computes():
    """The plain mean works on a GPU; a merge that derives from it, noise and masks have their own ways."""
    task, data = example("linear")
    build = registry.find("local", "scaffold")(), registry.find("merge", "scaffold")()
    mean = Method.build(small_adapter("linear"), registry.find("local", "sgd")(), Mean(), task, 5)
    other = Method.build(small_adapter("linear"), *build, task, 5)
    assert mean.merges_anywhere and not other.merges_anywhere
    engine = Stacked(mean, data, 2, device="cpu:0")
    same(engine.placed(mean.init(6)).shared, mean.init(6).shared)


def test_a_state_is_stored_without_its_empty_copy(images, tmp_path):
    """With keep=true a new client's row is a model of zeros; a folder that still holds one is read as well."""
    setup = resolve("fedclip", {"data": str(images), "rounds": 1, "keep": True})
    run = train(PlannedRun(setup, Pools().load(setup), tmp_path))
    stored = load_file(tmp_path / STATE)
    copies = [k for k in stored if k.startswith("private/personal.")]
    assert copies == ["private/personal.started"]
    state, round = RunFolder(tmp_path).load()
    assert {k.removeprefix("personal.") for k in state.private} == {"started", *state.shared}
    assert not any(v.any() for v in state.private.values())
    flat = {f"{kind}/{k}": v for kind, params in state._asdict().items() for k, v in params.items()}
    save_file(flat, tmp_path / STATE, {"saved": f"{round} {run._checksum(flat, round)}"})
    again, _ = RunFolder(tmp_path).load()
    same(again.private, state.private)


@pytest.mark.parametrize("adapter", ["unet", "resnet", "alexnet", "tower", "both_towers"])
def test_half_precision_is_near_full(adapter):
    """bfloat16 has 8 bits: what comes out is float32 and nearly the same, and parameters stay float32."""
    task, data = example(adapter)
    found = {}
    for precision in ("full", "half"):
        kind = small_adapter(adapter, precision=precision)
        method = Method.build(kind, registry.find("local", "sgd")(batch=4, lr=0.01, momentum=0.9), Mean(), task, 5)
        engine = Stacked(method, data, 1)
        found[precision] = Cohort(engine, np.arange(5), 1).ask("train", method.init(6).message())
    full, half = found["full"], found["half"]
    assert all(v.dtype == torch.float32 for v in half.shared.values())
    assert not all(torch.equal(half.shared[k], full.shared[k]) for k in full.shared)
    moved = {k: full.shared[k] - method.initial[k] for k in full.shared}
    apart = {k: half.shared[k] - full.shared[k] for k in full.shared}
    norm = [sum(v.square().sum() for v in each.values()).sqrt() for each in (apart, moved)]
    assert norm[0] < 0.25 * norm[1]
    torch.testing.assert_close(half.values["loss"], full.values["loss"], rtol=0.02, atol=0.02)


def test_a_norm_of_bfloat16_computes_in_float32():
    """A variance as a difference of moments loses all its digits in bfloat16."""
    norm, x = Norm(4), (100 + torch.randn(6, 4, 5, 5)).to(torch.bfloat16)
    real = torch.full((6,), 1 / 6)
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x, real)
    expected = norm(x.float(), real)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_fused_step_of_sgd_is_the_plain_one(momentum, weight_decay, double):
    """Also where clients drop out, and after their momentum began."""
    settings, draw = OptimiserSettings(momentum=momentum, weight_decay=weight_decay), torch.Generator().manual_seed(0)
    ours, plain = ({k: torch.ones(3, 5) for k in "ab"} for _ in range(2))
    fused, loop = Optimiser(settings, ours), Optimiser(settings, plain)
    for active in (3, 3, 2):
        gradients = [torch.randn(active, 5, generator=draw) for _ in "ab"]
        loop.step(active, gradients, 0.1)
        fused.steps += 1
        slots = [[s[:active] for s in slot] for slot in fused.slots]
        fused._sgd_fused([v[:active] for v in fused.values], gradients, slots, 0.1)
        for k in "ab":
            torch.testing.assert_close(ours[k], plain[k], rtol=1e-12, atol=1e-12)


def test_a_large_gpu_scores_more_at_once(monkeypatch):
    from fedvlm.rounds.steps.predict import examples_at_once
    from fedvlm.system import devices

    task, data = example("unet")
    model = Method.build(small_adapter("unet"), registry.find("local", "sgd")(), Mean(), task, 5).model
    assert examples_at_once(model, data.x) == 8
    monkeypatch.setattr(devices, "memory", lambda device: 139 << 30)
    assert examples_at_once(model, data.x) == 64
    assert stacked.max_clients(replace(model.adapter), "cuda") == 8


def test_a_large_network_trains_one_client_at_a_time_on_a_gpu(monkeypatch):
    """Others beside it would add their activations, and no speed: a network computes its clients in turn."""
    from fedvlm.system import devices

    monkeypatch.setattr(devices, "memory", lambda device: 139 << 30)

    def at_once(adapter: str, megabytes: int) -> int:
        task, _ = example(adapter)
        method = Method.build(small_adapter(adapter), registry.find("local", "sgd")(), Mean(), task, 5)
        weights = torch.zeros(()).expand(megabytes << 18)  # that take no memory
        return stacked.stack(replace(method, initial={"w": weights}, newcomer={}), "cuda")

    assert [at_once("alexnet", size) for size in (30, 100, 340)] == [8, 2, 1]
    assert at_once("prompt", 340) == 3


def test_runs_are_spread_over_gpus(monkeypatch):
    """Three GPUs: one run on each at first; two more when it is known that a run needs 0.3 of the memory, no more than
    the cores. Runs that need no GPU take the cores that are left."""
    monkeypatch.setattr("fedvlm.system.devices.cores", lambda: 8)
    places = Places(3)
    assert [places.take(True) for _ in range(4)] == [0, 1, 2, None]
    assert places.take(False) == ON_CPU
    places.learn(0.0)
    assert places.take(True) is None
    places.learn(0.3)
    assert [places.take(True) for _ in range(5)] == [0, 1, 2, 0, None]
    places.leave(1)
    assert places.take(True) == 1
    places.learn(0.95)
    places.leave(2)
    assert places.take(True) is None
    assert [Places(2, at_once=3).take(True) for _ in range(2)] == [0, 0]
    asked = Places(2, at_once=3)
    assert [asked.take(True) for _ in range(4)] == [0, 1, 0, None]


@pytest.mark.parametrize(
    ("given", "count", "expected"),
    [
        ("", 2, ("0", "1")),
        ("3,5", 2, ("3", "5")),
        ("GPU-a, GPU-b", 2, ("GPU-a", "GPU-b")),
        ("0", 0, ()),
        ("0,9", 1, ("0",)),
    ],
)
def test_gpus_are_called_as_the_user_calls_them(given, count, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert visible() == expected


def test_each_process_sees_its_own_gpu(monkeypatch, images, tmp_path):
    """Two runs and two GPUs that are not there, so that both train on the CPU: what their processes would see."""
    seen: list[str] = []

    class Child(processes._Process):
        def __init__(self, place: int, gpu: str):
            seen.append(gpu)
            super().__init__(place, gpu)

    monkeypatch.setattr(processes, "_Process", Child)
    monkeypatch.setattr(processes, "visible", lambda: ("4", "7"))
    monkeypatch.setattr(processes, "on_gpu", lambda job: True)
    setups = [resolve("fedclip", {"data": str(images), "rounds": 0, "seed": s}) for s in (1, 2)]
    jobs = [PlannedRun(setup, Pools().load(setup), tmp_path / str(setup.config.seed)) for setup in setups]
    assert all(run.done for run in processes.run_all(jobs, 0, lambda i, record, error: None))
    assert seen == ["4", "7"]
