"""Measures the ceilings of this device: the fastest of several kernels, for arithmetic and memory.

A single kernel is none: on a CPU convolutions are faster than products of square matrices, and a
kernel that writes where it reads moves more bytes than a copy, for which a CPU reads the lines that
it is about to write. Counted are the bytes that a kernel reads and writes, as in STREAM (McCalpin,
"Memory Bandwidth and Machine Balance", 1995).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sdbench.measure.matmul import make_matrices, make_numbers
from sdbench.measure.timing import median_time_s

# Bytes of each of three arrays. A GPU's last cache holds some 50 MB, a server CPU's up to 0.5 GB.
ARRAY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 29}
# Images of the largest convolution of SD2's U-Net at 256 px: 640 channels, 32 x 32 numbers each.
# 2 x 2 x 1024 x 9 x 640^2 is 15 GFLOP on a CPU; 64 of them 0.48 TFLOP on a GPU.
CONVOLUTION_IMAGES = {"cuda": 64, "cpu": 2}
CONVOLUTION_CHANNELS, CONVOLUTION_SIZE = 640, 32


class Ceiling(NamedTuple):
    """A kernel, and the TFLOP/s or GB/s that it reaches, a GB being 1e9 bytes."""

    kernel: str
    rate: float


def measure_arithmetic(precision: str, *, device_type: str) -> Ceiling:
    """Time products of large matrices, each of them as it is or transposed, and a convolution.

    Args:
        precision: As of `measure_matmul_tflops`.
        device_type: ``cuda`` (the current one) or ``cpu``.

    Returns:
        The fastest, in TFLOP/s, a multiply-add counted as two.
    """
    import torch

    left, right = make_matrices(precision, device_type=device_type)
    size = len(left)
    product = torch.empty_like(left)
    channels, width = CONVOLUTION_CHANNELS, CONVOLUTION_SIZE
    images, weights = (
        make_numbers(shape, precision, device_type=device_type).contiguous(
            memory_format=torch.channels_last
        )
        for shape in (
            (CONVOLUTION_IMAGES[device_type], channels, width, width),
            (channels, channels, 3, 3),
        )
    )
    shape = f"{size} x {size}"
    products = 2 * size**3
    convolution = 2 * len(images) * width**2 * 9 * channels**2
    return _fastest(
        {
            f"product {shape}": (products, lambda: torch.matmul(left, right, out=product)),
            f"product {shape}, the left one transposed": (
                products,
                lambda: torch.matmul(left.T, right, out=product),
            ),
            f"product {shape}, the right one transposed": (
                products,
                lambda: torch.matmul(left, right.T, out=product),
            ),
            f"3 x 3 convolution of {len(images)} x {channels} x {width} x {width}": (
                convolution,
                lambda: torch.nn.functional.conv2d(images, weights, padding=1),
            ),
        },
        unit=1e12,
        device_type=device_type,
    )


def measure_bandwidth(*, device_type: str) -> Ceiling:
    """Time a copy, an addition and a scaling in place of arrays larger than any cache.

    Args:
        device_type: ``cuda`` (the current one) or ``cpu``.

    Returns:
        The fastest, in GB/s.
    """
    import torch

    num_bytes = ARRAY_BYTES[device_type]
    # Filled, since pages that were never written all map to one page of zeros.
    left, right, result = (
        torch.full((num_bytes // 4,), 1.0, dtype=torch.float32, device=device_type)
        for _ in range(3)
    )
    return _fastest(
        {
            "copy": (2 * num_bytes, lambda: result.copy_(left)),
            "addition": (3 * num_bytes, lambda: torch.add(left, right, out=result)),
            "scaling in place": (2 * num_bytes, lambda: left.mul_(1.0)),
        },
        unit=1e9,
        device_type=device_type,
    )


def _fastest(
    kernels: dict[str, tuple[int, Callable[[], object]]], *, unit: float, device_type: str
) -> Ceiling:
    """The fastest of kernels, by name the amount of work of a call and the call."""
    rates = (
        Ceiling(name, amount / median_time_s(work, device_type=device_type) / unit)
        for name, (amount, work) in kernels.items()
    )
    return max(rates, key=lambda ceiling: ceiling.rate)
