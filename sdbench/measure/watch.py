"""What has to happen around every step, whichever engine runs the loop?

An engine calls the five methods at the right moments and gets timing, progress, the GPU monitor and
the check of the loss in return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from sdbench.errors import RunError
from sdbench.measure.gpu_monitor import GpuMonitor
from sdbench.measure.timer import MEASURED, CudaMarks, StepTimer


class Observer(Protocol):
    """Something that follows the steps, such as a progress bar or a logger."""

    def loop_begins(self) -> None:
        """The first step is about to begin."""

    def step_ends(self, *, index: int, phase: str, loss: float) -> None:
        """A step has ended."""


class StepWatch:
    """Watches the steps of one rank."""

    def __init__(
        self, timer: StepTimer, *, observers: Sequence[Observer], gpu_monitor: GpuMonitor | None
    ) -> None:
        """Join the pieces.

        Args:
            timer: Takes the times.
            observers: Are told of every step.
            gpu_monitor: Runs during the measured window; None without a GPU.
        """
        self.timer = timer
        self.gpu_utilization_percent: float | None = None
        self._observers = observers
        self._gpu_monitor = gpu_monitor

    def loop_begins(self) -> None:
        """The loop is about to ask for its first batch."""
        for observer in self._observers:
            observer.loop_begins()
        self.timer.start()
        self._follow_window()

    def data_wait_begins(self) -> None:
        """The host asks the loader for the next batch."""
        self.timer.data_wait_begins()

    def data_wait_ends(self) -> None:
        """The loader has answered."""
        self.timer.data_wait_ends()

    def step_ends(self, *, loss: float) -> None:
        """An optimizer step is done.

        Args:
            loss: Mean over the global batch, the same on every rank, so that all of them stop.

        Raises:
            RunError: If the loss is not a finite number.
        """
        index = self.timer.num_steps
        self.timer.step_ends(loss=loss)
        for observer in self._observers:
            observer.step_ends(index=index, phase=self.timer.phase_of(index), loss=loss)
        if not math.isfinite(loss):
            raise RunError(f"the loss is {loss} at step {index + 1}", status="invalid")
        self._follow_window()

    def _follow_window(self) -> None:
        """Run the GPU monitor while the step to come lies in the measured window."""
        if self._gpu_monitor is None:
            return
        index = self.timer.num_steps
        in_window = self.timer.phase_of(index) == MEASURED
        was_in_window = index > 0 and self.timer.phase_of(index - 1) == MEASURED
        if in_window and not was_in_window:
            self._gpu_monitor.start()
        elif was_in_window and not in_window:
            self.gpu_utilization_percent = self._gpu_monitor.stop()


def make_watch(
    *,
    num_warmup_steps: int,
    num_measured_steps: int,
    cuda_device: int | None,
    observers: Sequence[Observer],
) -> StepWatch:
    """A watch for the device at hand.

    Args:
        num_warmup_steps: Steps before the measured window.
        num_measured_steps: Steps in it.
        cuda_device: Index of this rank's GPU, None on a CPU.
        observers: Are told of every step.
    """
    timer = StepTimer(num_warmup_steps=num_warmup_steps, num_measured_steps=num_measured_steps)
    if cuda_device is None:
        return StepWatch(timer, observers=observers, gpu_monitor=None)
    import torch

    timer.use_device(synchronize=torch.cuda.synchronize, marks=CudaMarks())
    return StepWatch(timer, observers=observers, gpu_monitor=GpuMonitor(device_index=cuda_device))
