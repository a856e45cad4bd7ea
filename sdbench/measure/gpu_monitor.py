"""`GpuMonitor` reads clocks, power and other users of this rank's GPU in the measured window.

A thread reads NVML once a second, so that the training loop never waits. Readings are a record's
`gpu`: the names of `OVER_RANKS` with values over a window; what the GPU or its driver does not
report is None.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdbench.measure.host import ask, open_nvml
from sdbench.record.formulas import NORMAL_REASON

# nvml.h, nvmlClocksEventReasons: why the clocks are below their maximum.
CLOCK_REASONS = {
    0x0000000000000004: NORMAL_REASON,
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "thermal slowdown by software",
    0x0000000000000040: "thermal slowdown by hardware",
    0x0000000000000080: "power brake",
}


def _union(values: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({one for several in values for one in several}))


# How the samples of a window become one reading, and the readings of all ranks one of the run.
# Utilization is the share of the time with a kernel running, power that of the board.
OVER_SAMPLES: dict[str, Callable[[list[Any]], Any]] = {
    "utilization_percent": statistics.fmean,
    "power_w": statistics.fmean,
    "temperature_c": max,
    "sm_clock_mhz": statistics.fmean,
    "throttle_reasons": _union,
    "num_other_processes": max,
}
OVER_RANKS = OVER_SAMPLES | {
    "power_limit_w": min,
    "default_power_limit_w": min,  # the maker's
    "energy_j": sum,
    "max_sm_clock_mhz": statistics.fmean,
}


def merge_readings(ranks: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Merge the readings of all GPUs of a run; a value that one of them lacks is None."""
    if all(rank is None for rank in ranks):
        return None
    merged = {}
    for name, combine in OVER_RANKS.items():
        values = [None if rank is None else rank[name] for rank in ranks]
        merged[name] = None if None in values else combine(values)
    return merged


class GpuMonitor:
    """Samples one GPU from `start` to `stop`."""

    def __init__(self, *, device_uuid: str, period_s: float = 1.0) -> None:
        """Open the GPU with torch's UUID: NVML may count the GPUs in another order."""
        self.readings: dict[str, Any] | None = None  # those of the last `read`; None without NVML
        self._period_s = period_s
        self._samples: list[dict[str, Any]] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml = open_nvml()
        self._handle: Any = None
        if self._nvml is not None:
            self._handle = ask(self._nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{device_uuid}")
        self._start_energy_j: float | None = None

    def start(self) -> None:
        """Begin to sample; drops earlier samples."""
        if self._handle is None:
            return
        self._samples = []
        self._start_energy_j = self._energy_j()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def read(self) -> None:
        """Set `readings` to those since `start`; sampling goes on."""
        if self._handle is None:
            return
        energy_j, start_j = self._energy_j(), self._start_energy_j
        self.readings = {
            "power_limit_w": _from_milli(self._ask("EnforcedPowerLimit")),
            "default_power_limit_w": _from_milli(self._ask("PowerManagementDefaultLimit")),
            "energy_j": None if energy_j is None or start_j is None else energy_j - start_j,
            "max_sm_clock_mhz": self._ask("MaxClockInfo", self._nvml.NVML_CLOCK_SM),
        }
        # In a window shorter than a period this sample is the only one.
        samples = [*self._samples, self._sample()]
        for name, combine in OVER_SAMPLES.items():
            values = [sample[name] for sample in samples if sample[name] is not None]
            self.readings[name] = combine(values) if values else None

    def stop(self) -> None:
        """End sampling."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def describe_others(self) -> str | None:
        """Other processes that compute on the GPU, in words; None without one that is known."""
        processes = self._ask("ComputeRunningProcesses") if self._handle is not None else None
        # One of them is this process, which a container may know by another number.
        if len(processes or ()) < 2:
            return None
        named = [f"pid {one.pid}" for one in processes if one.pid != os.getpid()]
        names = f" ({', '.join(named)})" if len(named) < len(processes) else ""
        number = len(processes) - 1
        who = "another process computes" if number == 1 else f"{number} other processes compute"
        return f"{who} on the GPU{names}"

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self._samples.append(self._sample())

    def _sample(self) -> dict[str, Any]:
        reasons = self._ask("CurrentClocksThrottleReasons")
        processes = self._ask("ComputeRunningProcesses")
        utilization = self._ask("UtilizationRates")
        return {
            "utilization_percent": None if utilization is None else float(utilization.gpu),
            "power_w": _from_milli(self._ask("PowerUsage")),
            "temperature_c": self._ask("Temperature", self._nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": self._ask("ClockInfo", self._nvml.NVML_CLOCK_SM),
            "throttle_reasons": None
            if reasons is None
            else [name for bit, name in CLOCK_REASONS.items() if reasons & bit],
            # One of them is this process. In a container NVML may list none at all, and then the
            # number of others is unknown.
            "num_other_processes": len(processes) - 1 if processes else None,
        }

    def _energy_j(self) -> float | None:
        return _from_milli(self._ask("TotalEnergyConsumption"))

    def _ask(self, name: str, *arguments: Any) -> Any:
        return ask(self._nvml, f"nvmlDeviceGet{name}", self._handle, *arguments)


def _from_milli(value: float | None) -> float | None:
    return None if value is None else value * 1e-3
