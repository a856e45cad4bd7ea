"""`StepWatch`: what an engine tells of every step of a rank.

The watch times the steps, tells the observers (progress, logs), runs the GPU monitor, splits
profiled steps into phases, writes the trace, checks the loss and decides when the loop ends.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sdbench.base.errors import RunError
from sdbench.base.stop import StopRequest, stop_signals_ask
from sdbench.measure.attention_kernels import AttentionLog
from sdbench.measure.gpu_monitor import GpuMonitor, GpuReadings
from sdbench.measure.hardware import num_page_faults, peak_memory_gib
from sdbench.measure.phases import DATA_WAIT, OTHER, RANK_WAIT, PhaseClock
from sdbench.measure.timer import PROFILED, CudaMarks, StepTimer
from sdbench.ranks.distributed import Ranks, maximum_on_hosts
from sdbench.record.store import INVALID

if TYPE_CHECKING:
    from torch import Tensor

# At the end of a step ranks agree on the largest of 0 (go on), the number of a signal, and this.
LOSS_IS_NOT_FINITE = 1000
# A stop waits so many times as long as the longest step, or the one under way, has taken, and some
# seconds more: a step may take longer than those before it, and what has hung does not end.
STEPS_OF_PATIENCE, LEAST_PATIENCE_S = 3, 10.0
# Of the time that a scheduler gives, the rest is for the record.
SHARE_OF_GRACE = 0.8


class StopAskedError(Exception):
    """A stop signal has arrived, on this rank or another, in what was done between two steps."""


class Observer(Protocol):
    """Is told of every step, e.g. a progress bar or a logger."""

    def loop_begins(self) -> None:
        """The first step is about to begin."""

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """A step has ended.

        Args:
            index: Of the step, from 0.
            phase: Of the step, see `timer.Step`.
            loss: Reads the loss of the step; waits for the device unless this or a later loss has
                been read. To be called every ten seconds at most.
            num_steps: Length of the run, as decided so far.
        """


class StepWatch:
    """Watches the steps of one rank.

    Attributes:
        attention: Looks at the step behind the profiled ones, which its profiler would slow down.
        is_stopped: Whether a signal has ended the run before its last step.
        gpu: Readings in the measured window; None without a GPU or NVML.
        num_page_faults: Of this process in the measured window.
    """

    def __init__(
        self,
        timer: StepTimer,
        *,
        phases: PhaseClock,
        observers: Sequence[Observer],
        gpu_monitor: GpuMonitor | None,
        num_steps: int | None = None,
        has_trace: bool = False,
        trace_file: Path | None = None,
        judges_losses: bool = True,
        looks_at_attention: bool = True,
        stop_grace_s: float | None = None,
    ) -> None:
        """Prepare; nothing is timed yet.

        Args:
            timer: Times the steps.
            phases: Splits the profiled steps into phases.
            observers: Are told of every step.
            gpu_monitor: Is read when the window is full; None without a GPU.
            num_steps: Length of the run; None ends it when all is measured and looked at.
            has_trace: Whether to train one more step under torch's profiler.
            trace_file: Where to write its trace; None on ranks that write none.
            judges_losses: Whether a loss that is not finite ends the run. If not, `timer.losses`
                know of one on all ranks behind the step at which one of them has read it.
            looks_at_attention: Whether to train one more step behind profiled ones, in which the
                first rank notes the kernels of attention.
            stop_grace_s: Seconds from a stop signal to the end that a scheduler makes of the run;
                None: unknown, and a step may take as long as those before it suggest.
        """
        self.timer = timer
        self.phases = phases
        self.gpu: GpuReadings | None = None
        self.attention = AttentionLog()
        self.num_page_faults = self._num_page_faults_before = 0
        self._observers = observers
        self._gpu_monitor = gpu_monitor
        self._num_steps = num_steps
        self._has_trace = has_trace
        self._trace_file = trace_file
        self._judges_losses = judges_losses
        self._looks_at_attention = looks_at_attention
        self._stop_grace_s = stop_grace_s
        self._step_began_s = time.monotonic()
        self._longest_step_s = 0.0
        self._profiler: Any = None
        self._ranks = Ranks.from_environment()
        self._request = StopRequest()
        self._peak_memory_gib: float | None = None
        self.is_stopped = False

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """The context of the training loop: a stop signal ends it after a step, on all ranks.

        Raises:
            KeyboardInterrupt: The loop has ended because of SIGINT.
            Terminated: The loop has ended because of SIGTERM or SIGHUP.
        """
        with stop_signals_ask(self._patience_s) as self._request:
            yield

    def _patience_s(self) -> float:
        """How long a stop that is asked for now waits for the step under way."""
        if self._stop_grace_s is not None:
            return SHARE_OF_GRACE * self._stop_grace_s
        so_far_s = time.monotonic() - self._step_began_s
        return LEAST_PATIENCE_S + STEPS_OF_PATIENCE * max(self._longest_step_s, so_far_s)

    @property
    def peak_memory_gib(self) -> float:
        """Peak memory of this rank in GiB, as `Measurements` has it: without the profiler's."""
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
        """Length of the run, as decided so far."""
        if self._num_steps is not None:
            return self._num_steps
        last = self.timer.num_steps_needed - 1
        has_look = self._looks_at_attention and self.timer.phase_of(last) == PROFILED
        return last + 1 + has_look + self._has_trace

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
            # What comes next may wait for others unseen: FSDP gathers weights, DDP its buckets.
            self._maximum_of_ranks(0)
        self.phases.switch(OTHER)

    def step_ends(self, *, loss: Tensor) -> None:
        """An optimizer step is done.

        Args:
            loss: Mean over the global batch, the same on every rank, on the device.

        Raises:
            RunError: A loss is not finite, and this watch judges it. It is read at an edge of the
                window, at the end, or when an observer of any rank asks for it.
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
            self._end_trace()
        self._agree_on_end()
        # Here, where the ranks are together as at the start: what one of them does for longer
        # behind its step shows in its own time.
        if self.phases.is_running and self.timer.phase_of(index + 1) != PROFILED:
            self.phases.stop()
        if self.is_over and self._gpu_monitor is not None:
            self._gpu_monitor.stop()
        self._next_step_begins()

    def _agree_on_end(self) -> None:
        """End the loop on all ranks if one has a stop signal or has read a loss that is not finite.

        Raises:
            RunError: The loss is not finite, and this watch judges it.
        """
        losses = self.timer.losses
        if self.timer.num_steps >= self._num_steps_now:
            losses.read()
        is_bad = losses.first_not_finite is not None
        agreed = self._maximum_of_ranks(LOSS_IS_NOT_FINITE if is_bad else self._request.number or 0)
        if agreed == LOSS_IS_NOT_FINITE:
            values = losses.read()
            index = losses.first_not_finite
            assert index is not None, "ranks have different losses"
            if not self._judges_losses:
                return  # a stop signal is agreed on behind the next step
            raise RunError(f"the loss is {values[index]} at step {index + 1}", status=INVALID)
        if agreed:
            self._stop(agreed)

    def check_stop(self) -> None:
        """End the loop for a stop signal between two steps. All ranks call it equally often.

        Raises:
            StopAskedError: One of them has got one. What is being done is to be left.
        """
        number = self._maximum_of_ranks(self._request.number or 0)
        if number:
            self._stop(number)
            raise StopAskedError

    def _stop(self, number: int) -> None:
        self._request.note(number)
        self._request.forget()  # what is saved behind the last step takes its time
        self.is_stopped = True

    def _maximum_of_ranks(self, number: int) -> int:
        """The largest number of all ranks, for which the last of them is waited for."""
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
        if is_behind and self._looks_at_attention and not self.is_over:
            self._peak_memory_gib = peak_memory_gib()  # on a CPU it cannot be reset
            if self._ranks.rank == 0:  # the others run the same kernels
                self.attention.start()
        is_last = index + 1 == self._num_steps_now
        if self._has_trace and is_last and self._trace_file is not None:
            self._begin_trace()

    def window_opens(self) -> None:
        """The measured window opens: begin to watch the GPU and the page faults."""
        if self._gpu_monitor is not None:
            self._gpu_monitor.start()
        self._num_page_faults_before = num_page_faults()

    def window_is_full(self) -> None:
        """The measured window is full, or has been extended: read both."""
        self.num_page_faults = num_page_faults() - self._num_page_faults_before
        if self._gpu_monitor is not None:
            self.gpu = self._gpu_monitor.read()

    def _begin_trace(self) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def _end_trace(self) -> None:
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._trace_file))
        self._profiler = None


def make_watch(
    *,
    num_warmup_steps: int,
    num_measured_steps: int,
    num_profiled_steps: int = 0,
    policy: Callable[[Sequence[float], int], str | int] | None = None,
    num_steps: int | None = None,
    cuda_device: int | None,
    observers: Sequence[Observer],
    has_trace: bool = False,
    trace_file: Path | None = None,
    looks_at_attention: bool = True,
) -> StepWatch:
    """Make a watch for the device of this rank.

    Args:
        num_warmup_steps: As of `StepTimer`.
        num_measured_steps: As of `StepTimer`.
        num_profiled_steps: As of `StepTimer`.
        policy: As of `StepTimer`; None closes the first full window.
        num_steps: As of `StepWatch`.
        cuda_device: Index of this rank's GPU, None on a CPU.
        observers: As of `StepWatch`.
        has_trace: As of `StepWatch`.
        trace_file: As of `StepWatch`.
        looks_at_attention: As of `StepWatch`.
    """
    timer = StepTimer(
        num_warmup_steps=num_warmup_steps,
        num_measured_steps=num_measured_steps,
        num_profiled_steps=num_profiled_steps,
        **({} if policy is None else {"policy": policy}),
    )
    phases, gpu_monitor = PhaseClock(), None
    if cuda_device is not None:
        import torch

        timer.use_device(synchronize=torch.cuda.synchronize, marks=CudaMarks())
        # The current stream only, since gradients are communicated on another one.
        phases = PhaseClock(synchronize=lambda: torch.cuda.current_stream().synchronize())
        uuid = str(torch.cuda.get_device_properties(cuda_device).uuid)
        gpu_monitor = GpuMonitor(device_uuid=uuid)
    watch = StepWatch(
        timer,
        phases=phases,
        observers=observers,
        gpu_monitor=gpu_monitor,
        num_steps=num_steps,
        has_trace=has_trace,
        trace_file=trace_file,
        looks_at_attention=looks_at_attention,
    )
    timer.on_window(opens=watch.window_opens, is_full=watch.window_is_full)
    return watch
