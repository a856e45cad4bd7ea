"""Times of the operators of a step, from the events of torch's profiler.

Events are nested: autograd calls operators, and operators call others. Going down from the top, the
first event that was counted (count.py) has the time of all that are below it. On a
GPU the time is that of the kernels which an event launched.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from torch.autograd import DeviceType

from sdbench.tasks.profile.roofline import Operator, Timing

# Ranges whose name begins so say which phase the step is in.
PHASE_RANGE = "sdbench: "
# Events in which torch only walks from one operator to the next.
WALKS = ("autograd::", "torch::autograd::")
SECONDS_PER_US = 1e-6

Shapes = tuple[tuple[int, ...], ...]
PhaseFinder = Callable[[Any], str]
Found = list[tuple[Operator, float]]


class StepEvents:
    """Adds up the events of profiled steps."""

    def __init__(self, counted: Set[Operator], *, device_type: str) -> None:
        """Begin with nothing.

        Args:
            counted: The operators to be found.
            device_type: Whose time is meant: ``cuda`` or ``cpu``.
        """
        self._counted = counted
        self._on_gpu = device_type == "cuda"
        self._num_steps = 0
        self._steps_us = 0.0
        self._matched = _Sums()
        self._unmatched = _Sums()
        self._kernels = _Sums()

    def add(self, events: Sequence[Any]) -> None:
        """Take in the events of one step.

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
                self._matched.add(matched)
                self._unmatched.add((key, us) for key, us in unmatched if us)
        self._kernels.add(
            (event.name, event.time_range.elapsed_us())
            for event in events
            # The ranges of the host are drawn once more on the GPU's time line.
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        )

    @property
    def step_s(self) -> float:
        """Length of a profiled step in seconds; the profiler makes it longer."""
        return self._steps_us / self._num_steps * SECONDS_PER_US

    @property
    def matched(self) -> dict[Operator, Timing]:
        """Counted operators in an average step."""
        return self._matched.per_step(self._num_steps)

    @property
    def unmatched(self) -> dict[Operator, Timing]:
        """Operators, and kernels of no operator, that were not counted, in an average step."""
        return self._unmatched.per_step(self._num_steps)

    @property
    def kernels(self) -> dict[str, Timing]:
        """The kernels and copies of a GPU by name, in an average step."""
        return self._kernels.per_step(self._num_steps)

    def _split(self, event: Any, phase_of: PhaseFinder) -> tuple[Found, Found]:
        """What was counted of an event and of those below it, and what was not, with its time."""
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

    def _find(self, phase: str, name: str, shapes: Shapes) -> Operator | None:
        """The counted operator that an event is a call of."""
        candidates = (
            Operator(phase, name, shapes),
            # Compiled code hands an operator its output as well, behind the inputs.
            Operator(phase, name, shapes[:-1]),
            # Where nobody looks, autograd adds up gradients in place. The bytes are the same.
            Operator(phase, name.removesuffix("_"), shapes),
        )
        return next((operator for operator in candidates if operator in self._counted), None)

    def _time_us(self, event: Any) -> float:
        return event.device_time_total if self._on_gpu else event.cpu_time_total


class _Sums:
    """Calls and time by key."""

    def __init__(self) -> None:
        self._calls: collections.Counter[Any] = collections.Counter()
        self._times_us: dict[Any, float] = collections.defaultdict(float)

    def add(self, found: Iterable[tuple[Any, float]]) -> None:
        for key, time_us in found:
            self._calls[key] += 1
            self._times_us[key] += time_us

    def per_step(self, num_steps: int) -> dict[Any, Timing]:
        return {
            key: Timing(calls / num_steps, self._times_us[key] * SECONDS_PER_US / num_steps)
            for key, calls in self._calls.items()
        }


def _is_operator(name: str) -> bool:
    """Also the kernels that inductor makes: graph_0_cpp_fused_add_1, triton_poi_fused_add_1."""
    return ("::" in name and not name.startswith(WALKS)) or "_fused_" in name


def _shapes(input_shapes: Sequence[Any]) -> Shapes:
    """Without numbers and lists of tensors, of which some versions tell a list of shapes."""
    return tuple(
        tuple(shape)
        for shape in input_shapes or []
        if shape and all(isinstance(size, int) for size in shape)
    )
