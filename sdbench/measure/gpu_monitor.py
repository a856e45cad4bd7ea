"""Clocks, power and other users of this rank's GPU during the measured window.

A thread reads NVML once a second, so that the training loop never waits. Values that the GPU or its
driver does not report are None.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sdbench.measure.nvml import ask, open_nvml

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


@dataclasses.dataclass(frozen=True)
class GpuReadings:
    """Readings of NVML over a window. Unknown is None.

    Attributes:
        utilization_percent: Share of the time with a kernel running, mean.
        power_w: Board power, mean.
        power_limit_w: Power limit of the board now.
        default_power_limit_w: Power limit as the maker has set it.
        energy_j: Energy of the board over the window.
        temperature_c: Highest.
        sm_clock_mhz: Mean.
        max_sm_clock_mhz: Highest clock of this model.
        throttle_reasons: Reasons for a lower clock that were seen; empty if there was none.
        num_other_processes: Largest number of other processes on the GPU.
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
    """The readings of all GPUs of a run as one, None where a rank has none."""
    known = [rank for rank in ranks if rank is not None]
    if not known:
        return None

    def over(combine: Callable[[list[Any]], Any], name: str) -> Any:
        values = [getattr(rank, name) for rank in known]
        # A total or a mean over some of the GPUs would pass for one over all.
        return None if None in values or len(known) < len(ranks) else combine(values)

    return GpuReadings(
        utilization_percent=over(_mean, "utilization_percent"),
        power_w=over(_mean, "power_w"),
        power_limit_w=over(min, "power_limit_w"),
        default_power_limit_w=over(min, "default_power_limit_w"),
        energy_j=over(sum, "energy_j"),
        temperature_c=over(max, "temperature_c"),
        sm_clock_mhz=over(_mean, "sm_clock_mhz"),
        max_sm_clock_mhz=over(_mean, "max_sm_clock_mhz"),
        throttle_reasons=over(_union, "throttle_reasons"),
        num_other_processes=over(max, "num_other_processes"),
    )


class GpuMonitor:
    """Samples one GPU from `start` to `stop`; without NVML it stays empty."""

    def __init__(self, *, device_uuid: str, period_s: float = PERIOD_S) -> None:
        """Open the GPU.

        Args:
            device_uuid: Of the GPU, as torch gives it: NVML may count the GPUs in another order.
            period_s: From one sample to the next.
        """
        self._period_s = period_s
        self._samples: list[dict[str, Any]] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._device = _open_device(device_uuid)
        self._start_energy_j: float | None = None

    def start(self) -> None:
        """Begin to sample; drops earlier samples."""
        if self._device is None:
            return
        self._samples = []
        self._start_energy_j = self._device.energy_j()
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()

    def read(self) -> GpuReadings | None:
        """The readings since `start`, or None without NVML; sampling goes on."""
        if self._device is None:
            return None
        energies_j = [self._device.energy_j(), self._start_energy_j]
        # A window shorter than a period has no other sample than this one.
        samples = [*self._samples, self._device.sample()]

        def over(combine: Callable[[list[Any]], Any], name: str) -> Any:
            values = [sample[name] for sample in samples if sample[name] is not None]
            return combine(values) if values else None

        return GpuReadings(
            utilization_percent=over(_mean, "utilization_percent"),
            power_w=over(_mean, "power_w"),
            energy_j=None if None in energies_j else energies_j[0] - energies_j[1],
            temperature_c=over(max, "temperature_c"),
            sm_clock_mhz=over(_mean, "sm_clock_mhz"),
            throttle_reasons=over(_union, "throttle_reasons"),
            num_other_processes=over(max, "num_other_processes"),
            **self._device.limits(),
        )

    def stop(self) -> None:
        """End sampling."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        assert self._device is not None
        while not self._stopped.wait(self._period_s):
            self._samples.append(self._device.sample())


class _Device:
    """One GPU as NVML knows it, in our units."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def sample(self) -> dict[str, Any]:
        nvml = self._nvml
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses")
        utilization = self._ask("nvmlDeviceGetUtilizationRates")
        return {
            "utilization_percent": None if utilization is None else float(utilization.gpu),
            "power_w": _scaled(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "throttle_reasons": None
            if reasons is None
            else [name for bit, name in CLOCK_REASONS.items() if reasons & bit],
            # One of them is this process. In a container NVML may list none at all, and then the
            # number of others is unknown.
            "num_other_processes": len(processes) - 1 if processes else None,
        }

    def energy_j(self) -> float | None:
        return _scaled(self._ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3)

    def limits(self) -> dict[str, float | None]:
        return {
            "power_limit_w": _scaled(self._ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            "default_power_limit_w": _scaled(
                self._ask("nvmlDeviceGetPowerManagementDefaultLimit"), 1e-3
            ),
            "max_sm_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM),
        }

    def _ask(self, name: str, *arguments: Any) -> Any:
        return ask(self._nvml, name, self._handle, *arguments)


def _open_device(uuid: str) -> _Device | None:
    nvml = open_nvml()
    handle = None if nvml is None else ask(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    return None if handle is None else _Device(nvml, handle)


def _union(values: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({one for several in values for one in several}))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
