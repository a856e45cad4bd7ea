"""`median_time_s`: times a piece of work on this device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

MIN_REPEATS = 5
# Under load a GPU first runs at its boost clock, and then slower at its power cap.
MIN_S = {"cuda": 1.0, "cpu": 0.0}
# Several calls at a time, since waiting for a GPU after each call would be timed too.
CALLS_PER_REPEAT = {"cuda": 20, "cpu": 1}


def median_time_s(
    work: Callable[[], object],
    *,
    device_type: str,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Time one call of the work.

    Args:
        work: Called repeatedly; the first call, which loads and chooses kernels, is not timed.
        device_type: ``cuda`` (the current one) or ``cpu``.
        clock: Monotonic host clock in seconds.

    Returns:
        Seconds: the median over the second half of the repeats.
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
