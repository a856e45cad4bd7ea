"""Convolutions by matrix products equal torch's own in every pass and shape."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sdbench.models import convolution


def convolve_and_differentiate(module, x, gradient, *, dtype):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = module(x)
    y.backward(gradient.to(y.dtype))
    return y, x.grad, module.weight.grad, module.bias.grad


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(4, 4), (5, 3), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("wide", [False, True])
def test_all_passes_are_those_of_torch(stride, size, dtype, layout, wide, monkeypatch):
    torch.manual_seed(0)
    plain = nn.Conv2d(6, 96, 3, stride=stride, padding=1).to(memory_format=layout)
    product = copy.deepcopy(plain)
    convolution.use_matrix_products(product, wide=wide)
    x = torch.randn(2, 6, *size).to(memory_format=layout)
    gradient = torch.randn_like(plain(x))
    expected = convolve_and_differentiate(plain, x, gradient, dtype=dtype)

    def refuse(*_):
        raise AssertionError("torch's convolution was called")

    monkeypatch.setattr(nn.Conv2d, "forward", refuse)
    found = convolve_and_differentiate(product, x, gradient, dtype=dtype)
    # Sums in another order; bf16 keeps 8 bits, and sums of the patches are rounded twice.
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 0.02, "atol": 0.02}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, **tolerance)
    assert found[0].stride() == expected[0].to(memory_format=torch.channels_last).stride()


@pytest.mark.parametrize("num_channels", [50, 99, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_as_many_pixels_as_channels_are_those_of_torch(
    num_channels, dtype, monkeypatch
):
    torch.manual_seed(0)
    plain = nn.Conv2d(6, num_channels, 3, padding=1).to(memory_format=torch.channels_last)
    product = copy.deepcopy(plain)
    convolution.use_matrix_products(product, wide=True)
    x = torch.randn(2, 6, 10, 5).to(memory_format=torch.channels_last)  # 100 pixels
    gradient = torch.randn_like(plain(x))
    expected = convolve_and_differentiate(plain, x, gradient, dtype=dtype)
    products = []
    backward = convolution._sum_of_patches
    monkeypatch.setattr(
        convolution, "_sum_of_patches", lambda *args: products.append(1) or backward(*args)
    )
    found = convolve_and_differentiate(product, x, gradient, dtype=dtype)
    assert len(products) == (num_channels == 100)
    assert torch.equal(found[0], expected[0])  # the forward pass is torch's own
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 0.02, "atol": 0.05}
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_single_pixels_are_a_linear_layer(dtype, layout, monkeypatch):
    torch.manual_seed(0)
    plain = nn.Conv2d(6, 9, 1).to(memory_format=layout)
    product = copy.deepcopy(plain)
    convolution.use_matrix_products(product, wide=True)
    x = torch.randn(2, 6, 5, 3).to(memory_format=layout)
    gradient = torch.randn(2, 9, 5, 3)
    expected = convolve_and_differentiate(plain, x, gradient, dtype=dtype)

    def refuse(*_):
        raise AssertionError("torch's convolution was called")

    monkeypatch.setattr(nn.Conv2d, "forward", refuse)
    found = convolve_and_differentiate(product, x, gradient, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 0.02, "atol": 0.02}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, **tolerance)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    # DDP has a gradient of the weight's own strides in its buckets.
    if layout == torch.channels_last:
        assert found[2].stride() == product.weight.stride()


@pytest.mark.slow
def test_compiled_it_gives_the_same():
    torch.manual_seed(0)
    module = nn.Conv2d(6, 96, 3, padding=1).to(memory_format=torch.channels_last)
    convolution.use_matrix_products(module)
    x = torch.randn(2, 6, 4, 4)
    gradient = torch.randn(2, 96, 4, 4)
    expected = convolve_and_differentiate(module, x, gradient, dtype=torch.bfloat16)
    expected = [tensor.detach().clone() for tensor in expected]
    module.zero_grad()
    module.compile(fullgraph=True, dynamic=False)
    found = convolve_and_differentiate(module, x, gradient, dtype=torch.bfloat16)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_many_pixels_and_other_convolutions_are_left_to_torch():
    model = nn.Sequential(nn.Conv2d(3, 96, 3, padding=1), nn.Conv2d(96, 8, 1), nn.Linear(2, 2))
    expected = copy.deepcopy(model)
    convolution.use_matrix_products(model)
    assert type(model[0]) is convolution.ProductConv2d and type(model[1]) is nn.Conv2d
    assert list(model.state_dict()) == list(expected.state_dict())
    x = torch.randn(1, 3, 7, 7)  # 49 pixels: one more than half of the 96 channels
    assert torch.equal(model[0](x), expected[0](x))


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    for stride in (1, 2):
        # The sum over patches is in fp32, so steps are large and the tolerance is fp32's.
        assert torch.autograd.gradcheck(
            lambda x, weight, stride=stride: convolution._Product.apply(x, weight, None, stride),
            (x, weight),
            eps=1e-3,
            atol=1e-3,
        )
