"""`StepWatch` watches every step that an engine trains on a rank.

It times the steps, calls the observers (progress, logs), runs the GPU monitor, splits profiled
steps into phases, writes the trace, checks the loss and decides when the loop ends.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.stop import STOPS, StopRequest, signal_of, stop_signals_ask
from sdbench.measure.attention_kernels import AttentionLog
from sdbench.measure.gpu_monitor import GpuMonitor
from sdbench.measure.hardware import peak_memory_gib
from sdbench.measure.phases import DATA_WAIT, OTHER, RANK_WAIT, PhaseClock
from sdbench.measure.timer import PROFILED, CudaDevice, StepTimer
from sdbench.ranks.distributed import Ranks, gather, maximum_on_hosts
from sdbench.record.store import FAILED, INVALID

if TYPE_CHECKING:
    from torch import Tensor

# At the end of a step ranks agree on the largest of 0 (go on), the number of a signal, and the
# first of these; behind what each does alone, with the second.
LOSS_IS_NOT_FINITE, HAS_FAILED = 1000, 1001
# A stop waits this many times as long as the longest step, or the current one, has taken, and some
# seconds more: a step may take longer than those before it, and one that hangs does not end.
STEPS_OF_PATIENCE, LEAST_PATIENCE_S = 3, 10.0
# Share of a scheduler's grace period that a stop waits; the rest is for the record.
SHARE_OF_GRACE = 0.8


# `StepWatch.alone`.
Alone = Callable[[], contextlib.AbstractContextManager[None]]


class StopAskedError(Exception):
    """A stop signal has arrived between two steps, on this rank or another."""


class Observer(Protocol):
    """Is called for every step, e.g. a progress bar or a logger."""

    def loop_begins(self) -> None:
        """The first step is about to begin."""

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """A step, counted from 0, has ended; its phase is as in `timer.Step`.

        `loss` reads the loss, and waits for the device unless this or a later loss has been read:
        to be called every ten seconds at most. The run has `num_steps`, as decided so far.
        """


class StepWatch:
    """Watches the steps of one rank.

    Attributes:
        attention: Profiles the step after the profiled ones, which it would slow down.
        is_stopped: Whether a signal has ended the run before its last step.
        ends_together: Whether all ranks end between the same two steps, or there is only one.
    """

    def __init__(
        self,
        timer: StepTimer,
        *,
        phases: PhaseClock,
        observers: Sequence[Observer],
        gpu_monitor: GpuMonitor | None = None,
        num_steps: int | None = None,
        trace_file: Path | None = None,
        keeps_steps: bool = False,
        records_attention: bool = True,
        stop_grace_s: float | None = None,
    ) -> None:
        """Time nothing yet.

        Args:
            timer: A `StepTimer` or `PeriodTimer`.
            phases: Splits the profiled steps into phases.
            observers: Are told of every step.
            gpu_monitor: Of this rank's GPU; the timer starts and reads it. None on a CPU.
            num_steps: Length of the run; None ends it when everything is measured.
            trace_file: Where the first rank writes torch's trace of one more step, which all train.
            keeps_steps: Whether steps are saved. Then ranks agree before each step that all have a
                batch: one that ends alone cannot save. A loss that is not finite does not end the
                run; `timer.losses` of all ranks have read it after the same step.
            records_attention: Whether to train one more step after profiled ones, in which the
                first rank records the kernels of attention.
            stop_grace_s: Seconds from a stop signal until a scheduler kills the run. If None, the
                longest step so far limits the current one.
        """
        self.timer = timer
        self.phases = phases
        self.attention = AttentionLog()
        self.gpu_monitor = gpu_monitor
        self._observers = observers
        self._num_steps = num_steps
        self._trace_file = trace_file
        self._keeps_steps = keeps_steps
        self._records_attention = records_attention
        self._stop_grace_s = stop_grace_s
        self._step_began_s = time.monotonic()
        self._longest_step_s = 0.0
        self._profiler: Any = None
        self._ranks = Ranks.from_environment()
        self._request = StopRequest()
        self._peak_memory_gib: float | None = None
        self.is_stopped = False
        self.ends_together = self._ranks.world_size == 1

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """The context of the training loop, which a stop signal ends after a step on all ranks.

        The exception of the signal is then raised, see `stop_signals_ask`.
        """
        with stop_signals_ask(self._patience_s) as self._request:
            yield

    def _patience_s(self) -> float:
        """Seconds that a stop that is requested now waits for the current step."""
        if self._stop_grace_s is not None:
            return SHARE_OF_GRACE * self._stop_grace_s
        so_far_s = time.monotonic() - self._step_began_s
        return LEAST_PATIENCE_S + STEPS_OF_PATIENCE * max(self._longest_step_s, so_far_s)

    @property
    def peak_memory_gib(self) -> float:
        """Peak memory of this rank in GiB, before the profiler of attention."""
        return peak_memory_gib() if self._peak_memory_gib is None else self._peak_memory_gib

    @property
    def is_over(self) -> bool:
        """Whether the loop has to end: after the last step, or after a stop signal."""
        return self.is_stopped or self.timer.num_steps >= self._num_steps_now

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one, as decided so far."""
        return self.timer.num_steps + 1 >= self._num_steps_now

    @property
    def _num_steps_now(self) -> int:
        if self._num_steps is not None:
            return self._num_steps
        last = self.timer.num_steps_needed - 1
        has_attention = self._records_attention and self.timer.phase_of(last) == PROFILED
        return last + 1 + has_attention + (self._trace_file is not None)

    def end_early(self) -> None:
        """Make the step that has just ended the last one; all ranks have to."""
        self._num_steps = self.timer.num_steps

    def loop_begins(self) -> None:
        """The loop is about to ask for its first batch."""
        for observer in self._observers:
            observer.loop_begins()
        self.timer.start()
        self._step_began_s = time.monotonic()
        self._next_step_begins()

    def data_wait_begins(self) -> None:
        """The host asks the loader for the next batch."""
        self.phases.switch(DATA_WAIT)
        self.timer.data_wait_begins()

    def data_wait_ends(self) -> None:
        """The batch has arrived, or the epoch is over."""
        self.timer.data_wait_ends()
        if self.phases.is_running:
            # The next work may wait for other ranks unseen: FSDP gathers weights, DDP buckets.
            self._maximum_of_ranks(0)
        self.phases.switch(OTHER)

    def step_ends(self, *, loss: Tensor) -> None:
        """An optimizer step is done; `loss` is the mean over the global batch, on the device.

        Losses are read at an edge of the window, at the end, or when an observer of any rank asks.
        If this watch judges them, one that is not finite raises RunError.
        """
        index = self.timer.num_steps
        phase = self.timer.phase_of(index)
        now_s = time.monotonic()
        self._longest_step_s = max(self._longest_step_s, now_s - self._step_began_s)
        self._step_began_s = now_s
        self.timer.step_ends(loss=loss)
        if self.attention.is_running:
            self.attention.stop()
        read_loss = functools.partial(self.timer.losses.at, index)
        num_steps = self._num_steps_now
        for observer in self._observers:
            observer.step_ends(index=index, phase=phase, loss=read_loss, num_steps=num_steps)
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._trace_file))
            self._profiler = None
        self._agree_on_end()
        # The ranks are together here, as at the start of profiling, so a rank's extra work between
        # two steps counts as its own time.
        if self.phases.is_running and self.timer.phase_of(index + 1) != PROFILED:
            self.phases.stop()
        if self.is_over and self.gpu_monitor is not None:
            self.gpu_monitor.stop()
        self._next_step_begins()

    def _agree_on_end(self) -> None:
        """End the loop on all ranks if one has a stop signal or a loss that is not finite."""
        losses = self.timer.losses
        if self.timer.num_steps >= self._num_steps_now:
            losses.read()
        is_bad = losses.first_not_finite is not None
        agreed = self._maximum_of_ranks(LOSS_IS_NOT_FINITE if is_bad else self._request.number or 0)
        if agreed == LOSS_IS_NOT_FINITE:
            values = losses.read()
            index = losses.first_not_finite
            assert index is not None, "ranks have different losses"
            if self._keeps_steps:
                return  # a stop signal is agreed on after the next step
            raise RunError(f"the loss is {values[index]} at step {index + 1}", status=INVALID)
        if agreed:
            self._stop(agreed)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The context of work between two steps that this rank does without the others.

        A stop signal breaks it off at once. Behind it all ranks, which have to enter it equally
        often, raise if one has failed, or StopAskedError if one has a stop signal. Several ranks of
        a measurement do not agree, which takes time: a signal ends them behind the step.
        """
        if self._ranks.world_size > 1 and not self._keeps_steps:
            yield
            return
        fault = None
        try:
            with self._request.raises_at_once():
                yield
        except STOPS as stop:
            self._request.note(signal_of(stop))
        except Exception as error:
            fault = error
        self._agree(fault)

    def check_stop(self) -> None:
        """Raise StopAskedError if a rank has a stop signal between two steps.

        All ranks have to call it equally often.
        """
        self._agree(None)

    def _agree(self, fault: Exception | None) -> None:
        """Raise on all ranks if one has a stop signal or, with its rank, an error."""
        own = self._request.number or (0 if fault is None else HAS_FAILED)
        agreed = self._maximum_of_ranks(own)
        if not agreed:
            return
        self.ends_together = True
        if agreed != HAS_FAILED:
            self._stop(agreed)
            raise StopAskedError
        faults = gather(_as_told(fault, self._ranks), self._ranks)
        raise fault or next(told for told in faults if told is not None)

    def _stop(self, number: int) -> None:
        self._request.note(number)
        self._request.forget()  # saving after the last step takes its time
        self.is_stopped = self.ends_together = True

    def _maximum_of_ranks(self, number: int) -> int:
        """The largest number of all ranks; waits for the last of them."""
        if self._ranks.world_size == 1:
            return number
        with self.phases.phase(RANK_WAIT):
            return maximum_on_hosts(number, self._ranks)

    def _next_step_begins(self) -> None:
        index = self.timer.num_steps
        phase = self.timer.phase_of(index)
        if phase == PROFILED and not self.phases.is_running:
            self.phases.start()
        is_behind = phase != PROFILED and self.timer.phase_of(index - 1) == PROFILED
        if is_behind and self._records_attention and not self.is_over:
            self._peak_memory_gib = peak_memory_gib()  # on a CPU it cannot be reset
            if self._ranks.rank == 0:  # the others run the same kernels
                self.attention.start()
        is_last = index + 1 == self._num_steps_now
        if self._trace_file is not None and is_last and self._ranks.rank == 0:
            import torch

            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()


def _as_told(fault: Exception | None, ranks: Ranks) -> Exception | None:
    """An error for the ranks that do not have it."""
    if fault is None or isinstance(fault, ConfigError):
        return fault
    reason = str(fault) if isinstance(fault, RunError) else f"{type(fault).__name__}: {fault}"
    return RunError(f"rank {ranks.rank}: {reason}", status=getattr(fault, "status", FAILED))


def make_watch(
    *,
    cuda_device: int | None,
    observers: Sequence[Observer],
    timing: Mapping[str, Any],
    **of_watch: Any,
) -> StepWatch:
    """Make a watch with a `StepTimer` for the device of this rank.

    `timing` has the numbers of steps and the policy of the timer, `of_watch` further arguments of
    `StepWatch`. `cuda_device` is the index of this rank's GPU, None on a CPU.
    """
    phases, gpu_monitor = PhaseClock(), None
    if cuda_device is not None:
        import torch

        # The current stream only, since gradients are communicated on another one.
        phases = PhaseClock(synchronize=lambda: torch.cuda.current_stream().synchronize())
        uuid = str(torch.cuda.get_device_properties(cuda_device).uuid)
        gpu_monitor = GpuMonitor(device_uuid=uuid)
        hooks = {"window_opens": gpu_monitor.start, "window_is_full": gpu_monitor.read}
        timing = {**timing, **hooks, "device": CudaDevice()}
    timer = StepTimer(**timing)
    return StepWatch(timer, phases=phases, observers=observers, gpu_monitor=gpu_monitor, **of_watch)
