"""How fast does this device multiply matrices here and now?

A vendor's peak is reached by no program. One large product of square matrices, in the type that the
training computes in, is the practical ceiling of the same device with its clocks and libraries.
"""

from __future__ import annotations

import statistics
import time

# 2 x 8192^3 is 1.1 TFLOP, 1.4 ms on an H100; 2 x 2048^3 is 17 GFLOP, 20 ms on two cores with AMX.
GPU_SIZE, CPU_SIZE = 8192, 2048
MIN_REPEATS = 5
# A GPU under load first runs at its boost clock and then at what its power cap allows.
MIN_S = {"cuda": 1.0, "cpu": 0.0}
PRODUCTS_PER_REPEAT = {"cuda": 20, "cpu": 1}


def measure_matmul_tflops(precision: str, *, device_type: str) -> float:
    """Time a large matrix product.

    Args:
        precision: A value of --precision; it decides the type of the matrices. Whether fp32 may
            use TF32 is torch's global switch.
        device_type: ``cuda`` (the current one) or ``cpu``.

    Returns:
        TFLOP/s, a multiply-add counted as two: the median over the second half of the repeats.
    """
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        precision.removeprefix("amp_"), torch.float32
    )
    size = GPU_SIZE if device_type == "cuda" else CPU_SIZE
    num_products = PRODUCTS_PER_REPEAT[device_type]
    synchronize = torch.cuda.synchronize if device_type == "cuda" else lambda: None
    # A generator of its own leaves the random numbers of the run as they are.
    generator = torch.Generator(device_type).manual_seed(0)
    left, right = (
        torch.randn(size, size, device=device_type, generator=generator).to(dtype) for _ in range(2)
    )
    product = torch.matmul(left, right)  # the first one loads and chooses kernels
    times_s = []
    while len(times_s) < MIN_REPEATS or sum(times_s) < MIN_S[device_type]:
        synchronize()
        start_s = time.perf_counter()
        for _ in range(num_products):
            torch.matmul(left, right, out=product)
        synchronize()
        times_s.append(time.perf_counter() - start_s)
    if device_type == "cuda":
        del left, right, product
        torch.cuda.empty_cache()  # what torch keeps would count as memory of the run
    return num_products * 2 * size**3 / statistics.median(times_s[len(times_s) // 2 :]) / 1e12
