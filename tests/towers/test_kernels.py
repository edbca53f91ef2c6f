"""The Triton kernels against PyTorch: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from helpers import ours
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

pytest.importorskip("triton")

from fedvlm.backbones import load
from fedvlm.towers import kernels, layers, text
from fedvlm.towers.text import TextTower
from fedvlm.towers.vision import ImageLayers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py switches Triton's interpreter on


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max()) if one.numel() else 0.0


def reference(qkv: Tensor, past: Tensor) -> Tensor:
    clients, heads, before, positions = max(len(qkv), len(past)), past.shape[3], past.shape[4], qkv.shape[2]
    own = qkv.expand(clients, -1, -1, -1).unflatten(-1, (3, heads, -1)).permute(3, 0, 1, 4, 2, 5)
    old = past.expand(clients, qkv.shape[1], -1, -1, -1, -1).unbind(2)
    key, value = (torch.cat([a, b], -2) for a, b in zip(old, own[1:], strict=True))
    mask = torch.ones(positions, before + positions, dtype=torch.bool, device=DEVICE).tril(before)
    return F.scaled_dot_product_attention(own[0], key, value, attn_mask=mask).transpose(2, 3).flatten(3)


@pytest.mark.parametrize(
    ("qkv_clients", "clients", "rows", "positions", "before", "heads", "size"),
    [
        (2, 2, 5, 7, 17, 2, 16),  # several sequences per tile, the last tile not full
        (2, 1, 3, 20, 1, 2, 32),  # a prefix common to all clients
        (1, 3, 27, 3, 17, 1, 16),  # inputs common to all clients
        (2, 1, 1, 17, 0, 2, 16),  # no prefix
        (1, 1, 2, 64, 64, 1, 64),  # the longest sequence and prefix
    ],
)
def test_attention(qkv_clients, clients, rows, positions, before, heads, size):
    qkv = drawn(qkv_clients, rows, positions, 3 * heads * size).requires_grad_()
    words = drawn(clients, 1, before, 2 * heads * size, seed=1).requires_grad_()
    past = layers.split_heads(words, 2, heads)
    assert kernels.supports(qkv.bfloat16(), past) and not kernels.supports(qkv, past)
    assert not kernels.supports(drawn(1, 1, 65, 3 * heads * size).bfloat16(), past)
    found, expected = kernels.fused_attend(qkv, past), reference(qkv, past)
    weights = torch.randn_like(expected)
    gradients = (torch.autograd.grad((out * weights).sum(), (qkv, words)) for out in (found, expected))
    assert distance(found, expected) < 1e-5
    assert all(distance(a, b) < 1e-5 for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("shape", [(3, 2, 7, 48), (2, 3, 64), (1, 4, 33), (0, 8)])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("used", ["total", "normed", "total normed"])
def test_addition_and_layer_norm(shape, both, used):
    x, update = drawn(*shape).requires_grad_(), drawn(*shape, seed=1).requires_grad_() if both else None
    weight, bias = 1 + 0.1 * drawn(shape[-1], seed=2), drawn(shape[-1], seed=3)
    total = x if update is None else x + update
    expected = {"total": total, "normed": F.layer_norm(total, shape[-1:], weight, bias, 1e-3)}
    found = dict(zip(expected, kernels.fused_add_and_norm(x, update, weight, bias, 1e-3), strict=True))
    assert all(distance(found[k], v) < 1e-5 for k, v in expected.items())
    weights = {k: torch.randn_like(x) for k in used.split()}
    leaves = [x] if update is None else [x, update]
    gradients = (
        torch.autograd.grad(sum((out[k] * v).sum() for k, v in weights.items()), leaves) for out in (found, expected)
    )
    assert all(distance(a, b) < 1e-5 for a, b in zip(*gradients, strict=True))


def test_without_working_kernels_pytorch_is_used(monkeypatch):
    kernels.probe(DEVICE)
    monkeypatch.setattr(kernels, "fused_attend", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kernels.probe(DEVICE)
    layers.triton_kernels.cache_clear()
    with pytest.warns(UserWarning, match="slower"):
        assert layers.triton_kernels() is None
    layers.triton_kernels.cache_clear()


@pytest.fixture(scope="module")
def model() -> CLIPModel:
    torch.manual_seed(0)
    width = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = width | {"max_position_embeddings": 77, "hidden_act": "quick_gelu"}
    vision = width | {"image_size": 32, "patch_size": 16}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).eval().to(DEVICE)


def with_and_without(monkeypatch, work):
    """Pairs of the results of `work` with our kernels and with PyTorch alone."""
    monkeypatch.setattr(kernels, "ATTENTION_DTYPES", kernels.DTYPES)  # float32 too, where rounding errors are smaller
    for module in (layers, text):
        monkeypatch.setattr(module, "kernels", lambda x: kernels)
    ours = work()
    for module in (layers, text):
        monkeypatch.setattr(module, "kernels", lambda x: None)
    return zip(ours, work(), strict=True)


@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("low_rank", [False, True])
def test_the_text_tower_with_and_without_kernels(monkeypatch, model, kinds, low_rank):
    tower = TextTower.of(ours(model), load("mini-clip").tokenizer)
    plan = tower.plan(["ox", "grand piano", "a dollar bill"], 4)
    context = 0.1 * drawn(2, kinds, 4, 64)
    lora = (
        {f"text.0.q.{k}": 0.1 * drawn(2, *shape) for k, shape in (("A", (4, 64)), ("B", (64, 4)))} if low_rank else {}
    )

    def work() -> tuple[Tensor, ...]:
        leaves = {k: v.clone().requires_grad_() for k, v in ({"context": context} | lora).items()}
        found = tower.features(plan, leaves["context"], lora={k: v for k, v in leaves.items() if k in lora})
        return found, *torch.autograd.grad((found * drawn(*found.shape, seed=4)).sum(), list(leaves.values()))

    assert all(distance(a, b) < 1e-5 for a, b in with_and_without(monkeypatch, work))


def test_the_image_tower_with_and_without_kernels(monkeypatch, model):
    top, hidden = ImageLayers.of(ours(model)), drawn(1, 3, 5, 64)
    lora = {f"image.1.out.{k}": 0.1 * drawn(2, *shape) for k, shape in (("A", (4, 64)), ("B", (64, 4)))}

    def work() -> tuple[Tensor, ...]:
        leaves = {k: v.clone().requires_grad_() for k, v in lora.items()}
        found = top.features(hidden, leaves)
        return found, *torch.autograd.grad((found * drawn(*found.shape, seed=4)).sum(), list(leaves.values()))

    assert all(distance(a, b) < 1e-5 for a, b in with_and_without(monkeypatch, work))
