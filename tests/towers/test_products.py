"""Products with a weight: oneDNN's and MKL's give the same, and which is used does not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fedvlm.towers import products

WIDTHS = [(256, 768), (1024, 256), (96, 33)]


@pytest.fixture(params=["oneDNN", "MKL"])
def library(request, monkeypatch):
    if request.param == "MKL":
        monkeypatch.setattr(products, "onednn", lambda: None)
    elif products.onednn() is None:
        monkeypatch.setattr(products, "amd", lambda: True)
        products.onednn.cache_clear()
        if products.onednn() is None:
            products.onednn.cache_clear()
            pytest.skip("no AVX-512 here, or a torch without oneDNN's operator")
    yield request.param
    if hasattr(products.onednn, "cache_clear"):
        products.onednn.cache_clear()


def tensors(inner: int, outer: int, rows: int = 130):
    seeded = torch.Generator().manual_seed(inner + outer)
    return [torch.randn(shape, generator=seeded) for shape in ((2, rows // 2, inner), (outer, inner), (outer,))]


@pytest.mark.parametrize("widths", WIDTHS)
def test_values_and_gradients_are_those_of_float64(library, widths):
    given = [v.requires_grad_() for v in tensors(*widths)]
    exact = [v.detach().double().requires_grad_() for v in given]
    found, expected = products.linear(*given), F.linear(*exact)
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
    products.linear(x, weight, bias).sum().backward()
    assert (x.grad is not None, weight.grad is not None, bias.grad is not None) == (*trained, False)


def test_a_module_calls_it_inside_the_context(library):
    module, x = torch.nn.Linear(32, 16), tensors(32, 16)[0]
    calls = []

    def counted(*given):
        calls.append(given)
        return F.linear(*given)

    with pytest.MonkeyPatch.context() as patch, products.fast_linear(x):
        patch.setattr(products, "linear", counted)
        inside = module(x)
    assert torch.allclose(inside, module(x)) and len(calls) == (library == "oneDNN")


def test_gradient_of_a_gradient(library):
    x, weight, _ = tensors(32, 16)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(products.linear(x, weight).pow(3).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    exact = x.detach().double().requires_grad_()
    (slope,) = torch.autograd.grad(F.linear(exact, weight.double()).pow(3).sum(), exact, create_graph=True)
    (expected,) = torch.autograd.grad(slope.sum(), exact)
    assert torch.allclose(curvature.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("widths", WIDTHS[:2])
def test_rows_do_not_depend_on_their_number_or_on_threads(library, widths):
    """Down to four rows, as for MKL; images are encoded in pieces of at least that many tokens."""
    x, weight, bias = tensors(*widths, rows=2 * 1040)
    x = x.flatten(0, 1)
    whole = products.linear(x, weight, bias)
    for rows in (4, 5, 16, 65, 130, 1040):
        assert torch.equal(products.linear(x[:rows], weight, bias), whole[:rows]), rows
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    assert torch.equal(products.linear(x, weight, bias), whole)
    torch.set_num_threads(before)


def test_other_precisions_are_left_to_torch(library):
    x, weight, bias = tensors(32, 16)
    assert torch.equal(products.linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight, bias).dtype == torch.bfloat16
