"""Values out of range are refused before anything runs, by the command line, recipes, Python and recorded runs alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from helpers import numbered

from fedvlm import api
from fedvlm.cli import main
from fedvlm.config import catalogue
from fedvlm.config.config import Setup, resolve
from fedvlm.config.keys import Key, keys_of
from fedvlm.core.ranges import Range
from fedvlm.core.state import with_client_axis
from fedvlm.data.source import Item
from fedvlm.errors import FedvlmError
from fedvlm.training.planning import single_runs

KNOWN = catalogue.load()
PARTS = {kind: known for kind, known in KNOWN.parts.items() if kind != "engine"}
KEYS = [*KNOWN.run, *(k for known in PARTS.values() for part in known.values() for k in part.keys)]
NUMERIC = [k for k in KEYS if k.type in ("int", "float") and not k.choices]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("chunk=-1", "expected a whole number of at least 0"),
        ("timeout=inf", "expected a finite number above 0 and at most 1000000"),
        ("timeout=nan", "expected a number above 0 and at most 1000000"),
        ("timeout=-1", "expected a number above 0 and at most 1000000"),
        ("timeout=0", "expected a number above 0 and at most 1000000"),
        ("grace=-1", "expected a number between 0 and 1000000"),
        ("bound=-1", "expected a number of at least 0"),
        ("bound=nan", "expected a number of at least 0"),
        ("evaluate_every=0", "expected a whole number of at least 1"),
        ("jobs=-1", "expected a whole number of at least 0"),
        ("threads=0", "expected a whole number between 1 and 1024"),
        ("threads=99999", "expected a whole number between 1 and 1024"),
        ("rounds=-1", "expected a whole number of at least 0"),
        ("rounds=1e30", "expected a whole number of at least 0"),
        ("participation=0", "expected a number above 0 and at most 1"),
        ("participation=2", "expected a number above 0 and at most 1"),
        ("dropout=2", "expected a number between 0 and 1"),
        ("quorum=5", "expected a number between 0 and 1"),
        ("alpha=0", "expected a number of at least 1e-09"),
        ("split=60,-20,60", "expected a number between 0 and 1000000"),
        ("split=1,1", "expected 3 values, such as 60,20,20"),
        ("shots=-1", "expected a whole number of at least 0"),
        ("clients=0", "expected a whole number between 1 and 1000000"),
        ("clients=1000000000000", "expected a whole number between 1 and 1000000"),
        ("per_client=-1", "expected a whole number of at least 0"),
        ("stride=0", "expected a whole number of at least 1"),
        ("corrupt=-1", "expected a whole number between 0 and 75"),
        ("corrupt=76", "expected a whole number between 0 and 75"),
        ("domains=-1", "expected a whole number of at least 0"),
        ("seed=-1", "expected a whole number between 0 and 9223372036854775807"),
        ("seed=9223372036854775808", "expected a whole number between 0 and 9223372036854775807"),
        ("seed=" + "9" * 5000, "expected a whole number between 0 and 9223372036854775807"),
        ("seeds=1,-1", "expected a whole number between 0 and 9223372036854775807"),
        ("lr=nan", "expected a number above 0"),
        ("lr=inf", "expected a finite number above 0"),
        ("lr=-1", "expected a number above 0"),
        ("lr=0", "expected a number above 0"),
        ("momentum=2", "expected a number between 0 and 1"),
        ("weight_decay=-1", "expected a number of at least 0"),
        ("betas=0.9,1", "expected a number of at least 0 and below 1"),
        ("eps=0", "expected a number above 0"),
        ("batch=0", "expected a whole number between 1 and 1000000"),
        ("epochs=0", "expected a whole number of at least 1"),
        ("data=a\0b", "expected text without null characters"),
    ],
)
def test_a_key_out_of_range_is_refused_with_its_range(word, says):
    key, _, value = word.partition("=")
    with pytest.raises(FedvlmError, match=rf"^{key}=.*: {says}$"):
        resolve("fedavg", {key: value})


@pytest.mark.parametrize(
    ("method", "word"),
    [
        ("perfedavg", "steps=0"), ("perfedavg", "inner=-1"), ("fedprox", "mu=-1"), ("ditto", "strength=-1"),
        ("fedrep", "private_epochs=-1"), ("fft-gp", "every=0"), ("ga", "step=-1"), ("afl", "weight_lr=-1"),
        ("q-ffl", "step_size=0"), ("q-ffl", "q=-1"), ("fedot", "blocks=0"), ("promptfl", "context=0"),
        ("promptfolio", "share=2"), ("fedotp", "mass=1.5"), ("fedotp", "entropy=0"), ("fedlocoop", "rank=-1"),
        ("fedgallop", "drop=2"), ("fedlapt", "count=0"), ("fedlora", "rank=0"), ("vpt", "tokens=0"),
        ("fedmaple", "depth=0"), ("pfedmma", "size=0"), ("pfeddc", "tokens=0"), ("fedpgp", "bottleneck=0"),
        ("focoop", "fusion=1.5"), ("focoop", "temperature=0"), ("focoop", "retain=2"), ("feddtl", "actions=0"),
        ("feddtl", "tolerance=-1"), ("feddtl", "upload_share=0"), ("feddtl", "text_batch=0"),
    ],
)  # fmt: skip
def test_a_setting_of_a_part_out_of_range_is_refused(method, word):
    key, _, value = word.partition("=")
    with pytest.raises(FedvlmError, match=rf"^{word}: expected a (whole )?number (of at least|above|between) "):
        resolve(method, {key: value})


def test_merges_that_no_recipe_uses():
    for merge, word in (("krum", "best=0"), ("krum", "byzantine=-1"), ("trimmed", "trim=0.6")):
        with pytest.raises(FedvlmError, match=word):
            resolve("fedavg", {"merge": merge} | dict([word.split("=")]))
    with pytest.raises(FedvlmError, match=r"ece\.bins=0: expected a whole number of at least 1"):
        resolve("fedavg", {"metrics": "ece", "ece.bins": "0"})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", math.nan, math.inf, np.float32("nan"), torch.tensor(math.nan)])
def test_no_number_is_infinite_or_undefined(value):
    assert len(NUMERIC) > 100
    for key in NUMERIC:
        with pytest.raises(FedvlmError, match=f"{key.name}=.*expected"):
            key.coerce([value] * max(1, abs(key.length)) if key.length else value)


def test_every_number_has_a_range_and_keeps_to_it():
    unlimited = {"scale"}  # a factor of either sign
    for key in NUMERIC:
        if key.name in unlimited:
            continue
        assert key.range.low is not None, key.name
        wrong = [key.range.low - 1] + ([key.range.low] if key.range.above else [])
        wrong += [key.range.high + 1] if key.range.high is not None else []
        for value in wrong:
            with pytest.raises(FedvlmError):
                key._replace(length=0).coerce(value)
        inside = key.range.low + (1e-3 if key.range.above else 0)
        assert key._replace(length=0).coerce(inside) == inside


def test_recipes_python_and_records_are_checked_alike(tmp_path, capsys):
    (tmp_path / "my.yaml").write_text("like: fedavg\nsettings: {momentum: 2}\n")
    assert main(["run", str(tmp_path / "my.yaml")]) == 1
    assert "recipe my.yaml: momentum=2: expected a number between 0 and 1" in capsys.readouterr().err
    with pytest.raises(FedvlmError, match=r"momentum=2\.0: expected a number between 0 and 1"):
        api.run("fedavg", momentum=2.0)
    setup = resolve("fedavg", {})
    record: Any = SimpleNamespace(method=setup.method, config=setup.settings(), given={}, metrics=[], **setup.parts)
    assert Setup.from_record(record, tmp_path) == replace(setup, origins={})
    for name, value in (("lr", -1), ("momentum", "a lot"), ("lrr", 1), ("evaluate_every", 0)):
        wrong = SimpleNamespace(**vars(record))
        if name == "evaluate_every":
            wrong.config = record.config | {name: value}
        else:
            wrong.local = replace(record.local, settings=record.local.settings | {name: value})
        with pytest.raises(FedvlmError, match=rf"run\.json: .*{name}"):
            Setup.from_record(wrong, tmp_path)


def test_large_seeds_are_kept_to_the_last_digit():
    for seed in (2**63 - 1, str(2**63 - 1), np.int64(2**63 - 1)):
        assert resolve("fedavg", {"seed": seed}).config.seed == 2**63 - 1
    assert (
        resolve("fedavg", {"rounds": "1e3"}).config.rounds
        == resolve("fedavg", {"rounds": 1000.0}).config.rounds
        == 1000
    )


def test_parts_of_ones_own_declare_ranges_alike():
    @dataclass
    class Mine:
        few: Annotated[int, Range(2, 4)] = 2  # how many
        free: float = 0.0

    few, free = keys_of(Mine)
    assert few == Key("few", "int", 2, "how many", (), 0, Range(2, 4)) and free.range == Range()
    assert [free.coerce(-1), few.coerce(4)] == [-1.0, 4]
    with pytest.raises(FedvlmError, match="few=5: expected a whole number between 2 and 4"):
        few.coerce(5)


@pytest.mark.parametrize(
    ("levels", "norm", "fits"), [(2, "instance", True), (3, "instance", False), (3, "batch", True), (4, "batch", False)]
)
def test_a_network_too_deep_for_its_images_is_refused_before_training(levels, norm, fits):
    pool = replace(numbered([Item(f"{k}.png", "site", "a", "") for k in range(2)]), x=torch.zeros(2, 3, 8, 8))
    setup = resolve("fedavg", {"on": "unet", "backbone": "pixels:8", "levels": levels, "norm": norm})
    if fits:
        assert single_runs(setup, pool)
        params = with_client_axis(setup.adapter.init(pool.task, 1))
        assert setup.adapter.logits(pool.task, params, pool.x[None, :1]).isfinite().all()
        return
    says = f"backbone=pixels:8 does not go with adapter=unet: levels={levels} halvings of 8 pixels"
    with pytest.raises(FedvlmError, match=says):
        single_runs(setup, pool)
