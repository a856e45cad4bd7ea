"""Measures the ceilings of this device: the rates of its fastest kernels.

No program reaches the vendor's peak. The rate of one large product of square matrices says what
this device does with its clocks and libraries at that moment. It is not the ceiling: on a CPU
convolutions are faster. For memory, a kernel that works in place moves more bytes than a copy, for
which a CPU first reads the cache lines that it will write. Bytes are counted as in STREAM, as those
that a kernel reads and writes (McCalpin, "Memory Bandwidth and Machine Balance", 1995).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# 2 x 8192^3 is 1.1 TFLOP, 1.4 ms on an H100; 2 x 2048^3 is 17 GFLOP, 20 ms on two cores with AMX.
MATRIX_SIZE = {"cuda": 8192, "cpu": 2048}
# In bf16 a CPU without instructions for it takes half a minute, and six products are made.
SLOW_PRODUCT_S = 4.0
# Bytes of each of three arrays. A GPU's last cache holds some 50 MB, a server CPU's up to 0.5 GB.
ARRAY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 29}
# Between devices, 100 copies of this size take 2 s over PCIe of the third generation.
COPY_BYTES = 1 << 28
# Images of the largest convolution of SD2's U-Net at 256 px: 640 channels, 32 x 32 numbers each.
# 2 x 2 x 1024 x 9 x 640^2 is 15 GFLOP on a CPU; 64 of them 0.48 TFLOP on a GPU.
CONVOLUTION_IMAGES = {"cuda": 64, "cpu": 2}
CONVOLUTION_CHANNELS, CONVOLUTION_SIZE = 640, 32

MIN_REPEATS = 5
# Under load a GPU first runs at its boost clock, and then slower at its power cap.
MIN_S = {"cuda": 1.0, "cpu": 0.0}
# Several calls at a time, since waiting for a GPU after each call would be timed too.
CALLS_PER_REPEAT = {"cuda": 20, "cpu": 1}


class Ceiling(NamedTuple):
    """A kernel, and the TFLOP/s or GB/s that it reaches, a GB being 1e9 bytes."""

    kernel: str
    rate: float


def measure_matmul_tflops(precision: str, *, device_type: str) -> float:
    """TFLOP/s of a product of large matrices, a multiply-add counted as two.

    `precision`, a value of --precision, decides the type of the matrices; torch's global switch
    decides whether fp32 may use TF32. `device_type` is ``cuda`` (the current one) or ``cpu``.
    """
    import torch

    left, right, product = _make_matrices(precision, device_type=device_type)
    flop = 2 * len(left) ** 3
    time_s = _median_time_s(lambda: torch.matmul(left, right, out=product), device_type=device_type)
    if device_type == "cuda":
        del left, right, product
        torch.cuda.empty_cache()  # memory that torch keeps would count as memory of the run
    return flop / time_s / 1e12


def measure_arithmetic(precision: str, *, device_type: str) -> Ceiling:
    """The fastest of products of large matrices, as they are and transposed, and a convolution."""
    import torch

    left, right, product = _make_matrices(precision, device_type=device_type)
    size, channels, width = len(left), CONVOLUTION_CHANNELS, CONVOLUTION_SIZE
    shapes = ((CONVOLUTION_IMAGES[device_type], channels, width, width), (channels, channels, 3, 3))
    images, weights = (
        _make_numbers(shape, precision, device_type=device_type).contiguous(
            memory_format=torch.channels_last
        )
        for shape in shapes
    )
    name, multiply = f"product {size} x {size}", functools.partial(torch.matmul, out=product)
    kernels: dict[str, tuple[int, Callable[[], object]]] = {
        name: (2 * size**3, lambda: multiply(left, right)),
        f"{name}, the left one transposed": (2 * size**3, lambda: multiply(left.T, right)),
        f"{name}, the right one transposed": (2 * size**3, lambda: multiply(left, right.T)),
        f"3 x 3 convolution of {len(images)} x {channels} x {width} x {width}": (
            2 * len(images) * width**2 * 9 * channels**2,
            lambda: torch.nn.functional.conv2d(images, weights, padding=1),
        ),
    }
    return _fastest(kernels, unit=1e12, device_type=device_type)


def measure_bandwidth(*, device_type: str) -> Ceiling:
    """The fastest of a copy, an addition and a scaling of arrays larger than any cache, in GB/s."""
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


def measure_copy(source: str, target: str) -> float:
    """GB/s of a copy between devices such as ``cpu`` and ``cuda:1``, of which one is current.

    Memory of the host is pinned if the other device is a GPU. Bytes are counted once.
    """
    import torch

    device_type = "cpu" if source == target == "cpu" else "cuda"
    left, right = (
        torch.full(
            (COPY_BYTES // 4,),
            1.0,
            device=device,
            pin_memory=device == "cpu" and device_type == "cuda",
        )
        for device in (source, target)
    )
    copy = functools.partial(right.copy_, left, non_blocking=True)
    return COPY_BYTES / _median_time_s(copy, device_type=device_type) / 1e9


def _fastest(
    kernels: dict[str, tuple[int, Callable[[], object]]], *, unit: float, device_type: str
) -> Ceiling:
    """The fastest of kernels, given by name with the amount of work of a call and the call."""
    rates = (
        Ceiling(name, amount / _median_time_s(work, device_type=device_type) / unit)
        for name, (amount, work) in kernels.items()
    )
    return max(rates, key=lambda ceiling: ceiling.rate)


def _make_matrices(precision: str, *, device_type: str) -> tuple[torch.Tensor, ...]:
    """Two factors and a place for their product, a quarter as wide where that takes seconds."""
    import torch

    size = MATRIX_SIZE[device_type]
    left, right = _make_numbers((2, size, size), precision, device_type=device_type)
    if device_type == "cpu":
        part = left[: size // 8, : size // 8]
        part_s = _median_time_s(lambda: torch.mm(part, part), device_type=device_type)
        if part_s * 8**3 > SLOW_PRODUCT_S:
            left, right = (
                factor[: size // 4, : size // 4].contiguous() for factor in (left, right)
            )
    return left, right, left.new_empty(left.shape)


def _make_numbers(shape: tuple[int, ...], precision: str, *, device_type: str) -> torch.Tensor:
    """Random numbers in the type in which a --precision multiplies; ones would take less power."""
    import torch

    # A separate generator, so that the run's random numbers do not change.
    generator = torch.Generator(device_type).manual_seed(0)
    numbers = torch.randn(shape, device=device_type, generator=generator)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return numbers.to(dtypes.get(precision.removeprefix("amp_"), torch.float32))


def _median_time_s(
    work: Callable[[], object], *, device_type: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Time one call of the work: the median over the second half of the repeats.

    The first call, which loads and chooses kernels, is not timed.
    """
    import torch

    synchronize = torch.cuda.synchronize if device_type == "cuda" else lambda: None
    num_calls = CALLS_PER_REPEAT[device_type]
    work()
    times_s: list[float] = []
    while len(times_s) < MIN_REPEATS or sum(times_s) < MIN_S[device_type]:
        synchronize()
        start_s = clock()
        for _ in range(num_calls):
            work()
        synchronize()
        times_s.append(clock() - start_s)
    return statistics.median(times_s[len(times_s) // 2 :]) / num_calls
