"""Federated LoRA and its variants: FFA-LoRA, FedSA-LoRA, RoLoRA, LA-LoRA, FedEx-LoRA, FLoRA, Fed-SB, HetLoRA."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from helpers import Played, close, example, play, same, small_adapter

from fedvlm.core.adapter import Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.local import Local
from fedvlm.core.merge import Merge
from fedvlm.core.state import Params, Reply, nbytes, with_client_axis
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.residual import RESIDUAL
from fedvlm.parts.local.alternate import Alternate
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.local.truncated import RANK, Truncated, tail_length
from fedvlm.parts.local.turns import Turns
from fedvlm.parts.merge.exact import Exact
from fedvlm.parts.merge.mean import Mean
from fedvlm.parts.merge.sparsity import Sparsity, change_lengths
from fedvlm.rounds.method import Method

SIZES = ((6, 1, 1), (3, 1, 1), (2, 1, 1))
RULE = {"lr": 0.1, "batch": 3}
ALL = torch.arange(len(SIZES)).numpy()


@lru_cache
def task_and_data(dtype: torch.dtype = torch.float64) -> tuple[Task, Data]:
    return example(small_adapter("lora"), SIZES)


def built(adapter: str = "lora", local: Local | None = None, merge: Merge | None = None, **settings) -> Method:
    chosen = small_adapter(adapter, **({"layers": 1, "projections": ("q", "v")} | settings))
    return Method.build(chosen, local or Sgd(**RULE), merge or Mean(), task_and_data()[0], 5)


def played(method: Method, rounds: int = 1, clients=ALL) -> Played:
    return play(method, task_and_data()[1], 3, rounds, ids=clients)


class Kept(Stacked):
    """Keeps the replies."""

    def run(self, *given):
        for reply in super().run(*given):
            self.replies = [*getattr(self, "replies", []), reply]
            yield reply


def one_round(method: Method, state=None, round: int = 1):
    """The state after it, the replies ordered by client, and the cohort."""
    engine = Kept(method, task_and_data()[1], 3)
    cohort = Cohort(engine, ALL, round, rounds=4)
    after = method.round(state or method.init(3), cohort)
    (reply,) = engine.replies
    at = torch.from_numpy(reply.ids.argsort())
    return after, Reply(reply.ids[at.numpy()], *({k: v[at] for k, v in p.items()} for p in reply[1:])), cohort


WEIGHT = torch.tensor([n for n, *_ in SIZES], dtype=torch.float64) / sum(n for n, *_ in SIZES)


def change(method: Method, params: Params, name: str) -> torch.Tensor:
    """What is added to a frozen projection, without its scale, [clients, width, width]."""
    found = method.adapter.factors(method.task, params)
    return found[f"{name}.B"] @ found[f"{name}.A"]


def mean_change(method: Method, reply: Reply, name: str) -> torch.Tensor:
    return torch.tensordot(WEIGHT, change(method, reply.shared, name), dims=1)


def names_of(method: Method) -> list[str]:
    return [c.name for c in method.adapter.changed(method.task)]


EXACT = {
    "ffa-lora": lambda: built("ffa"),
    "fed-sb": lambda: built("small"),
    "rolora": lambda: built(local=Alternate(**RULE)),
    "fedex-lora": lambda: built("residual", merge=Exact()),
    "flora": lambda: built("residual", merge=Exact(restart=True)),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_mean_of_the_models_is_the_model_of_the_mean(name, double):
    """In each of three rounds: M + B A after the merge is the mean of the clients' M + B A."""
    method = EXACT[name]()
    state = method.init(3)
    for round in (1, 2, 3):
        state, reply, _ = one_round(method, state, round)
        after = with_client_axis(state.shared)
        for k in names_of(method):
            expected = mean_change(method, reply, k)
            assert expected.norm() > 1e-6
            torch.testing.assert_close(change(method, after, k)[0], expected, rtol=1e-9, atol=1e-12)


def test_fedlora_is_not_exact(double):
    """So that the test above can fail."""
    method = built()
    after, reply, _ = one_round(method, one_round(method)[0], 2)
    k = names_of(method)[0]
    found = change(method, with_client_axis(after.shared), k)[0]
    assert (found - mean_change(method, reply, k)).norm() > 1e-6 * found.norm()


def test_ffa_trains_and_sends_b_alone(double):
    method, plain = built("ffa"), built()
    assert set(method.initial) == {k for k in plain.initial if k.endswith(".B")}
    widths = [c.width for c in method.adapter.changed(method.task)]
    assert nbytes(method.initial) * 2 == nbytes(plain.initial) == 2 * 8 * 2 * sum(widths)
    state, params = played(method, 2).state, with_client_axis(method.initial)
    before, after = (method.adapter.factors(method.task, p) for p in (params, with_client_axis(state.shared)))
    same(*({k: v for k, v in p.items() if k.endswith(".A")} for p in (before, after)))
    assert all((after[f"{k}.B"] != 0).any() for k in names_of(method))
    other = built("ffa", basis=1).adapter.factors(method.task, params)
    assert not torch.equal(other[f"{names_of(method)[0]}.A"], before[f"{names_of(method)[0]}.A"])
    start = method.init(3)._replace(shared=plain.adapter.init(method.task, 0))  # a LoRA with this A
    one, other = one_round(method)[1].shared, one_round(plain, start)[1].shared
    for k, v in one.items():  # clients 1 and 2 take a single step, in which A does not move either: B is 0
        torch.testing.assert_close(v[1:], other[k][1:])


def test_fedsa_keeps_b_on_the_client(double):
    method = built(private=("*.B",))
    assert {k[-2:] for k in method.initial} == {".A"} and {k[-2:] for k in method.newcomer} == {".B"}
    assert set(method.adapter.private) == set(method.newcomer)
    found = played(method, 2)
    rows = found.rows[f"{names_of(method)[0]}.B"]
    assert (
        not torch.equal(rows[0], rows[1]) and found.scores["personal.loss"][0, 2] != found.scores["shared.loss"][0, 2]
    )
    none = played(method, 0).scores["shared.loss"]  # a newcomer's B is 0: the frozen model
    torch.testing.assert_close(found.scores["shared.loss"], none)
    with pytest.raises(FedvlmError, match=r"private=\*\.C: adapter=lora has no such parameter"):
        built(private=("*.C",))


def test_rolora_moves_one_factor_at_a_time(double):
    method = built(local=Alternate(**RULE))
    states = [method.init(3)]
    for round, (moved, fixed) in enumerate([("B", "A"), ("A", "B"), ("B", "A")], 1):
        after, _, cohort = one_round(method, states[-1], round)
        states.append(after)
        for k, v in after.shared.items():
            still = torch.allclose(v, states[-2].shared[k], rtol=1e-15, atol=0)
            assert still == k.endswith(fixed), (round, k)
        assert cohort.effects["in_B"] == pytest.approx([float(moved == "B")] * 3, abs=1e-15)
    with pytest.raises(FedvlmError, match="trains two factors in turn; use adapter=lora"):
        built("ffa", local=Alternate())


def test_la_lora_moves_one_factor_a_step_by_smoothed_gradients(double):
    """The first client's two steps by hand: B by its smoothed gradient, then A at the new B."""
    method, data = built(local=Turns(**RULE)), task_and_data()[1]
    gradients = method.model.gradients("cross-entropy")
    now = with_client_axis(method.init(3).shared)
    batches = Stacked(method, data, 3).at(np.array([0]), 1).batches(3, 1)
    for batch, (moved, dim) in zip(batches, ((".B", -2), (".A", -1)), strict=True):
        found = dict(zip(now, gradients(now, batch)[1], strict=True))
        now = {k: v - 0.1 * by_hand(found[k], dim) if k.endswith(moved) else v for k, v in now.items()}
    _, reply, cohort = one_round(method)
    close(now, {k: v[:1] for k, v in reply.shared.items()})
    assert all(0.01 < v < 1 for v in cohort.effects["filtered"])
    plain = built(local=Turns(smooth=False, **RULE))
    one, other = one_round(plain)[1], one_round(built(local=Alternate(**RULE)))[1]
    for k, v in one.shared.items():  # clients 1 and 2 take one step: that of RoLoRA's first round
        torch.testing.assert_close(v[1:], other.shared[k][1:])
        assert not torch.equal(v[0], other.shared[k][0])
    with pytest.raises(FedvlmError, match="trains two factors in turn; use adapter=lora"):
        built("ffa", local=Turns())


def by_hand(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[1, 4, 6, 4, 1]/16 along a dimension, the outermost values repeated."""
    rows = x.transpose(dim, -1)
    out = torch.zeros_like(rows)
    last = rows.shape[-1] - 1
    for at in range(last + 1):
        for offset, weight in zip((-2, -1, 0, 1, 2), (1, 4, 6, 4, 1), strict=True):
            out[..., at] += weight / 16 * rows[..., min(max(at + offset, 0), last)]
    return out.transpose(dim, -1)


def test_fedex_goes_on_from_the_means_and_flora_starts_anew(double):
    plain, fedex, flora = built(), EXACT["fedex-lora"](), EXACT["flora"]()
    expected = one_round(plain)[0]
    after, _, cohort = one_round(fedex)
    close(expected.shared, {k: v for k, v in after.shared.items() if not k.endswith(RESIDUAL)})
    lost = {k: mean_change(fedex, one_round(fedex)[1], k) for k in names_of(fedex)}
    means = {k: change(plain, with_client_axis(expected.shared), k)[0] for k in lost}
    total = sum(float((lost[k] - means[k]).square().sum()) for k in lost) ** 0.5
    whole = sum(float(v.square().sum()) for v in lost.values()) ** 0.5
    assert cohort.effects["lost"] == [pytest.approx(total / whole)] and total > 0
    anew, _, _ = one_round(flora)
    again = one_round(flora, anew, 2)[0]
    for k in names_of(flora):
        assert (anew.shared[f"{k}.B"] == 0).all()
        firsts = [s.shared[f"{k}.A"] for s in (flora.init(3), anew, again)]
        assert all(not torch.equal(a, b) for a, b in itertools.pairwise(firsts))


def test_one_client_is_plain_lora(double):
    """There is nothing to lose where there is one: FedEx-LoRA is LoRA, trained by one client."""
    plain, fedex = (played(m, 3, ALL[:1]) for m in (built(), EXACT["fedex-lora"]()))
    residuals = {k: v for k, v in fedex.state.shared.items() if k.endswith(RESIDUAL)}
    assert max(float(v.abs().max()) for v in residuals.values()) < 1e-15
    close(plain.state.shared, {k: v for k, v in fedex.state.shared.items() if k not in residuals}, 1e-7)
    torch.testing.assert_close(plain.scores["shared.loss"], fedex.scores["shared.loss"])


@pytest.mark.parametrize("rule", [{"momentum": 0.5, "weight_decay": 0.1}, {"optimiser": "adam"}], ids=str)
def test_clients_never_change_the_frozen_weight(rule, double):
    method = EXACT["fedex-lora"]()
    method = replace(method, local=Sgd(**RULE, **rule))
    start = one_round(method)[0]
    _, reply, _ = one_round(method, start, 2)
    for k in names_of(method):
        sent = start.shared[k + RESIDUAL]
        assert (sent != 0).any() and (reply.shared[k + RESIDUAL] == sent).all()


def test_the_scale_acts_on_both_towers(double):
    """With scale=3 images and class names are as with B three times as large."""
    draw = torch.Generator().manual_seed(4)
    plain, scaled = built(), built(scale=3.0)
    some = {k: torch.randn(v.shape, generator=draw, dtype=torch.float64) for k, v in plain.initial.items()}
    params = with_client_axis(some)
    larger = {k: 3 * v if k.endswith(".B") else v for k, v in params.items()}
    task, x = plain.task, task_and_data()[1].x[None, :4]
    for of in (lambda a, p: a.class_vectors(task, p), lambda a, p: a.features(task, p, x)):
        found = of(scaled.adapter, params)
        torch.testing.assert_close(found, of(plain.adapter, larger))
        assert (found - of(plain.adapter, params)).abs().max() > 1e-3


def test_a_residual_is_added_to_the_frozen_weight(double):
    """LoRA of full rank says the same."""
    method = built("residual", scale=0.5)
    k = names_of(method)[-1]
    params, draw = with_client_axis(method.initial), torch.Generator().manual_seed(3)
    added = torch.randn(params[k + RESIDUAL].shape, generator=draw, dtype=torch.float64)
    whole = built(rank=added.shape[-1], scale=0.5)
    twin = with_client_axis(whole.initial) | {f"{k}.A": added, f"{k}.B": torch.eye(added.shape[-1])[None]}
    x = task_and_data()[1].x[None, :4]
    one = method.model.logits(params | {k + RESIDUAL: added}, x)
    torch.testing.assert_close(one, whole.model.logits(twin, x))
    assert (one - method.model.logits(params, x)).abs().max() > 1e-6


def test_fed_sb_sends_a_small_matrix_between_singular_vectors(double):
    method = built("small", rank=3)
    assert {v.shape for v in method.initial.values()} == {(3, 3)}
    assert nbytes(method.initial) == 8 * 9 * len(names_of(method))
    params = with_client_axis({k: torch.eye(3) for k in method.initial})
    for tower, weight in (("image", method.task.tower.image.layers[-1].qkv[0]), ("text", None)):
        found = method.adapter.factors(method.task, params)
        down, up = found[f"{tower}.0.v.A"][0], found[f"{tower}.0.v.B"][0]
        torch.testing.assert_close(down @ down.T, torch.eye(3))
        weight = method.task.tower.text.layers[-1].qkv[0] if weight is None else weight
        frozen = weight.chunk(3)[2].double()
        values = torch.linalg.svdvals(frozen)[:3]
        torch.testing.assert_close(up.T @ frozen @ down.T, values.diag(), atol=1e-9, rtol=1e-9)
    x = task_and_data()[1].x[None, :4]
    zero_shot = built().model.logits(with_client_axis(built().initial), x)
    torch.testing.assert_close(method.model.logits(with_client_axis(method.initial), x), zero_shot)
    with pytest.raises(FedvlmError, match=r"rank=9: text\.0\.q is 8 wide"):
        built("small", rank=9)


def test_hetlora_with_equal_ranks_is_fedlora(double):
    one = played(built(), 2).state.shared
    same(one, played(built(local=Truncated(**RULE, min_rank=2, penalty=0.0)), 2).state.shared)


def test_hetlora_trains_the_first_directions(double):
    """Ranks 1, 2, 3, 1, … of the clients; the rest is sent as zeros, and is zero in the personal model."""
    method = built(local=Truncated(**RULE, penalty=0.0), merge=Sparsity(), rank=3)
    after, reply, cohort = one_round(method)
    assert cohort.effects["rank"] and sorted(cohort.effects["rank"]) == [1, 2, 3]
    for k in names_of(method):
        for i in range(3):
            down, up = reply.shared[f"{k}.A"][i], reply.shared[f"{k}.B"][i]
            assert (down[i + 1 :] == 0).all() and (up[:, i + 1 :] == 0).all()
            assert (down[: i + 1] != 0).all() and (up[:, : i + 1] != 0).all()
    products = torch.cat([change(method, reply.shared, k).flatten(1) for k in names_of(method)], 1)
    weight = products.norm(dim=1) / products.norm(dim=1).sum()
    close({k: torch.tensordot(weight, v, dims=1) for k, v in reply.shared.items()}, after.shared)
    assert cohort.effects["largest"] == [pytest.approx(3 * float(weight.max()))]
    row = {RANK: torch.tensor([2.0, 0.0])}
    personal = method.local.personal(row, with_client_axis(after.shared))
    k = f"{names_of(method)[0]}.A"
    assert (personal[k][0, 2:] == 0).all() and torch.equal(personal[k][0, :2], after.shared[k][:2])
    assert torch.equal(personal[k][1], after.shared[k])  # a newcomer has the whole


def test_hetlora_prunes_where_the_last_directions_shrink(double):
    rule = Truncated(**RULE, min_rank=4, decay=0.5, penalty=2.0)
    method = built(local=rule, merge=Sparsity(), rank=4)
    engine, state = Kept(method, task_and_data()[1], 3), method.init(3)
    assert float(tail_length(with_client_axis(state.shared), torch.tensor([2.0]))) < 1e-9
    long = {k: torch.full_like(v, 0.1) if k.endswith(".B") else v for k, v in state.shared.items()}
    state = state._replace(shared=long)
    cohort = Cohort(engine, ALL, 1, rounds=4)
    method.round(state, cohort)
    assert cohort.effects["pruned"] == [1, 1, 1] and cohort.effects["rank"] == [2, 2, 2]
    assert engine.rows.read(ALL, 1)[RANK].tolist() == [2, 2, 2]
    assert (engine.replies[0].shared[f"{names_of(method)[0]}.A"][:, 2:] == 0).all()


def test_lengths_of_changes_by_hand(double):
    draw = torch.Generator().manual_seed(1)
    params = {"x.A": torch.randn(3, 2, 5, generator=draw), "x.B": torch.randn(3, 5, 2, generator=draw)}
    torch.testing.assert_close(change_lengths(params), (params["x.B"] @ params["x.A"]).flatten(1).norm(dim=1))
