"""The measured peaks of arithmetic and memory, with work of known length on a fake clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sdbench.measure import ceilings

SIZE = 16
NUM_BYTES = 1 << 12


@pytest.fixture
def work(monkeypatch):
    """Lets time pass on the clock by which the work is timed."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setitem(ceilings.MATRIX_SIZE, "cpu", SIZE)
    monkeypatch.setitem(ceilings._median_time_s.__kwdefaults__, "clock", lambda: clock.now_s)

    def work(seconds):
        clock.now_s += seconds

    return work


# Where a whole product is estimated at 5 s, the suite does not wait for six of them.
@pytest.mark.parametrize(
    ("precision", "dtype", "part_s", "size"),
    [("fp32", torch.float32, 1e-3, SIZE), ("amp_bf16", torch.bfloat16, 1e-2, SIZE // 4)],
)
def test_the_rate_is_that_of_the_median_of_the_later_products(
    precision, dtype, part_s, size, monkeypatch, work
):
    # The first is not timed; of the five others the last three count.
    times_s = iter([100.0, 9.0, 9.0, 2.0, 4.0, 3.0])

    def multiply_s(left, right):
        assert left.shape == right.shape == (size, size) and left.dtype == dtype
        return next(times_s)

    slow_down(monkeypatch, torch, "mm", work, lambda *_: part_s)
    slow_down(monkeypatch, torch, "matmul", work, multiply_s)
    state = torch.get_rng_state()
    tflops = ceilings.measure_matmul_tflops(precision, device_type="cpu")
    assert tflops == 2 * size**3 / 3.0 / 1e12
    assert list(times_s) == []
    # The random numbers of the run stay as they are.
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("scale_s", "kernel", "num_bytes_per_s"),
    [(4.0, "addition", 3 * NUM_BYTES / 4), (2.0, "scaling in place", 2 * NUM_BYTES / 2)],
)
def test_the_bandwidth_is_that_of_the_fastest_kernel(
    scale_s, kernel, num_bytes_per_s, monkeypatch, work
):
    slow_down(monkeypatch, torch.Tensor, "copy_", work, lambda *_: 3.0)
    slow_down(monkeypatch, torch, "add", work, lambda *_: 4.0)
    slow_down(monkeypatch, torch.Tensor, "mul_", work, lambda *_: scale_s)
    monkeypatch.setitem(ceilings.ARRAY_BYTES, "cpu", NUM_BYTES)
    assert ceilings.measure_bandwidth(device_type="cpu") == (kernel, num_bytes_per_s / 1e9)


@pytest.mark.parametrize(
    ("product_s", "transposed_s", "convolution_s", "kernel", "flop"),
    [
        (3.0, 2.0, 1000.0, "product 16 x 16, the left one transposed", 2 * SIZE**3),
        # 2 images of 1 x 1 numbers in 4 channels.
        (1e6, 1e6, 2.0, "3 x 3 convolution of 2 x 4 x 1 x 1", 2 * 2 * 9 * 4**2),
    ],
)
def test_the_arithmetic_is_that_of_the_fastest_kernel(
    product_s, transposed_s, convolution_s, kernel, flop, monkeypatch, work
):
    def multiply_s(left, right):
        return product_s if left.is_contiguous() and right.is_contiguous() else transposed_s

    slow_down(monkeypatch, torch, "matmul", work, multiply_s)
    slow_down(monkeypatch, torch.nn.functional, "conv2d", work, lambda *_: convolution_s)
    monkeypatch.setattr(ceilings, "CONVOLUTION_CHANNELS", 4)
    monkeypatch.setattr(ceilings, "CONVOLUTION_SIZE", 1)
    assert ceilings.measure_arithmetic("bf16", device_type="cpu") == (kernel, flop / 2.0 / 1e12)


@pytest.mark.parametrize(
    ("source", "target", "num_calls", "pinned"),
    [
        ("cpu", "cpu", 1, [False, False]),
        ("cpu", "cuda:1", 20, [True, False]),
        ("cuda:1", "cpu", 20, [False, True]),
        ("cuda:1", "cuda:0", 20, [False, False]),
    ],
)
def test_a_copy_counts_its_bytes_once_and_the_host_is_pinned_beside_a_gpu(
    source, target, num_calls, pinned, monkeypatch, work
):
    made, waits = [], []

    def full(shape, value, *, device, pin_memory):
        made.append((device, pin_memory))
        return torch.zeros(shape)

    monkeypatch.setattr(torch, "full", full)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(copies)))
    copies = []
    slow_down(monkeypatch, torch.Tensor, "copy_", work, lambda *_: copies.append(1) or 2.0)
    monkeypatch.setattr(ceilings, "COPY_BYTES", NUM_BYTES)
    assert ceilings.measure_copy(source, target) == NUM_BYTES / 2.0 / 1e9
    assert made == list(zip([source, target], pinned, strict=True))
    # Each repeat waits before and after its copies, and not between them.
    repeats = range(5)
    expected = [1 + num_calls * (one + end) for one in repeats for end in (0, 1)]
    assert waits == (expected if num_calls == 20 else [])


def slow_down(monkeypatch, owner, name, work, seconds_of):
    """Let a function of torch take a time that depends on its arguments."""
    original = getattr(owner, name)

    def slow(*tensors, **options):
        work(seconds_of(*tensors))
        return original(*tensors, **options)

    monkeypatch.setattr(owner, name, slow)
