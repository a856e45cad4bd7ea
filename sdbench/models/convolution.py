"""Convolutions as matrix products, faster on a CPU for many channels and few pixels.

The deep levels of SD2's U-Net convolve 1280 channels of 4 x 4 or 8 x 8 pixels: 14.7 M weights for
32 or 128 pixels of two images. oneDNN's kernels for their gradients took 1.4 s of a step of 4.3 s
on two cores. Products of weights and patches, each of which moves the weights once, took a quarter
of that (results/ladder.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sdbench.models.weights import change_class


class ProductConv2d(nn.Conv2d):
    """A 3 x 3 convolution; a matrix product where reading the weights takes most of the time.

    Patches have 9 C numbers per pixel, weights 9 C per output channel. With at most half as many
    pixels as output channels, reading the weights takes most of the time; with more, torch's
    convolution is used, which makes no patches.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (B, C, H, W)."""
        stride = self.stride[0]
        num_pixels = x.shape[0] * -(-x.shape[2] // stride) * -(-x.shape[3] // stride)
        if 2 * num_pixels > self.out_channels:
            return super().forward(x)
        weight, bias = self.weight, self.bias
        # Autocast casts the inputs of a convolution, but not those of an autograd.Function.
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _Product.apply(x, weight, bias, stride)


class _Product(torch.autograd.Function):
    """Patches (pixels, 9 C) times weights (9 C, O), summed in fp32 as in a convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.has_bias = stride, bias is not None
        patches = _patches(x, stride)
        result = nn.functional.linear(patches.flatten(0, 2), _as_matrix(weight), bias)
        return result.unflatten(0, patches.shape[:3]).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_pixels = gradient.permute(0, 2, 3, 1).flatten(0, 2)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _sum_of_patches(of_pixels @ _as_matrix(weight), x, ctx.stride)
        if ctx.needs_input_grad[1]:
            product = of_pixels.t() @ _patches(x, ctx.stride).flatten(0, 2)
            of_weight = product.view(-1, 3, 3, x.shape[1]).permute(0, 3, 1, 2)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = of_pixels.sum(0)
        return of_x, of_weight, of_bias, None


def _as_matrix(weight: Tensor) -> Tensor:
    """Weights (O, C, 3, 3) as a matrix (O, 9 C): a view if they are channels_last.

    Their gradient then has their layout too, as DDP wants it for its buckets.
    """
    return weight.permute(0, 2, 3, 1).flatten(1)


def _places(size: tuple[int, int], stride: int) -> list[tuple[slice, slice]]:
    """Rows and columns of an image padded by one pixel that each of the nine taps reads."""
    height, width = size
    return [
        (slice(row, row + height, stride), slice(column, column + width, stride))
        for row in range(3)
        for column in range(3)
    ]


def _patches(x: Tensor, stride: int) -> Tensor:
    """The 3 x 3 pixels around each output pixel: (B, C, H, W) to (B, H/stride, W/stride, 9 C)."""
    padded = nn.functional.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    places = _places(x.shape[2:], stride)
    return torch.cat([padded[:, rows, columns] for rows, columns in places], dim=3)


def _sum_of_patches(patches: Tensor, x: Tensor, stride: int) -> Tensor:
    """Gradient (B, C, H, W) of `x` from those of its overlapping patches, (pixels, 9 C)."""
    num_images, num_channels, height, width = x.shape
    total = patches.new_zeros(
        (num_images, height + 2, width + 2, num_channels), dtype=torch.float32
    )
    by_tap = patches.view(num_images, -1, 9, num_channels)
    for tap, (rows, columns) in enumerate(_places((height, width), stride)):
        place = total[:, rows, columns]
        place += by_tap[:, :, tap].view(place.shape)
    inner = total[:, 1:-1, 1:-1].permute(0, 3, 1, 2).to(x.dtype)
    return inner.contiguous(memory_format=torch.channels_last)


def use_matrix_products(model: nn.Module) -> None:
    """Replace 3 x 3 convolutions with one pixel of padding by `ProductConv2d`, in place.

    Weights that are not channels_last are copied in each pass.
    """
    for module in model.modules():
        if type(module) is not nn.Conv2d or module.padding_mode != "zeros":
            continue
        if module.dilation != (1, 1) or module.groups != 1:
            continue
        form = (module.kernel_size, module.padding, module.stride)
        if form in (((3, 3), (1, 1), (1, 1)), ((3, 3), (1, 1), (2, 2))):
            change_class(module, ProductConv2d)
