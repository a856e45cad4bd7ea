"""What NVML tells about a GPU, with a fake NVML that answers as a driver does."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from sdbench.measure.gpu_monitor import GpuMonitor, GpuReadings, merge_readings


class NVMLError(Exception):
    """As pynvml raises for what a GPU does not support."""


class FakeNvml(SimpleNamespace):
    """A driver whose answers are a table; what is not in it is not supported."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*args):
            if name not in self.answers:
                raise NVMLError(name)
            value = self.answers[name]
            return value() if callable(value) else value

        return answer


def read(monkeypatch, answers, *, period_s=10.0, seconds=0.0):
    energy_mj = iter([1_000_000, 1_700_000])
    basic = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetTotalEnergyConsumption": lambda: next(energy_mj),
    }
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(answers={**basic, **answers}))
    monitor = GpuMonitor(device_uuid="x", period_s=period_s)
    monitor.start()
    time.sleep(seconds)
    monitor.stop()
    return monitor.read()


def test_readings_have_our_units(monkeypatch):
    readings = read(
        monkeypatch,
        {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetPowerUsage": 690_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
            "nvmlDeviceGetComputeRunningProcesses": ["this one"],
        },
    )
    assert readings == GpuReadings(
        utilization_percent=97.0,
        power_w=pytest.approx(690.0),
        power_limit_w=700.0,
        default_power_limit_w=700.0,
        energy_j=pytest.approx(700.0),
        temperature_c=61,
        sm_clock_mhz=1755,
        max_sm_clock_mhz=1980,
        throttle_reasons=("power cap",),
        num_other_processes=0,
    )
    # A GPU under load stands at its power cap: that is its normal state.
    assert not readings.is_throttled and not readings.is_shared


@pytest.mark.parametrize("reasons", [0x8, 0x20, 0x40, 0x80, 0x44])
def test_heat_and_hardware_are_throttling(monkeypatch, reasons):
    readings = read(monkeypatch, {"nvmlDeviceGetCurrentClocksThrottleReasons": reasons})
    assert readings.is_throttled


def test_a_lowered_power_limit_is_throttling():
    assert GpuReadings(power_limit_w=400.0, default_power_limit_w=700.0).is_throttled
    assert not GpuReadings(power_limit_w=400.0).is_throttled  # whether it is lower is not known


def test_a_neighbour_makes_a_gpu_shared(monkeypatch):
    answers = {"nvmlDeviceGetComputeRunningProcesses": ["this one", "another"]}
    assert read(monkeypatch, answers).is_shared


def test_what_a_gpu_does_not_tell_is_none(monkeypatch):
    readings = read(monkeypatch, {})
    assert readings.power_w is None and readings.utilization_percent is None
    assert readings.num_other_processes is None and not readings.is_shared
    assert readings.throttle_reasons is None and not readings.is_throttled


def test_a_container_that_sees_no_process_knows_of_no_neighbours(monkeypatch):
    readings = read(monkeypatch, {"nvmlDeviceGetComputeRunningProcesses": []})
    assert readings.num_other_processes is None


def test_each_window_is_read_from_its_own_start(monkeypatch):
    powers = iter([100_000, 300_000])
    energy_mj = iter([1000, 2000, 5000])
    nvml = FakeNvml(
        answers={
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetPowerUsage": lambda: next(powers),
            "nvmlDeviceGetTotalEnergyConsumption": lambda: next(energy_mj),
        }
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monitor = GpuMonitor(device_uuid="x", period_s=100.0)
    monitor.start()
    monitor.start()  # the first window turned out to be warm-up
    readings = monitor.read()
    monitor.stop()
    assert (readings.power_w, readings.energy_j) == (100.0, 3.0)


def test_samples_are_taken_while_it_runs(monkeypatch):
    powers = iter([100_000, 200_000, 300_000] + [300_000] * 1000)
    readings = read(
        monkeypatch,
        {"nvmlDeviceGetPowerUsage": lambda: next(powers)},
        period_s=0.01,
        seconds=0.2,
    )
    assert 200.0 < readings.power_w < 300.0


def test_without_nvml_there_are_no_readings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = GpuMonitor(device_uuid="x")
    monitor.start()
    monitor.stop()
    assert monitor.read() is None


def test_the_gpus_of_a_run_are_merged():
    first = GpuReadings(
        power_w=600.0, energy_j=10.0, temperature_c=60, num_other_processes=0, throttle_reasons=()
    )
    second = GpuReadings(
        power_w=700.0,
        energy_j=20.0,
        temperature_c=80,
        num_other_processes=1,
        throttle_reasons=("power cap",),
    )
    merged = merge_readings([first, second])
    assert (merged.power_w, merged.energy_j, merged.temperature_c) == (650.0, 30.0, 80)
    assert (merged.num_other_processes, merged.throttle_reasons) == (1, ("power cap",))
    # The energy of one GPU is not that of the run.
    assert merge_readings([first, None]).energy_j is None
    assert merge_readings([None, None]) is None
