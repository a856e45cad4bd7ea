"""The order of plain, counted and profiled steps in a profile.

warm-up | measured (as they are) | one is counted | for each profiled one: one to settle, profiled

To count a step, and to read the events of a profiled one, takes small blocks out of the heap, so
that the next step of SD2 on a CPU finds its large ones broken up and waits for new pages of the
kernel: time that is not the operators'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from sdbench.measure.phases import OTHER, PhaseClock
from sdbench.measure.timer import CudaMarks, StepTimer
from sdbench.measure.watch import Observer, StepWatch
from sdbench.tasks.profile.count import WorkCounter
from sdbench.tasks.profile.events import PHASE_RANGE, StepEvents

NUM_COUNTED_STEPS = 1


class PhaseMarks(PhaseClock):
    """Knows the phase that the step is in and, on request, tells it to the profiler.

    It measures no times itself, and so never waits for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = OTHER
        self._range: Any = None

    def switch(self, phase: str) -> str:
        """Go from one phase to another; the former is returned."""
        previous, self.current = self.current, phase
        if self._range is not None:
            self._close()
            self._open()
        return previous

    @contextlib.contextmanager
    def tell_profiler(self) -> Iterator[None]:
        """While the block runs, every phase is a range in the profiler's events."""
        self._open()
        try:
            yield
        finally:
            self._close()

    def _open(self) -> None:
        self._range = torch.profiler.record_function(PHASE_RANGE + self.current)
        self._range.__enter__()

    def _close(self) -> None:
        self._range.__exit__(None, None, None)
        self._range = None


class ProfiledSteps:
    """An observer of the steps that counts and profiles those behind the measured window."""

    def __init__(
        self,
        phases: PhaseMarks,
        *,
        num_plain_steps: int,
        num_profiled_steps: int,
        device_type: str,
        trace_file: Path | None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            phases: Tells the phase.
            num_plain_steps: Warm-up and measured steps.
            num_profiled_steps: Steps under the profiler, 1 or more.
            device_type: ``cuda`` or ``cpu``.
            trace_file: Gets torch's trace of the last step, if there is one.
        """
        self.counter = WorkCounter(phase=lambda: phases.current, device_type=device_type)
        self.events: StepEvents | None = None
        self._phases = phases
        self._first = num_plain_steps
        self._first_settling = num_plain_steps + NUM_COUNTED_STEPS
        self._end = self._first_settling + 2 * num_profiled_steps
        self._device_type = device_type
        self._trace_file = trace_file
        self._step = contextlib.ExitStack()

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._end

    def loop_begins(self) -> None:
        """The first step is always a plain one."""

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """End what this step ran under, and begin what the next one does."""
        self._step.close()
        following = index + 1
        if following == self._first:
            # Compiled code is run as the operators that it was made from: only those can be seen.
            self._step.enter_context(torch.compiler.set_stance("force_eager"))
            self._step.enter_context(self.counter)
        elif self._first < following < self._end and (following - self._first_settling) % 2 == 1:
            self._step.enter_context(self._profile(is_last=following + 1 == self._end))

    def __enter__(self) -> ProfiledSteps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An engine that ended with an error ended within a step.
        self._step.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _profile(self, *, is_last: bool) -> Iterator[None]:
        """One session a step: its events are added up and gone before the next one begins."""
        on_gpu = self._device_type == "cuda"
        wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        wait()
        session = torch.profiler.profile(activities=activities, record_shapes=True)
        with session as profiler, self._phases.tell_profiler():
            yield
            wait()
        if self.events is None:
            counted = {operator for operator, _ in self.counter.work}
            self.events = StepEvents(counted, device_type=self._device_type)
        self.events.add(profiler.events())
        if is_last and self._trace_file is not None:
            profiler.export_chrome_trace(str(self._trace_file))


def make_watch(
    steps: ProfiledSteps,
    *,
    phases: PhaseMarks,
    num_warmup_steps: int,
    num_measured_steps: int,
    device_type: str,
    observers: list[Observer],
) -> StepWatch:
    """A watch for the engine.

    Args:
        steps: Is told of every step.
        phases: Is told of every phase.
        num_warmup_steps: Steps before the measured window.
        num_measured_steps: Steps in it.
        device_type: ``cuda`` or ``cpu``.
        observers: Are told of every step too.
    """
    timer = StepTimer(num_warmup_steps=num_warmup_steps, num_measured_steps=num_measured_steps)
    if device_type == "cuda":
        timer.use_device(synchronize=torch.cuda.synchronize, marks=CudaMarks())
    return StepWatch(
        timer,
        phases=phases,
        observers=[*observers, steps],
        gpu_monitor=None,
        num_steps=steps.num_steps,
    )
