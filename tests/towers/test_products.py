"""Products with a weight, by oneDNN and by MKL: right, and of one shape the same again."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn import functional as F

from fedvlm.towers import products

WIDTHS = [(256, 768), (1024, 256), (96, 33), (48, 16), (256, 1), (7, 300), (512, 2048)]


def tensors(inner: int, outer: int, rows: int = 130):
    seeded = torch.Generator().manual_seed(inner + outer)
    return [torch.randn(shape, generator=seeded) for shape in ((2, rows // 2, inner), (outer, inner), (outer,))]


@pytest.mark.parametrize("widths", WIDTHS)
def test_values_and_gradients_are_those_of_float64(library, widths):
    given = [v.requires_grad_() for v in tensors(*widths)]
    exact = [v.detach().double().requires_grad_() for v in given]
    found, expected = products.plain_linear(*given), F.linear(*exact)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4)
    for ours, theirs in zip(given, exact, strict=True):
        assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5 * float(theirs.grad.abs().max()))


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_a_frozen_part_gets_no_gradient(library, trained):
    x, weight, bias = tensors(32, 16)
    x.requires_grad_(trained[0])
    weight.requires_grad_(trained[1])
    products.plain_linear(x, weight, bias).sum().backward()
    assert (x.grad is not None, weight.grad is not None, bias.grad is not None) == (*trained, False)


def test_a_module_calls_it_inside_the_context(library):
    module, x = torch.nn.Linear(32, 16), tensors(32, 16)[0]
    calls = []

    def counted(*given):
        calls.append(given)
        return F.linear(*given)

    with pytest.MonkeyPatch.context() as patch, products.fast_linear(x):
        patch.setattr(products, "plain_linear", counted)
        inside = module(x)
    assert torch.allclose(inside, module(x)) and len(calls) == (library == "oneDNN")


def test_gradient_of_a_gradient(library):
    x, weight, _ = tensors(32, 16)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(products.plain_linear(x, weight).pow(3).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    exact = x.detach().double().requires_grad_()
    (slope,) = torch.autograd.grad(F.linear(exact, weight.double()).pow(3).sum(), exact, create_graph=True)
    (expected,) = torch.autograd.grad(slope.sum(), exact)
    assert torch.allclose(curvature.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("rows", [2, 66, 130, 258])
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_frozen_weight_gives_the_same_product_again_and_in_any_place(library, widths, rows):
    """What a tower rests on: of one shape on one core, the values of x alone decide. With MKL their place in memory does,
    too, as far as 64 bytes go: torch's own allocations begin at a multiple of it."""
    x, weight, bias = tensors(*widths, rows=rows)
    x = x.flatten(0, 1)
    product = products.frozen_product(weight, bias, rows)
    first = product(x)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert torch.allclose(first.double(), exact, rtol=1e-5, atol=1e-4)
    for offset in (1, 2, 3, 5) if library == "oneDNN" else (16, 32, 80):
        moved = torch.empty(x.numel() + offset)[offset:].view_as(x).copy_(x)
        assert torch.equal(product(moved), first), offset
    assert torch.equal(products.frozen_product(weight.clone(), bias.clone(), rows)(x), first)


def test_a_frozen_weight_takes_part_in_half_precision(library):
    x, weight, bias = tensors(32, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.frozen_product(weight, bias, 65)(x).dtype == torch.bfloat16


def test_no_makers_name_decides():
    """The same library on every processor that torch has the operator for."""
    assert "AuthenticAMD" not in inspect.getsource(products) and "GenuineIntel" not in inspect.getsource(products)


def test_other_precisions_are_left_to_torch(library):
    x, weight, bias = tensors(32, 16)
    assert torch.equal(products.plain_linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert products.plain_linear(x, weight, bias).dtype == torch.bfloat16
