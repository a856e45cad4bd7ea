"""`StepTimer` times each step of a measurement, `PeriodTimer` the periods of a training run.

In a measurement the host waits for the device at the two edges of the window only. In between, an
event per step is recorded on a GPU and read after the window has closed; on a CPU the host clock is
read. Warm-up is before the window.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import RunError
from sdbench.base.shape import Shape
from sdbench.record.formulas import MEASURED, PROFILED, WARMUP
from sdbench.record.store import INVALID
from sdbench.statistics import intervals

if TYPE_CHECKING:
    from torch import Tensor

AFTER = "after"
TRAINED = "trained"

# A full window closes, becomes warm-up before a new window, or is extended to a number of steps.
CLOSE = "close"
WARM_UP = "warm up"

# Number of losses that the device has room for at first.
NUM_AT_FIRST = 1024


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step on one rank, or the slowest over all ranks after `merge_ranks`.

    Its time runs from the end of the previous step to its own end. For `data_wait_s` of it the host
    waited for the data loader; a GPU may have been busy with earlier work meanwhile. The loss is
    the mean over the global batch. `shape` is that of its pictures, in a run with buckets.
    """

    index: int
    phase: str
    step_time_s: float
    data_wait_s: float
    loss: float
    shape: Shape | None = None


@dataclasses.dataclass(frozen=True)
class Timings:
    """All steps of a run and the length of its measured window in seconds."""

    steps: tuple[Step, ...]
    window_s: float

    @property
    def measured(self) -> tuple[Step, ...]:
        """The steps inside the measured window."""
        return tuple(step for step in self.steps if step.phase == MEASURED)


@dataclasses.dataclass(frozen=True)
class Period:
    """Consecutive steps of a training run on one rank. The time excludes work between steps."""

    num_steps: int
    time_s: float
    data_wait_s: float
    losses: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class WindowPolicy:
    """Decides whether a full window closes, becomes warm-up or is extended.

    A window whose step times drift becomes warm-up, and one that is not precise enough is doubled,
    each up to a bound. All ranks decide alike, since they gather the step times of all.
    `target_precision` is the wanted half-width of the within-run interval as a fraction of the
    mean; None for a window of fixed length.
    """

    max_warmup_steps: int
    max_measured_steps: int
    target_precision: float | None
    gather: Callable[[Any], list[Any]]

    def __call__(self, step_times_s: Sequence[float], num_warmup_steps: int) -> str | int:
        """Decide on a full window: `CLOSE`, `WARM_UP`, or a longer length of the window."""
        slowest_s = slowest_steps(self.gather(list(step_times_s)))
        steadiness = intervals.check_steady(slowest_s)
        num_steps = len(slowest_s)
        has_drifted = steadiness is not None and not steadiness.is_steady
        if has_drifted and num_warmup_steps + num_steps <= self.max_warmup_steps:
            return WARM_UP
        if self.target_precision is None or num_steps >= self.max_measured_steps:
            return CLOSE
        if intervals.is_precise(slowest_s, target=self.target_precision):
            return CLOSE
        return min(2 * num_steps, self.max_measured_steps)


class Losses:
    """One loss per step. Adding one does not wait for the device; reading waits.

    `first_not_finite` is the index of the first loss that is not finite among the losses read since
    `forgive`, or None.
    """

    def __init__(self) -> None:
        self.first_not_finite: int | None = None
        self._read: list[float] = []
        self._unread: Tensor | None = None
        self._num_unread = 0

    def __len__(self) -> int:
        return len(self._read) + self._num_unread

    def add(self, loss: Tensor) -> None:
        """Copy the loss of the next step, one number on the device."""
        import torch

        if self._unread is None:
            self._unread = loss.new_empty(NUM_AT_FIRST, dtype=torch.float64)
        elif self._num_unread == len(self._unread):
            self._unread = torch.cat([self._unread, torch.empty_like(self._unread)])
        self._unread[self._num_unread] = loss.detach().squeeze()
        self._num_unread += 1

    def read(self) -> list[float]:
        """All losses so far."""
        if self._num_unread:
            assert self._unread is not None
            new = self._unread[: self._num_unread].tolist()
            self._num_unread = 0
            bad = (index for index, loss in enumerate(new) if not math.isfinite(loss))
            if self.first_not_finite is None and (first := next(bad, None)) is not None:
                self.first_not_finite = len(self._read) + first
            self._read += new
        return self._read

    def forgive(self) -> None:
        """Check only later losses for values that are not finite."""
        self.read()
        self.first_not_finite = None

    def at(self, index: int) -> float:
        """The loss of one step."""
        return self._read[index] if index < len(self._read) else self.read()[index]


class CudaDevice:
    """The current GPU, timed by events on the current stream, which need no synchronisation."""

    def __init__(self) -> None:
        import torch

        self.synchronize = torch.cuda.synchronize  # waits until the device has finished all work
        self._make_event = torch.cuda.Event

    def mark(self) -> Any:
        """Record an event."""
        event = self._make_event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def elapsed_s(start: Any, end: Any) -> float:
        """Seconds between two events that have both completed."""
        return start.elapsed_time(end) / 1000  # elapsed_time is in milliseconds


class Timer:
    """Base of the timers of single steps and of periods; keeps the `losses` of the steps so far.

    `shape` is that of the pictures of the current step, in a run with buckets.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.losses = Losses()
        self.shape: Shape | None = None
        self._clock = clock
        self._wait_start_s = 0.0
        self._data_wait_s = 0.0

    def data_wait_begins(self) -> None:
        """The host asks the loader for the next batch."""
        self._wait_start_s = self._clock()

    def data_wait_ends(self) -> None:
        """A batch has arrived, or the epoch is over; a step may wait several times."""
        self._data_wait_s += self._clock() - self._wait_start_s

    @property
    def num_steps(self) -> int:
        """Steps that have ended so far."""
        return len(self.losses)


class StepTimer(Timer):
    """Times the steps of the warm-up, the measured window and the steps after it.

    Call `start` once, then for every step `data_wait_begins`, `data_wait_ends` and `step_ends`. At
    each edge of the window the losses are read.
    """

    def __init__(
        self,
        *,
        num_warmup_steps: int,
        num_measured_steps: int,
        num_profiled_steps: int = 0,
        policy: Callable[[Sequence[float], int], str | int] | None = None,
        device: Any = None,
        window_opens: Callable[[], None] = lambda: None,
        window_is_full: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Time nothing yet.

        Without a `WindowPolicy` a full window closes; without a `CudaDevice` the host's clock times
        the steps. `window_opens` is called before the first mark of each window, with the device
        idle, and `window_is_full` after the last mark of a full window.
        """
        assert num_warmup_steps >= 0 and num_measured_steps >= 1
        super().__init__(clock)
        self._num_measured_steps = num_measured_steps
        self._num_profiled_steps = num_profiled_steps
        self._window_start = num_warmup_steps
        self._window_end = num_warmup_steps + num_measured_steps
        self._policy = policy
        self._window_opens = window_opens
        self._window_is_full = window_is_full
        self._is_on_host = device is None
        # On a CPU work has ended when the host goes on.
        self._device = device or SimpleNamespace(
            mark=clock, synchronize=lambda: None, elapsed_s=lambda start, end: end - start
        )
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._data_waits_s: list[float] = []
        self._shapes: list[Shape | None] = []
        self._edge_s = 0.0
        self._window_s = 0.0
        self._is_closed = False

    def start(self) -> None:
        """The loop is about to ask for its first batch."""
        if self._window_start == 0:
            self._device.synchronize()
            self._window_opens()
        start, self._edge_s = self._mark()
        self._starts.append(start)

    def step_ends(self, *, loss: Tensor) -> None:
        """The optimizer step is done, or handed to a GPU; `loss` is the global batch's mean."""
        self.losses.add(loss)
        self._data_waits_s.append(self._data_wait_s)
        self._shapes.append(self.shape)
        self._data_wait_s = 0.0
        is_edge = self.num_steps in (self._window_start, self._window_end)
        if is_edge:
            self._device.synchronize()
        end, end_s = self._mark()
        self._ends.append(end)
        if not is_edge:
            self._starts.append(end)
            return
        if self.num_steps == self._window_end:
            self._window_s += end_s - self._edge_s
            self._window_is_full()
            self._decide()
        self.losses.read()
        if self.num_steps == self._window_start:
            self._window_opens()
        # The time between the two marks at an edge belongs to no step.
        start, self._edge_s = self._mark()
        self._starts.append(start)

    def _mark(self) -> tuple[Any, float]:
        """Mark the device, and return the mark and the host's time.

        On a CPU that is one reading: between two a busy machine may do something else, and the
        window would differ from the sum of its steps.
        """
        mark = self._device.mark()
        return mark, mark if self._is_on_host else self._clock()

    @property
    def num_steps_needed(self) -> int:
        """Number of warm-up, measured and profiled steps, as decided so far."""
        return self._window_end + self._num_profiled_steps

    def phase_of(self, index: int) -> str:
        """The phase of the step with this index, as decided so far."""
        if index < self._window_start:
            return WARMUP
        if index < self._window_end:
            return MEASURED
        return PROFILED if index < self.num_steps_needed else AFTER

    def timings(self) -> Timings:
        """The steps and the window of this rank; RunError if the loop ended too early."""
        if self.num_steps < self.num_steps_needed or not self._is_closed:
            raise RunError(
                f"the loop ended after {self.num_steps} of {self.num_steps_needed} steps "
                f"({self._window_start} warm-up, {self._num_profiled_steps} profiled)",
                status=INVALID,
            )
        return Timings(self.steps(), window_s=self._window_s)

    def steps(self) -> tuple[Step, ...]:
        """The steps that have ended so far; waits for the device."""
        self._device.synchronize()
        return tuple(
            Step(
                index=index,
                phase=self.phase_of(index),
                step_time_s=self._step_time_s(index),
                data_wait_s=self._data_waits_s[index],
                loss=loss,
                shape=self._shapes[index],
            )
            # After an error in `step_ends` there may be one loss more than ended steps.
            for index, loss in enumerate(self.losses.read()[: len(self._ends)])
        )

    def _decide(self) -> None:
        window = range(self._window_start, self._window_end)
        shapes = [self._shapes[index] for index in window]
        step_times_s = intervals.level([self._step_time_s(index) for index in window], shapes)
        decision = self._policy(step_times_s, self._window_start) if self._policy else CLOSE
        if decision == WARM_UP:
            self._window_start = self._window_end
            self._window_end += self._num_measured_steps
            self._window_s = 0.0
        elif decision == CLOSE:
            self._is_closed = True
        else:
            assert isinstance(decision, int) and decision > len(window)
            self._window_end = self._window_start + decision

    def _step_time_s(self, index: int) -> float:
        return self._device.elapsed_s(self._starts[index], self._ends[index])


class PeriodTimer(Timer):
    """Adds up the time of the steps, and reads the device only when a period ends.

    Replaces a `StepTimer`: a run of a million steps keeps no times of single steps. `train_s` are
    the seconds of training in the periods that have ended.
    """

    num_steps_needed = 0

    def __init__(
        self,
        *,
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Time nothing yet; `synchronize` waits for the device."""
        super().__init__(clock)
        self.train_s = 0.0
        self._synchronize = synchronize
        self._since_s = 0.0
        self._time_s = 0.0
        self._num_reported = 0

    def start(self) -> None:
        """The loop is about to ask for its first batch, or goes on after `pause`."""
        self._since_s = self._clock()

    def step_ends(self, *, loss: Tensor) -> None:
        """The optimizer step is done (on a GPU: handed to the device)."""
        self.losses.add(loss)

    def pause(self) -> None:
        """Stop the clock until `start`."""
        self._synchronize()
        self._time_s += self._clock() - self._since_s
        self._since_s = self._clock()

    def end_period(self) -> Period:
        """The steps since the last period; waits for the device."""
        self.pause()
        losses = self.losses.read()[self._num_reported :]
        period = Period(len(losses), self._time_s, self._data_wait_s, tuple(losses))
        self._num_reported += len(losses)
        self.train_s += self._time_s
        self._time_s = self._data_wait_s = 0.0
        return period

    def phase_of(self, index: int) -> str:
        """The one phase of all steps."""
        return TRAINED

    def timings(self) -> Timings:
        """The whole run as one window, without single steps."""
        return Timings((), window_s=self.train_s)


def merge_ranks(timings: Sequence[Timings]) -> Timings:
    """The timings of the run from those of its ranks, which have the same number of steps.

    Losses are the first rank's, since engines report the mean of all ranks on each rank.
    """
    assert len({len(rank.steps) for rank in timings}) == 1
    times_s: list[float] = []
    phases = [step.phase for step in timings[0].steps]
    for phase in dict.fromkeys(phases):  # the ranks are together at the edges between two phases
        of_phase = [[s.step_time_s for s in rank.steps if s.phase == phase] for rank in timings]
        times_s += slowest_steps(of_phase)
    steps = tuple(
        dataclasses.replace(
            same_step[0],
            step_time_s=step_time_s,
            data_wait_s=max(step.data_wait_s for step in same_step),
        )
        for step_time_s, *same_step in zip(times_s, *(rank.steps for rank in timings), strict=True)
    )
    return Timings(steps, window_s=max(rank.window_s for rank in timings))


def slowest_steps(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Step times of a run from those of its ranks, which began together.

    A global step ends when the last rank ends it, and its time is the difference of two such ends.
    The times add up to that of the slowest rank. Taking the longest time of each step instead would
    add up to more, where ranks are slow in turn.
    """
    ends_s = [max(ends) for ends in zip(*(itertools.accumulate(r) for r in ranks), strict=True)]
    return [end_s - begin_s for begin_s, end_s in itertools.pairwise([0.0, *ends_s])]
