"""The measured matrix peak against a product timed here, and without a trace in the run."""

from __future__ import annotations

import time

import pytest
import torch

from sdbench.measure.matmul import measure_matmul_tflops


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_the_rate_is_that_of_a_product_of_this_size(precision):
    torch.manual_seed(5)
    expected_draw = torch.rand(3)
    torch.manual_seed(5)
    measure_matmul_tflops(precision, device_type="cpu")
    # The run's random numbers are as before.
    torch.testing.assert_close(torch.rand(3), expected_draw)

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    left, right = torch.ones(2048, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
    ratios = []
    # The machine may be busier in one of two measurements, and not each time.
    for _ in range(5):
        tflops = measure_matmul_tflops(precision, device_type="cpu")
        times_s = []
        for _ in range(5):
            start_s = time.perf_counter()
            left @ right
            times_s.append(time.perf_counter() - start_s)
        ratios.append(tflops / (0.01718 / min(times_s)))  # 2 x 2048^3 = 17.2 GFLOP
        if 1 / 3 < ratios[-1] < 3:
            return
    raise AssertionError(ratios)
