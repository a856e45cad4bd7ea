"""The measured peaks of arithmetic and memory, with work of known length on a clock of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sdbench.measure import bandwidth, matmul
from sdbench.measure.timing import median_time_s

SIZE = 16
NUM_BYTES = 1 << 12


@pytest.fixture
def work(monkeypatch):
    """Lets time pass on the clock by which the work is timed."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setitem(median_time_s.__kwdefaults__, "clock", lambda: clock.now_s)

    def work(seconds):
        clock.now_s += seconds

    return work


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16)]
)
def test_the_rate_is_that_of_the_median_of_the_later_products(precision, dtype, monkeypatch, work):
    # The first is not timed; of the five others the last three count.
    times_s = iter([100.0, 9.0, 9.0, 2.0, 4.0, 3.0])
    original = torch.matmul

    def multiply(left, right, out):
        assert left.shape == right.shape == (SIZE, SIZE) and left.dtype == dtype
        work(next(times_s))
        return original(left, right, out=out)

    monkeypatch.setattr(torch, "matmul", multiply)
    monkeypatch.setattr(matmul, "CPU_SIZE", SIZE)
    tflops = matmul.measure_matmul_tflops(precision, device_type="cpu")
    assert tflops == 2 * SIZE**3 / 3.0 / 1e12
    assert list(times_s) == []


def test_the_random_numbers_of_the_run_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(matmul, "CPU_SIZE", SIZE)
    state = torch.get_rng_state()
    matmul.measure_matmul_tflops("fp32", device_type="cpu")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("copy_s", "add_s", "num_bytes_per_s"),
    [(2.0, 4.0, 2 * NUM_BYTES / 2), (3.0, 4.0, 3 * NUM_BYTES / 4)],
)
def test_the_rate_is_that_of_the_faster_one(copy_s, add_s, num_bytes_per_s, monkeypatch, work):
    copy, add = torch.Tensor.copy_, torch.add

    def slow_copy(target, source):
        work(copy_s)
        return copy(target, source)

    def slow_add(left, right, out):
        work(add_s)
        return add(left, right, out=out)

    monkeypatch.setattr(torch.Tensor, "copy_", slow_copy)
    monkeypatch.setattr(torch, "add", slow_add)
    monkeypatch.setitem(bandwidth.ARRAY_BYTES, "cpu", NUM_BYTES)
    assert bandwidth.measure_bandwidth_gb_per_s(device_type="cpu") == num_bytes_per_s / 1e9
