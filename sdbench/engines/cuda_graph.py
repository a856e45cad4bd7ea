"""Replays a whole training step as one CUDA graph.

After torch's documentation of whole-network capture (notes/cuda, "CUDA Graphs"): some steps on a
side stream, then a capture of forward, backward, optimizer and the setting back of gradients, over
all micro-batches, with inputs and loss at fixed addresses. Copies to the device, the schedule and
the moving average, whose turn is not every step, stay outside: the host hands them over while the
device is still busy with the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sdbench.engines.device_batches import Batch
from sdbench.measure.phases import PhaseClock

# The first step sets up what cannot be captured: the optimizer's state, the choice of kernels, what
# is compiled; the second shows that nothing is left. The third is still warm-up by default.
NUM_STEPS_BEFORE_CAPTURE = 2


def let_rates_change(optimizer: torch.optim.Optimizer, *, device: torch.device) -> None:
    """Keep the learning rate on the device: as a number it would be fixed in the graph.

    Args:
        optimizer: Capturable; no schedule has it yet.
        device: The GPU.
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)


class GraphedStep:
    """A training step that is run a few times, captured once and then replayed.

    Every call trains one step on its batch, also those before the capture.
    """

    def __init__(self, run_step: Callable[[Batch], Tensor], *, clock: PhaseClock) -> None:
        """Prepare; the first calls run the step as it is.

        Args:
            run_step: Trains on a batch on the device without asking the device for a decision,
                leaves no gradients behind and returns the loss.
            clock: While it runs, and after that, steps are run as they are: it cannot look inside
                a graph, and the memory of a graph and that of a step beside it may not both fit.
        """
        self._run_step = run_step
        self._clock = clock
        self._side_stream = torch.cuda.Stream()
        self._num_calls = 0
        self._is_given_up = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Batch = {}
        self._loss = torch.empty(0)

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch, each of the same shapes.

        Returns:
            Its loss; the next call overwrites it.
        """
        self._num_calls += 1
        if self._clock.is_running:
            self._is_given_up = True
            self._graph = None
        if self._is_given_up:
            return self._run_step(batch)
        if self._num_calls <= NUM_STEPS_BEFORE_CAPTURE:
            return self._run_beside(batch)
        if self._graph is None:
            self._capture(batch)
        assert self._graph is not None
        for name, data in batch.items():
            self._inputs[name].copy_(data)
        self._graph.replay()
        return self._loss

    def _run_beside(self, batch: Batch) -> Tensor:
        current = torch.cuda.current_stream()
        self._side_stream.wait_stream(current)
        with torch.cuda.stream(self._side_stream):
            loss = self._run_step(batch)
        current.wait_stream(self._side_stream)
        return loss

    def _capture(self, batch: Batch) -> None:
        self._inputs = {name: torch.empty_like(data) for name, data in batch.items()}
        self._graph = torch.cuda.CUDAGraph()
        # Noted down, not computed yet. Other threads may go on: one of the loader pins memory.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = self._run_step(self._inputs)
