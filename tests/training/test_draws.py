"""No random number serves two purposes: the key of every draw in small runs, none of which may come twice."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers import build, example, play, published, small_adapter, small_setup

import fedvlm
from fedvlm.config.config import Config
from fedvlm.core import seeds
from fedvlm.data.partition import iid
from fedvlm.data.pool import Pools
from fedvlm.privacy import noise
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.sampling import sampled

pytest.importorskip("cryptography")
secure_keys = importlib.import_module("fedvlm.privacy.secure.keys")

Drawn = Counter[tuple[object, ...]]
COHORT = 31  # the purpose of the draw that says which clients a round asks


@pytest.fixture(scope="module")
def modules() -> list[ModuleType]:
    """Those that can draw, imported beforehand: one that is first imported while the fixture below acts would keep it."""
    root, found = Path(fedvlm.__file__).parent, []
    for path in sorted(root.rglob("*.py")):
        if re.search(r"^ *(from|import) .*\b(seeds|noise|keys)\b", path.read_text("utf-8"), re.MULTILINE):
            with contextlib.suppress(ImportError):  # of an optional library
                found.append(importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts)))
    return [*found, seeds, noise, secure_keys]


@pytest.fixture
def drawn(monkeypatch, modules) -> Drawn:
    """How often each key is drawn from, wherever that is: every generator and order goes through `seeds.keys`, normal noise
    through `noise.uniform`, every mask through `add_mask`, which adds it at one end and subtracts it at the other."""
    found = Drawn()

    def spy(on: Callable[..., object], keys_of: Callable[..., list[tuple[object, ...]]]) -> None:
        def noted(*given: object, **named: object) -> object:
            found.update(keys_of(*given, **named))
            return on(*given, **named)

        for module in modules:
            for name in [name for name, value in vars(module).items() if value is on]:
                monkeypatch.setattr(module, name, noted)

    def of_clients(*parts: int, clients: np.ndarray) -> list[tuple[object, ...]]:
        return [(*parts, int(client)) for client in clients]

    spy(seeds.keys, of_clients)
    spy(noise.uniform, lambda *key, count: [key])
    spy(secure_keys.add_mask, lambda vector, key, subtract=False: [(key, subtract)])
    return found


CLIENT = {"dp": "client", "noise_multiplier": 1.0}
RUNS = {  # a method, its keys, and the purposes of draws that must be among those recorded
    "plain": ("fedot", {"participation": 0.5, "epochs": 2}, ()),
    "noise of clients": ("fedot", CLIENT | {"noise_at": "client"}, ("client",)),
    "noise of the server": ("fedot", CLIENT | {"clip_quantile": 0.5}, ("server", "count")),
    "noise of steps": ("fedot", {"dp": "example", "noise_multiplier": 1.0}, ("batch", "example")),
    "secure": ("fedavg", CLIENT | {"clients": 3, "secure": True, "engine": "loopback"}, ("server", True, False)),
}


@pytest.mark.parametrize("mode", RUNS)
def test_no_key_is_drawn_from_twice(drawn, bytes_only, images, tmp_path, mode):
    """Two rounds, two clients (three, where masks need them), two steps."""
    method, keys, purposes = RUNS[mode]
    small = {"partition": "iid", "clients": 2, "unseen": "", "rounds": 2, "batch": 30, "engine": "serial"}
    setup = small_setup(images, method, **small | keys)
    pool = Pools().load(setup)
    drawn.clear()  # parts are tried out before the run's seed is known
    train.train(PlannedRun(setup, pool, tmp_path / "run"))
    cohorts = [key for key in drawn if key[:2] == (setup.config.seed, COHORT)]
    assert len(cohorts) == 2 and {key[1] for key in drawn} > set(purposes)
    if setup.config.dp != "none":  # the account asks in advance who will be asked
        drawn.subtract(key for key in cohorts if drawn[key] == 2)
    assert {key: times for key, times in drawn.items() if times != 1} == {}


def covering() -> list[tuple[str, str, str]]:
    """Published combinations in which every part of a recipe is once; none that draws nothing or does not train."""
    seen: set[tuple[int, str]] = set()
    found = []
    for names in sorted(published()):
        new = set(enumerate(names)) - seen
        if new and names[0] != "none":
            found.append(names)
            seen |= new
    return found


# A personal copy is trained on batches of the same order as the shared model (fedrep's two parts, ditto's and apfl's two
# models, the steps by which perfedavg adapts), and memory remembers the same images in every round
TWICE_ON_PURPOSE = {"apfl", "ditto", "fedrep", "perfedavg", "memory"}
# Clients side by side have the same draw in a step, so that they are one computation
SAME_FOR_CLIENTS = {"gallop", "lapt", "proda"}


@pytest.mark.parametrize("names", covering(), ids="-".join)
def test_parts_draw_from_no_key_twice(drawn, double, names):
    method = build(*names)
    drawn.clear()
    data = example(small_adapter(names[0]))[1]
    play(method, data, 1, rounds=2)
    again = {key for key, times in drawn.items() if times > 1}
    assert bool(again) == bool(set(names) & (TWICE_ON_PURPOSE | SAME_FOR_CLIENTS)), sorted(again)[:3]
    if set(names) & SAME_FOR_CLIENTS:
        assert {key[:2] for key in again} == {(data.seed, 1), (data.seed, 2)}, sorted(again)[:3]


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_every_round_asks_other_clients(sampling):
    """Half of 400 each time, and a quarter in both of two rounds."""
    config = replace(Config(), participation=0.5, sampling=sampling)
    asked = [set(sampled(config, np.arange(400), round, 7).ids.tolist()) for round in (1, 2, 3)]
    for one, other in itertools.combinations(asked, 2):
        assert len(one) == pytest.approx(200, abs=40) and len(one & other) == pytest.approx(100, abs=35)


def test_every_class_and_split_is_dealt_anew():
    """200 images of each of two classes and splits, to two clients: a position of one says nothing of the others'."""
    labels, part = np.repeat([0, 0, 1, 1], 200), np.repeat([0, 2, 0, 2], 200)
    dealt = iid(labels, part, 2, seed=3).reshape(4, 200)
    assert (dealt.sum(1) == 100).all()
    alike = [(one == other).mean() for one, other in itertools.combinations(dealt, 2)]
    assert alike == pytest.approx([0.5] * 6, abs=0.2)
