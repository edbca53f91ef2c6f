"""A site's own rules, what it tells where counts are withheld, and what it writes down of an update that leaves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedvlm.config.config import Config
from fedvlm.core.data import Data
from fedvlm.core.schema import SIZE, Field, Schema
from fedvlm.core.state import Message
from fedvlm.errors import Refused
from fedvlm.federation.rules import Rules
from fedvlm.federation.wire import Header
from fedvlm.federation.worker import SiteClient, without_sizes
from fedvlm.privacy.mechanism import Privacy


def test_a_site_that_limits_epsilon_takes_part_where_it_adds_the_noise_and_a_target_is_given():
    rules, mine = Rules(epsilon=1.0), {"dp": "client", "noise_at": "client"}
    rules.check_run("fedavg", "mean", Config(**mine, epsilon=0.5), "")
    rules.check_run("fedavg", "mean", Config(dp="example", epsilon=0.5), "")
    for refused in ({}, {**mine, "epsilon": 2.0}, {"dp": "client", "epsilon": 0.5}, {**mine, "noise_multiplier": 1.0}):
        with pytest.raises(Refused, match=r"ask for differential privacy|allow epsilon=1 a run at the most"):
            rules.check_run("fedavg", "mean", Config(**refused), "")


def test_no_value_tells_counts_that_are_withheld():
    schema = Schema({"n": SIZE, "sums": Field((2,), per="train"), "right": Field((3,), per="split")})
    values = {"n": torch.tensor([4.0]), "sums": torch.tensor([[8.0, 12.0]]), "right": torch.tensor([[2.0, 1.0, 3.0]])}
    data = Data(torch.zeros(9, 1), torch.zeros(9), np.array([[0, 4, 6, 9]]), np.array([0]))
    told = without_sizes(values, schema, data)
    assert {k: v[0].tolist() for k, v in told.items()} == {"n": 1, "sums": [2, 3], "right": [0.5, 0.5, 1]}


@pytest.mark.parametrize(("noise_at", "noised"), [("client", 1.0), ("server", 0.0)])
def test_a_ledger_tells_of_noise_where_the_site_added_it(noise_at, noised):
    client = SimpleNamespace(method=SimpleNamespace(privacy=Privacy("client", 2.0, 0.5, 3, noise_at=noise_at)))
    done = SiteClient.with_flags(client, Header(), "train", Message({}))
    assert (done.clipped, done.noised) == (0.5, noised)
    assert SiteClient.with_flags(client, Header(), "score", Message({})) == Header()
