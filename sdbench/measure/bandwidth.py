"""Measures the memory bandwidth of this device.

As in STREAM (McCalpin, "Memory Bandwidth and Machine Balance", 1995): the faster of a copy and an
addition of arrays larger than any cache. Counted are the bytes that the kernel reads and writes,
not the lines that a CPU reads before it writes to them.
"""

from __future__ import annotations

from sdbench.measure.timing import median_time_s

# Bytes of each of three arrays. A GPU's last cache holds some 50 MB, a server CPU's up to 0.5 GB.
ARRAY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 29}


def measure_bandwidth_gb_per_s(*, device_type: str) -> float:
    """Time a copy and an add of large arrays.

    Args:
        device_type: ``cuda`` (the current one) or ``cpu``.

    Returns:
        GB/s, a GB being 1e9 bytes, of the faster one: the median over the second half of the
        repeats.
    """
    import torch

    num_bytes = ARRAY_BYTES[device_type]
    # Filled, since pages that were never written all map to one page of zeros.
    left, right, result = (
        torch.full((num_bytes // 4,), 1.0, dtype=torch.float32, device=device_type)
        for _ in range(3)
    )
    copy_s = median_time_s(lambda: result.copy_(left), device_type=device_type)
    add_s = median_time_s(lambda: torch.add(left, right, out=result), device_type=device_type)
    if device_type == "cuda":
        del left, right, result
        torch.cuda.empty_cache()  # what torch keeps would count as memory of the run
    return max(2 * num_bytes / copy_s, 3 * num_bytes / add_s) / 1e9
