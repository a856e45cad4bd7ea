"""`GpuMonitor` reads clocks, power and other users of this rank's GPU in the measured window.

A thread reads NVML once a second, so that the training loop never waits. Values that the GPU or its
driver does not report are None.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sdbench.measure.host import ask, open_nvml

PERIOD_S = 1.0

# nvml.h, nvmlClocksEventReasons: why the clocks are below their maximum.
CLOCK_REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "thermal slowdown by software",
    0x0000000000000040: "thermal slowdown by hardware",
    0x0000000000000080: "power brake",
}
# Under load a GPU normally runs at its power cap. The other reasons mean that it is slower than
# other GPUs of its model.
NORMAL_REASON = "power cap"


def _union(values: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({one for several in values for one in several}))


# How the samples of a window become one reading, and the readings of all ranks one of the run.
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
    "default_power_limit_w": min,
    "energy_j": sum,
    "max_sm_clock_mhz": statistics.fmean,
}


@dataclasses.dataclass(frozen=True)
class GpuReadings:
    """Readings of NVML over a window. Unknown is None.

    Utilization (share of the time with a kernel running), power of the board and clock are means,
    temperature and the number of other processes on the GPU the largest. The default limit is the
    maker's.
    """

    utilization_percent: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    num_other_processes: int | None = None

    @property
    def is_throttled(self) -> bool:
        """Whether the power limit was lowered, or the clock for a reason other than the cap."""
        is_limited = (
            self.power_limit_w is not None
            and self.default_power_limit_w is not None
            and self.power_limit_w < self.default_power_limit_w
        )
        reasons = self.throttle_reasons or ()
        return is_limited or any(reason != NORMAL_REASON for reason in reasons)

    @property
    def is_shared(self) -> bool:
        """Whether another process computed on the GPU."""
        return bool(self.num_other_processes)


def merge_readings(ranks: Sequence[GpuReadings | None]) -> GpuReadings | None:
    """Merge the readings of all GPUs of a run; a value that one of them lacks is None."""
    if all(rank is None for rank in ranks):
        return None
    merged = {}
    for name, combine in OVER_RANKS.items():
        values = [getattr(rank, name, None) for rank in ranks]
        merged[name] = None if None in values else combine(values)
    return GpuReadings(**merged)


class GpuMonitor:
    """Samples one GPU from `start` to `stop`.

    Attributes:
        readings: Those of the last `read`; None without NVML.
    """

    def __init__(self, *, device_uuid: str, period_s: float = PERIOD_S) -> None:
        """Open the GPU with torch's UUID: NVML may count the GPUs in another order."""
        self.readings: GpuReadings | None = None
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
        energies_j = [self._energy_j(), self._start_energy_j]
        # In a window shorter than a period this sample is the only one.
        samples = [*self._samples, self._sample()]
        readings = {}
        for name, combine in OVER_SAMPLES.items():
            values = [sample[name] for sample in samples if sample[name] is not None]
            readings[name] = combine(values) if values else None
        self.readings = GpuReadings(
            **readings,
            energy_j=None if None in energies_j else energies_j[0] - energies_j[1],
            power_limit_w=_from_milli(self._ask("EnforcedPowerLimit")),
            default_power_limit_w=_from_milli(self._ask("PowerManagementDefaultLimit")),
            max_sm_clock_mhz=self._ask("MaxClockInfo", self._nvml.NVML_CLOCK_SM),
        )

    def stop(self) -> None:
        """End sampling."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

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
