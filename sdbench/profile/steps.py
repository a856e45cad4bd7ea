"""`ProfiledSteps` counts and profiles steps; `StepEvents` adds up the profiler's events.

warm-up | measured (unprofiled) | one is counted | for each profiled one: one to settle, profiled

Counting a step and reading profiler events fragment the heap. The next step of SD2 on a CPU then
waits for new pages from the kernel, which is not time of its operators: hence the steps to settle.

Events are nested: autograd calls operators, and operators call others. The topmost event that was
counted (work.py) gets the time of all events below it. On a GPU the time is that of the kernels
that an event launched.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from sdbench.measure.phases import OTHER, PhaseClock
from sdbench.profile.roofline import Operator, Timing
from sdbench.profile.work import WorkCounter

NUM_COUNTED_STEPS = 1
# Prefix of the profiler's ranges that mark the phase of a step.
PHASE_RANGE = "sdbench: "
# Events in which torch only walks from one operator to the next.
WALKS = ("autograd::", "torch::autograd::")
SECONDS_PER_US = 1e-6

PhaseFinder = Callable[[Any], str]
# Operators and their times in microseconds.
Found = list[tuple[Operator, float]]


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
        counter: Counts the work of a step.
        step: Context to enter around the training: an engine that fails ends within a step.
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
        """Count one step after the plain ones, and profile 1 or more; the last has a trace."""
        self.num_steps = num_plain_steps + NUM_COUNTED_STEPS + 2 * num_profiled_steps
        self.counter = WorkCounter(phase=lambda: phases.current, device_type=device_type)
        self.events: StepEvents | None = None
        self._phases = phases
        self._first = num_plain_steps
        self._device_type = device_type
        self._trace_file = trace_file
        self.step = contextlib.ExitStack()

    def loop_begins(self) -> None:
        """The first step is always a plain one."""

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """End the counting or profiling of this step, and begin it for the next one."""
        self.step.close()
        following = index + 1
        if following == self._first:
            # Compiled code runs as the operators that it was made from: only they can be seen.
            self.step.enter_context(torch.compiler.set_stance("force_eager"))
            self.step.enter_context(self.counter)
        elif self._first < following < self.num_steps and (following - self._first) % 2 == 0:
            self.step.enter_context(self._profile(is_last=following + 1 == self.num_steps))

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


class StepEvents:
    """Adds up the events of profiled steps."""

    def __init__(self, counted: Set[Operator], *, device_type: str) -> None:
        """Take the counted operators, and the device whose time is taken: ``cuda`` or ``cpu``."""
        self._counted = counted
        self._on_gpu = device_type == "cuda"
        self._num_steps = 0
        self._steps_us = 0.0
        # The times of all calls in microseconds.
        self._operators: dict[Operator, list[float]] = collections.defaultdict(list)
        self._kernels: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, events: Sequence[Any]) -> None:
        """Add the profiler's events of one step, recorded with shapes and within phase ranges."""
        on_host = [event for event in events if event.device_type == DeviceType.CPU]
        ranges = [event for event in on_host if event.name.startswith(PHASE_RANGE)]
        ranges.sort(key=lambda event: event.time_range.start)
        self._num_steps += 1
        self._steps_us += ranges[-1].time_range.end - ranges[0].time_range.start
        starts = [event.time_range.start for event in ranges]
        names = [event.name.removeprefix(PHASE_RANGE) for event in ranges]

        def phase_of(event: Any) -> str:
            # By time, not by what an event is nested in: on a GPU the backward pass is launched
            # from a thread of its own, which is in no range.
            return names[max(0, bisect.bisect_right(starts, event.time_range.start) - 1)]

        for event in on_host:
            if event.cpu_parent is None:
                for operator, time_us in self._find_operators(event, phase_of):
                    if time_us or operator in self._counted:
                        self._operators[operator].append(time_us)
        for event in events:
            # The ranges of the host are on the GPU's time line, too.
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                self._kernels[event.name].append(event.time_range.elapsed_us())

    @property
    def step_s(self) -> float:
        """Length of a profiled step in seconds; the profiler makes it longer."""
        return self._steps_us / self._num_steps * SECONDS_PER_US

    @property
    def operators(self) -> dict[Operator, Timing]:
        """Operators, counted or not, and kernels of no operator, in an average step."""
        return self._per_step(self._operators)

    @property
    def kernels(self) -> dict[str, Timing]:
        """The kernels and copies of a GPU by name, in an average step."""
        return self._per_step(self._kernels)

    def _per_step(self, times_us: Mapping[Any, list[float]]) -> dict[Any, Timing]:
        return {
            key: Timing(len(calls) / self._num_steps, sum(calls) * SECONDS_PER_US / self._num_steps)
            for key, calls in times_us.items()
        }

    def _find_operators(self, event: Any, phase_of: PhaseFinder) -> Found:
        """The operators in an event and below it, counted or not."""
        phase = phase_of(event)
        shapes = _shapes(event.input_shapes)
        operator = self._find(phase, event.name, shapes)
        if operator is not None:
            return [(operator, self._time_us(event))]
        found = [
            one for child in event.cpu_children for one in self._find_operators(child, phase_of)
        ]
        has_counted = any(operator in self._counted for operator, _ in found)
        if not has_counted and _is_operator(event.name):
            return [(Operator(phase, event.name, shapes), self._time_us(event))]
        if self._on_gpu:
            found += [(Operator(phase, k.name, ()), k.duration) for k in event.kernels]
        return found

    def _find(self, phase: str, name: str, shapes: tuple[tuple[int, ...], ...]) -> Operator | None:
        """The counted operator that an event is a call of."""
        candidates = (
            Operator(phase, name, shapes),
            # Compiled code hands an operator its output as well, after the inputs.
            Operator(phase, name, shapes[:-1]),
            # Without a dispatch mode, autograd adds up gradients in place. The bytes are the same.
            Operator(phase, name.removesuffix("_"), shapes),
        )
        return next((operator for operator in candidates if operator in self._counted), None)

    def _time_us(self, event: Any) -> float:
        return event.device_time_total if self._on_gpu else event.cpu_time_total


def _is_operator(name: str) -> bool:
    """Whether it is an operator or a kernel of inductor, e.g. triton_poi_fused_add_1."""
    return ("::" in name and not name.startswith(WALKS)) or "_fused_" in name


def _shapes(input_shapes: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """The shapes of tensors, without numbers and lists of tensors (lists in some versions)."""
    return tuple(
        tuple(shape)
        for shape in input_shapes or []
        if shape and all(isinstance(size, int) for size in shape)
    )
