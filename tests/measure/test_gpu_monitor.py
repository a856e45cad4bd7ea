"""Readings of a GPU, with a fake NVML that answers as a driver does."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import pytest

from sdbench.measure.gpu_monitor import OVER_RANKS, GpuMonitor, merge_readings
from sdbench.measure.summary import Measurements, summarize
from sdbench.measure.timer import Step, Timings
from sdbench.record.formulas import is_throttled


class NVMLError(Exception):
    """As pynvml raises for values that a GPU does not support."""


class FakeNvml(SimpleNamespace):
    """A driver whose answers are a table; it supports nothing else."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*args):
            if name not in self.answers:
                raise NVMLError(name)
            value = self.answers[name]
            return next(value) if hasattr(value, "__next__") else value

        return answer


@pytest.fixture
def monitor(monkeypatch):
    """Makes a monitor of a GPU with these answers, and starts it."""
    started = []

    def monitor(*, period_s=10.0, **answers):
        device = {f"nvmlDeviceGet{name}": value for name, value in answers.items()}
        basic = {"nvmlInit": None, "nvmlDeviceGetHandleByUUID": "handle"}
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(answers=basic | device))
        made = GpuMonitor(device_uuid="x", period_s=period_s)
        made.start()
        started.append(made)
        return made

    yield monitor
    for one in started:
        one.stop()


def read(monitor):
    monitor.read()
    return monitor.readings


UNKNOWN = dict.fromkeys(OVER_RANKS)


def test_readings_have_our_units(monitor):
    started = monitor(
        TotalEnergyConsumption=iter([1_000_000, 1_700_000]),
        UtilizationRates=SimpleNamespace(gpu=97),
        PowerUsage=690_000,
        EnforcedPowerLimit=700_000,
        PowerManagementDefaultLimit=700_000,
        Temperature=61,
        ClockInfo=1755,
        MaxClockInfo=1980,
        CurrentClocksThrottleReasons=0x4,
        ComputeRunningProcesses=["this one"],
    )
    started.stop()
    readings = read(started)
    assert readings == {
        "utilization_percent": 97.0,
        "power_w": pytest.approx(690.0),
        "power_limit_w": 700.0,
        "default_power_limit_w": 700.0,
        "energy_j": pytest.approx(700.0),
        "temperature_c": 61,
        "sm_clock_mhz": 1755,
        "max_sm_clock_mhz": 1980,
        "throttle_reasons": ("power cap",),
        "num_other_processes": 0,
    }
    # A GPU under load runs at its power cap: that is its normal state.
    assert not is_throttled(readings)


@pytest.mark.parametrize("reasons", [0x8, 0x20, 0x40, 0x80, 0x44])
def test_heat_and_hardware_are_throttling(monitor, reasons):
    assert is_throttled(read(monitor(CurrentClocksThrottleReasons=reasons)))
    # As is a lowered power limit; whether it is lower is not known without the default.
    limited = UNKNOWN | {"power_limit_w": 400.0}
    assert is_throttled(limited | {"default_power_limit_w": 700.0})
    assert not is_throttled(limited)


def test_a_neighbour_makes_a_gpu_shared(monitor):
    readings = read(monitor(ComputeRunningProcesses=["this one", "another"]))
    assert readings["num_other_processes"] == 1
    steps = (Step(0, "measured", 1.0, 0.0, 0.5),)
    summary = summarize(
        Measurements(Timings(steps, window_s=1.0), 1, 1.0, readings),
        config={"batch_size": 1},
        num_devices=1,
        flops_per_image=1.0,
        peak_tflops=None,
    )
    assert summary["flags"] == ["shared"]


@pytest.mark.parametrize("answers", [{}, {"ComputeRunningProcesses": []}], ids=str)
def test_what_a_gpu_does_not_tell_is_none(monitor, answers):
    readings = read(monitor(**answers))  # in a container NVML may list no process
    assert readings == UNKNOWN
    assert not is_throttled(readings)


def test_each_window_is_read_from_its_own_start(monitor):
    started = monitor(PowerUsage=iter([100_000]), TotalEnergyConsumption=iter([1000, 2000, 5000]))
    started.start()  # the first window turned out to be warm-up
    readings = read(started)
    assert (readings["power_w"], readings["energy_j"]) == (100.0, 3.0)


def test_samples_are_taken_while_it_runs(monitor):
    powers = [100_000, 200_000, 300_000] + [300_000] * 1000
    started = monitor(PowerUsage=iter(powers), period_s=0.01)
    time.sleep(0.2)
    started.stop()
    assert 200.0 < read(started)["power_w"] < 300.0


def test_without_nvml_there_are_no_readings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = GpuMonitor(device_uuid="x")
    monitor.start()
    monitor.stop()
    assert read(monitor) is None


def test_the_gpus_of_a_run_are_merged():
    first = UNKNOWN | {"power_w": 600.0, "energy_j": 10.0, "temperature_c": 60}
    second = UNKNOWN | {"power_w": 700.0, "energy_j": 20.0, "temperature_c": 80}
    processes = {"num_other_processes": 0, "throttle_reasons": ()}
    others = {"num_other_processes": 1, "throttle_reasons": ("power cap",)}
    merged = merge_readings([first | processes, second | others])
    assert merged == first | others | {"power_w": 650.0, "energy_j": 30.0, "temperature_c": 80}
    # The energy of one GPU is not that of the run.
    assert merge_readings([first, None])["energy_j"] is None
    assert merge_readings([None, None]) is None


def test_neighbours_on_a_gpu_are_named_unless_the_container_has_other_numbers(monitor):
    def describe(*pids):
        processes = [SimpleNamespace(pid=pid) for pid in pids]
        return monitor(ComputeRunningProcesses=processes).describe_others()

    own = os.getpid()
    assert describe() is None and describe(own) is None and describe(7) is None
    assert describe(own, 7) == "another process computes on the GPU (pid 7)"
    assert describe(8, own, 7) == "2 other processes compute on the GPU (pid 8, pid 7)"
    assert describe(8, 7) == "another process computes on the GPU"
