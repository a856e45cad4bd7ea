"""`StartupClock` splits the time from the command to the first measured step into phases.

All time since the process began is in one of the phases, so they add up to the whole.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from sdbench.ranks.launcher import find_launcher
from sdbench.ranks.ray_cluster import RAY_LAUNCH_S

# From the start of the launcher, if there is one, to the start of this process.
LAUNCHER = "launcher"
INTERPRETER = "interpreter"
IMPORTS = "imports"
PLAN = "plan"
PEAK = "peak"
BUILD = "build"
ENGINE = "engine"
FIRST_STEP = "first_step"
WARMUP = "warmup"  # as in timer.py, whose import would load numpy
PHASES = (LAUNCHER, INTERPRETER, IMPORTS, PLAN, PEAK, BUILD, ENGINE, FIRST_STEP, WARMUP)


class StartupClock:
    """Adds up the time of each phase before the first measured step of one rank."""

    def __init__(
        self, *, before_main_s: dict[str, float], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Begin, as early as possible, with the seconds of earlier phases."""
        self._clock = clock
        self._since_s = clock()
        self._seconds = dict.fromkeys(PHASES, 0.0) | before_main_s
        self._step_times_s: list[float] = []

    def ends(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        self._seconds[phase] += self._lap()

    def loop_begins(self) -> None:
        """The engine is about to begin the first step."""
        self.ends(ENGINE)

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """A step has ended. Whether it was warm-up may be decided later."""
        if index == 0 and phase == WARMUP:
            loss()  # waits for the device, as the end of the warm-up does
        self._step_times_s.append(self._lap())

    def summary(self, *, num_warmup_steps: int) -> dict[str, Any]:
        """The record's `startup`, which ends with the warm-up."""
        first_s, rest_s = 0.0, 0.0
        if num_warmup_steps > 0:
            first_s, *rest = self._step_times_s[:num_warmup_steps]
            rest_s = sum(rest)
        seconds = {**self._seconds, FIRST_STEP: first_s, WARMUP: rest_s}
        return {
            "total_s": sum(seconds.values()),
            "seconds": seconds,
            "compile_s": compile_seconds(),
        }

    def _lap(self) -> float:
        now_s = self._clock()
        lap_s, self._since_s = now_s - self._since_s, now_s
        return lap_s


def seconds_before_now() -> dict[str, float]:
    """Seconds of the phases `LAUNCHER` and `INTERPRETER`, which end now."""
    import psutil

    if RAY_LAUNCH_S in os.environ:  # Ray may have started this process long before
        return {LAUNCHER: float(os.environ[RAY_LAUNCH_S]), INTERPRETER: 0.0}
    interpreter_s = _age_s(psutil.Process())
    launcher = find_launcher()
    launcher_s = 0.0 if launcher is None else _age_s(launcher) - interpreter_s
    return {LAUNCHER: launcher_s, INTERPRETER: interpreter_s}


def _age_s(process: Any) -> float:
    import psutil

    if not hasattr(time, "CLOCK_BOOTTIME"):
        return time.time() - process.create_time()
    # psutil adds the boot time, which is rounded to seconds, to the exact start since boot; it is
    # subtracted again.
    since_boot_s = process.create_time() - psutil.boot_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s


def compile_seconds() -> float:
    """Seconds that torch.compile has taken in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else dynamo.calculate_time_spent()["total_wall_time"]


def breaks_graphs() -> bool:
    """Whether torch.compile has compiled code of this process in pieces, or left some of it out."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["graph_break"])
