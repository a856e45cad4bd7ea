"""Measures the rate of a large matrix product on this device.

No program reaches the vendor's peak. The rate of one large product of square matrices, in the type
that training computes in, says what this device does with its clocks and libraries at that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdbench.measure.timing import median_time_s

if TYPE_CHECKING:
    import torch

# 2 x 8192^3 is 1.1 TFLOP, 1.4 ms on an H100; 2 x 2048^3 is 17 GFLOP, 20 ms on two cores with AMX.
GPU_SIZE, CPU_SIZE = 8192, 2048


def measure_matmul_tflops(precision: str, *, device_type: str) -> float:
    """Time a large matrix product.

    Args:
        precision: A value of --precision; decides the type of the matrices. torch's global switch
            decides whether fp32 may use TF32.
        device_type: ``cuda`` (the current one) or ``cpu``.

    Returns:
        TFLOP/s, a multiply-add counted as two: the median over the second half of the repeats.
    """
    import torch

    left, right = make_matrices(precision, device_type=device_type)
    product = torch.empty_like(left)
    time_s = median_time_s(lambda: torch.matmul(left, right, out=product), device_type=device_type)
    num_operations = 2 * len(left) ** 3
    if device_type == "cuda":
        del left, right, product
        torch.cuda.empty_cache()  # what torch keeps would count as memory of the run
    return num_operations / time_s / 1e12


def make_matrices(precision: str, *, device_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two large square matrices of random numbers in the type of a --precision."""
    size = GPU_SIZE if device_type == "cuda" else CPU_SIZE
    left, right = make_numbers((2, size, size), precision, device_type=device_type)
    return left, right


def make_numbers(shape: tuple[int, ...], precision: str, *, device_type: str) -> torch.Tensor:
    """Random numbers in the type of a --precision; ones would cost a GPU less power."""
    import torch

    # A separate generator, so that the run's random numbers do not change.
    generator = torch.Generator(device_type).manual_seed(0)
    numbers = torch.randn(shape, device=device_type, generator=generator)
    return numbers.to(dtype_of(precision))


def dtype_of(precision: str) -> torch.dtype:
    """The type in which a --precision multiplies."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        precision.removeprefix("amp_"), torch.float32
    )
