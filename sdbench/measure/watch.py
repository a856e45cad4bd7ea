"""The watch over the steps of a rank, whichever engine runs the loop.

An engine calls the methods at the right moments, charges its phases to `phases` and ends when
`is_over` says so. It gets timing, progress, the GPU monitor, the breakdown of a step, the trace,
the check of the loss and the end on a signal in return.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sdbench.base.errors import RunError
from sdbench.base.stop import StopRequest, stop_signals_ask
from sdbench.measure.gpu_monitor import GpuMonitor, GpuReadings
from sdbench.measure.phases import DATA_WAIT, OTHER, PhaseClock
from sdbench.measure.timer import PROFILED, CudaMarks, StepTimer
from sdbench.ranks.distributed import Ranks, maximum_on_hosts

if TYPE_CHECKING:
    from torch import Tensor

# What ranks tell each other at the end of a step: 0, a signal, or this.
LOSS_IS_NOT_FINITE = 1000


class Observer(Protocol):
    """Something that follows the steps, such as a progress bar or a logger."""

    def loop_begins(self) -> None:
        """The first step is about to begin."""

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """A step has ended.

        Args:
            index: Of the step, from 0.
            phase: Of the step, see `timer.Step`.
            loss: Reads the loss of the step, which waits for the device unless a later step has
                been read: to be called every ten seconds at most.
            num_steps: Length of the run as far as is decided now.
        """


class StepWatch:
    """Watches the steps of one rank."""

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
    ) -> None:
        """Join the pieces.

        Args:
            timer: Takes the times; starts the GPU monitor where its window opens.
            phases: Splits the time of the profiled steps.
            observers: Are told of every step.
            gpu_monitor: Is read when the window is full; None without a GPU.
            num_steps: Length of the run that the user asked for; None ends it when all is measured.
            has_trace: One more step is trained, for torch's trace.
            trace_file: Gets it; None on a rank that writes none.
        """
        self.timer = timer
        self.phases = phases
        self.gpu: GpuReadings | None = None
        if gpu_monitor is not None:
            timer.on_window(opens=gpu_monitor.start, is_full=self._read_gpu)
        self._observers = observers
        self._gpu_monitor = gpu_monitor
        self._num_steps = num_steps
        self._has_trace = has_trace
        self._trace_file = trace_file
        self._profiler: Any = None
        self._ranks = Ranks.from_environment()
        self._request = StopRequest()
        self._is_stopped = False

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """To be entered around the loop: a signal to stop ends it behind a step, on all ranks.

        Raises:
            KeyboardInterrupt: The loop has ended because of SIGINT.
            Terminated: The same for SIGTERM and SIGHUP.
        """
        with stop_signals_ask() as self._request:
            yield

    @property
    def is_over(self) -> bool:
        """Whether the last step of the run has ended."""
        return self._is_stopped or self.timer.num_steps >= self._num_steps_now

    @property
    def is_last_step(self) -> bool:
        """Whether the run ends with the step that goes on now, as far as is decided."""
        return self.timer.num_steps + 1 >= self._num_steps_now

    @property
    def _num_steps_now(self) -> int:
        """Length of the run as far as is decided now."""
        if self._num_steps is not None:
            return self._num_steps
        return self.timer.num_steps_needed + self._has_trace

    def loop_begins(self) -> None:
        """The loop is about to ask for its first batch."""
        for observer in self._observers:
            observer.loop_begins()
        self.timer.start()
        self._next_step_begins(previous_phase=None)

    def data_wait_begins(self) -> None:
        """The host asks the loader for the next batch."""
        self.phases.switch(DATA_WAIT)
        self.timer.data_wait_begins()

    def data_wait_ends(self) -> None:
        """The loader has answered."""
        self.timer.data_wait_ends()
        self.phases.switch(OTHER)

    def step_ends(self, *, loss: Tensor) -> None:
        """An optimizer step is done.

        Args:
            loss: Mean over the global batch, the same on every rank, on the device.

        Raises:
            RunError: A loss that has been read is not a finite number: at an edge of the window,
                at the end, or when an observer of any rank asked for it.
        """
        index = self.timer.num_steps
        phase = self.timer.phase_of(index)
        if self.phases.is_running and self.timer.phase_of(index + 1) != PROFILED:
            self.phases.stop()
        self.timer.step_ends(loss=loss)
        read_loss = functools.partial(self.timer.losses.at, index)
        num_steps = self._num_steps_now
        for observer in self._observers:
            observer.step_ends(index=index, phase=phase, loss=read_loss, num_steps=num_steps)
        if self._profiler is not None:
            self._end_trace()
        self._agree_on_end()
        if self.is_over and self._gpu_monitor is not None:
            self._gpu_monitor.stop()
        self._next_step_begins(previous_phase=phase)

    def _agree_on_end(self) -> None:
        """End the loop on all ranks if one has been signalled, or has read a loss of no use."""
        losses = self.timer.losses
        if self.timer.num_steps >= self._num_steps_now:
            losses.read()
        is_bad = losses.first_not_finite is not None
        agreed = maximum_on_hosts(
            LOSS_IS_NOT_FINITE if is_bad else self._request.number or 0, self._ranks
        )
        if agreed == LOSS_IS_NOT_FINITE:
            values = losses.read()
            index = losses.first_not_finite
            assert index is not None, "ranks have different losses"
            raise RunError(f"the loss is {values[index]} at step {index + 1}", status="invalid")
        if agreed:
            self._request.note(agreed)
            self._is_stopped = True

    def _next_step_begins(self, *, previous_phase: str | None) -> None:
        index = self.timer.num_steps
        phase = self.timer.phase_of(index)
        if phase == PROFILED and previous_phase != PROFILED:
            self.phases.start()
        is_last = index + 1 == self._num_steps_now
        if self._has_trace and is_last and self._trace_file is not None:
            self._begin_trace()

    def _read_gpu(self) -> None:
        assert self._gpu_monitor is not None
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
    look: Callable[[Sequence[float], int], str | int] | None = None,
    num_steps: int | None = None,
    cuda_device: int | None,
    observers: Sequence[Observer],
    has_trace: bool = False,
    trace_file: Path | None = None,
) -> StepWatch:
    """A watch for the device at hand.

    Args:
        num_warmup_steps: Steps before the measured window.
        num_measured_steps: Steps in it.
        num_profiled_steps: Steps behind it whose time is split up.
        look: Decides what follows a full window, see `StepTimer`; None closes it.
        num_steps: Length of the run; None ends it when all is measured.
        cuda_device: Index of this rank's GPU, None on a CPU.
        observers: Are told of every step.
        has_trace: One more step is trained, for torch's trace.
        trace_file: Gets it; None on a rank that writes none.
    """
    timer = StepTimer(
        num_warmup_steps=num_warmup_steps,
        num_measured_steps=num_measured_steps,
        num_profiled_steps=num_profiled_steps,
        **({} if look is None else {"look": look}),
    )
    phases, gpu_monitor = PhaseClock(), None
    if cuda_device is not None:
        import torch

        timer.use_device(synchronize=torch.cuda.synchronize, marks=CudaMarks())
        # The current stream only: the gradients' communication goes on beside it.
        phases = PhaseClock(synchronize=lambda: torch.cuda.current_stream().synchronize())
        uuid = str(torch.cuda.get_device_properties(cuda_device).uuid)
        gpu_monitor = GpuMonitor(device_uuid=uuid)
    return StepWatch(
        timer,
        phases=phases,
        observers=observers,
        gpu_monitor=gpu_monitor,
        num_steps=num_steps,
        has_trace=has_trace,
        trace_file=trace_file,
    )
