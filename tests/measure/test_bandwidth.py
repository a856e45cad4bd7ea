"""The measured memory bandwidth against a copy timed here."""

from __future__ import annotations

import time

import numpy as np

from sdbench.measure import bandwidth


def test_the_rate_is_that_of_a_copy_of_this_size(monkeypatch):
    num_bytes = 1 << 27
    monkeypatch.setitem(bandwidth.ARRAY_BYTES, "cpu", num_bytes)
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    ratios = []
    # The machine may be busier in one of two measurements, and not each time; torch's copy uses as
    # many threads as numpy's here, one.
    for _ in range(5):
        gb_per_s = bandwidth.measure_bandwidth_gb_per_s(device_type="cpu")
        times_s = []
        for _ in range(5):
            start_s = time.perf_counter()
            np.copyto(target, source)
            times_s.append(time.perf_counter() - start_s)
        ratios.append(gb_per_s / (2 * num_bytes / min(times_s) / 1e9))  # read and written
        if 1 / 3 < ratios[-1] < 3:
            return
    raise AssertionError(ratios)
