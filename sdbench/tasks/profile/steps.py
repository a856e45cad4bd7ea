"""`ProfiledSteps`: the order of plain, counted and profiled steps in a profile.

warm-up | measured (as they are) | one is counted | for each profiled one: one to settle, profiled

Counting a step and reading the events of a profiled one take small blocks out of the heap. The
next step of SD2 on a CPU finds the large blocks broken up and waits for new pages of the kernel,
which is not time of its operators: hence the steps to settle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from sdbench.measure.phases import OTHER, PhaseClock
from sdbench.tasks.profile.events import PHASE_RANGE, StepEvents
from sdbench.tasks.profile.work import WorkCounter

NUM_COUNTED_STEPS = 1


class PhaseMarks(PhaseClock):
    """Knows the phase that the step is in and, on request, tells it to the profiler.

    It measures no times itself, so it never waits for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = OTHER
        self._range: Any = None

    def switch(self, phase: str) -> str:
        """Go to another phase; return the one that ends."""
        previous, self.current = self.current, phase
        if self._range is not None:
            self._close()
            self._open()
        return previous

    @contextlib.contextmanager
    def tell_profiler(self) -> Iterator[None]:
        """Make every phase in the block a range in the profiler's events."""
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
    """An observer that counts and profiles the steps after the measured window.

    Attributes:
        num_steps: Steps of the whole run.
        counter: Has counted the work of a step.
        events: Of the profiled steps; None before the first.
    """

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
        self.num_steps = num_plain_steps + NUM_COUNTED_STEPS + 2 * num_profiled_steps
        self.counter = WorkCounter(phase=lambda: phases.current, device_type=device_type)
        self.events: StepEvents | None = None
        self._phases = phases
        self._first = num_plain_steps
        self._device_type = device_type
        self._trace_file = trace_file
        self._step = contextlib.ExitStack()

    def loop_begins(self) -> None:
        """The first step is always a plain one."""

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """End the counting or profiling of this step, and begin it for the next one."""
        self._step.close()
        following = index + 1
        if following == self._first:
            # Compiled code runs as the operators that it was made from: only they can be seen.
            self._step.enter_context(torch.compiler.set_stance("force_eager"))
            self._step.enter_context(self.counter)
        elif self._first < following < self.num_steps and (following - self._first) % 2 == 0:
            self._step.enter_context(self._profile(is_last=following + 1 == self.num_steps))

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
        """Profile one step; its events are added up and freed before the next one begins."""
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
