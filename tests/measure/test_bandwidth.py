"""The measured memory bandwidth against a copy timed here."""

from __future__ import annotations

import time

import numpy as np

from sdbench.measure import bandwidth


def test_the_rate_is_that_of_a_copy_of_this_size(monkeypatch):
    num_bytes = 1 << 27
    monkeypatch.setitem(bandwidth.ARRAY_BYTES, "cpu", num_bytes)
    gb_per_s = bandwidth.measure_bandwidth_gb_per_s(device_type="cpu")
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        np.copyto(target, source)
        times_s.append(time.perf_counter() - start_s)
    # Read and written. The machine may be busier in one of the two measurements; torch's copy
    # uses as many threads as numpy's here, one.
    expected = 2 * num_bytes / min(times_s) / 1e9
    assert expected / 3 < gb_per_s < expected * 3
