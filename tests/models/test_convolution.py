"""Convolutions by matrix products equal torch's own in every pass and shape."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sdbench.models import convolution

BOTH_TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
BOTH_LAYOUTS = pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])


def run(module, x, gradient, *, dtype):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = module(x)
    y.backward(gradient.to(y.dtype))
    return y, x.grad, module.weight.grad, module.bias.grad


def assert_close(found, expected, *, dtype):
    """Sums in another order; bf16 keeps 8 bits, and sums of the patches are rounded twice."""
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 0.02, "atol": 0.05}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, **tolerance)


def make_pair(plain, size, *, layout):
    """A convolution of torch, that of this suite, an input, and a gradient of the output."""
    plain = plain.to(memory_format=layout)
    product = copy.deepcopy(plain)
    convolution.use_matrix_products(product)
    x = torch.randn(2, 6, *size).to(memory_format=layout)
    return plain, product, x, torch.randn_like(plain(x))


@pytest.fixture
def forbid_torchs(monkeypatch):
    """A function after which a call of torch's convolution is an error."""

    def refuse(*_):
        raise AssertionError("torch's convolution was called")

    return lambda: monkeypatch.setattr(nn.Conv2d, "forward", refuse)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(4, 4), (5, 3), (1, 2)])
@BOTH_TYPES
@BOTH_LAYOUTS
def test_all_passes_are_those_of_torch(stride, size, dtype, layout, forbid_torchs):
    plain = nn.Conv2d(6, 96, 3, stride=stride, padding=1)
    plain, product, x, gradient = make_pair(plain, size, layout=layout)
    expected = run(plain, x, gradient, dtype=dtype)
    forbid_torchs()
    found = run(product, x, gradient, dtype=dtype)
    assert_close(found, expected, dtype=dtype)
    assert found[0].stride() == expected[0].to(memory_format=torch.channels_last).stride()
    # DDP has a gradient of the weight's own strides in its buckets.
    if layout == torch.channels_last:
        assert found[2].stride() == product.weight.stride()


def test_many_pixels_and_other_convolutions_are_left_to_torch():
    model = nn.Sequential(nn.Conv2d(3, 96, 3, padding=1), nn.Conv2d(96, 8, 1), nn.Linear(2, 2))
    expected = copy.deepcopy(model)
    convolution.use_matrix_products(model)
    assert type(model[0]) is convolution.ProductConv2d and type(model[1]) is nn.Conv2d
    assert list(model.state_dict()) == list(expected.state_dict())
    x = torch.randn(1, 3, 7, 7)  # 49 pixels: one more than half of the 96 channels
    assert torch.equal(model[0](x), expected[0](x))
