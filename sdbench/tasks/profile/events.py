"""`StepEvents`: times of the operators of a step, from the events of torch's profiler.

Events are nested: autograd calls operators, and operators call others. Going down from the top, the
first event that was counted (work.py) has the time of all that are below it. On a GPU the time is
the time of the kernels that an event launched.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch.autograd import DeviceType

from sdbench.tasks.profile.roofline import Operator, Timing

# Ranges whose name begins so say which phase the step is in.
PHASE_RANGE = "sdbench: "
# Events in which torch only walks from one operator to the next.
WALKS = ("autograd::", "torch::autograd::")
SECONDS_PER_US = 1e-6

PhaseFinder = Callable[[Any], str]
Found = list[tuple[Operator, float]]


class StepEvents:
    """Adds up the events of profiled steps."""

    def __init__(self, counted: Set[Operator], *, device_type: str) -> None:
        """Begin without events.

        Args:
            counted: The operators to be found.
            device_type: The device whose time is taken: ``cuda`` or ``cpu``.
        """
        self._counted = counted
        self._on_gpu = device_type == "cuda"
        self._num_steps = 0
        self._steps_us = 0.0
        # The times of all calls in microseconds.
        self._matched: dict[Operator, list[float]] = collections.defaultdict(list)
        self._unmatched: dict[Operator, list[float]] = collections.defaultdict(list)
        self._kernels: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, events: Sequence[Any]) -> None:
        """Add the events of one step.

        Args:
            events: `torch.profiler.profile.events()`, recorded with shapes, under phase ranges that
                cover the step without a gap.
        """
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
                matched, unmatched = self._split(event, phase_of)
                for operator, time_us in matched:
                    self._matched[operator].append(time_us)
                for operator, time_us in unmatched:
                    if time_us:
                        self._unmatched[operator].append(time_us)
        for event in events:
            # The ranges of the host are on the GPU's time line, too.
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                self._kernels[event.name].append(event.time_range.elapsed_us())

    @property
    def step_s(self) -> float:
        """Length of a profiled step in seconds; the profiler makes it longer."""
        return self._steps_us / self._num_steps * SECONDS_PER_US

    @property
    def matched(self) -> dict[Operator, Timing]:
        """Counted operators in an average step."""
        return self._per_step(self._matched)

    @property
    def unmatched(self) -> dict[Operator, Timing]:
        """Operators, and kernels of no operator, that were not counted, in an average step."""
        return self._per_step(self._unmatched)

    @property
    def kernels(self) -> dict[str, Timing]:
        """The kernels and copies of a GPU by name, in an average step."""
        return self._per_step(self._kernels)

    def _per_step(self, times_us: Mapping[Any, list[float]]) -> dict[Any, Timing]:
        return {
            key: Timing(len(calls) / self._num_steps, sum(calls) * SECONDS_PER_US / self._num_steps)
            for key, calls in times_us.items()
        }

    def _split(self, event: Any, phase_of: PhaseFinder) -> tuple[Found, Found]:
        """The counted operators in an event and below it, and the others."""
        phase = phase_of(event)
        shapes = _shapes(event.input_shapes)
        operator = self._find(phase, event.name, shapes)
        if operator is not None:
            return [(operator, self._time_us(event))], []
        below = [self._split(child, phase_of) for child in event.cpu_children]
        matched = [found for part, _ in below for found in part]
        unmatched = [found for _, part in below for found in part]
        if not matched and _is_operator(event.name):
            return [], [(Operator(phase, event.name, shapes), self._time_us(event))]
        if self._on_gpu:
            launched = [(Operator(phase, k.name, ()), k.duration) for k in event.kernels]
            unmatched += launched
        return matched, unmatched

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
    """Also for kernels that inductor makes: graph_0_cpp_fused_add_1, triton_poi_fused_add_1."""
    return ("::" in name and not name.startswith(WALKS)) or "_fused_" in name


def _shapes(input_shapes: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Without numbers and lists of tensors, which are lists of shapes in some versions."""
    return tuple(
        tuple(shape)
        for shape in input_shapes or []
        if shape and all(isinstance(size, int) for size in shape)
    )
