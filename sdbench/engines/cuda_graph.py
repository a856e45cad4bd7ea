"""Replays a whole training step as one CUDA graph.

As in torch's documentation of whole-network capture (notes/cuda, "CUDA Graphs"): a few steps run on
a side stream, then forward and backward passes of all micro-batches, the optimizer step and the
reset of the gradients are captured, with inputs and loss at fixed addresses. Copies to the device,
the schedule and the moving average, which is not updated in every step, are not in the graph: the
host hands them over while the device replays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sdbench.engines.device_batches import Batch
from sdbench.measure.phases import PhaseClock
from sdbench.settings.computing import NUM_GRAPH_STEPS


def let_rates_change(optimizer: torch.optim.Optimizer, *, device: torch.device) -> None:
    """Keep the learning rates in tensors on the device: the graph would fix a Python number.

    Called before a schedule is made for the optimizer.
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)


class GraphedStep:
    """A training step that is run a few times, then captured and from then on replayed.

    Every call trains on its batch, also before the capture.
    """

    def __init__(self, run_step: Callable[[Batch], Tensor], *, clock: PhaseClock) -> None:
        """Run nothing yet.

        `run_step` reads nothing from the device, resets the gradients and returns the loss. Once
        the clock runs the graph is given up: phases within a graph cannot be timed, and memory may
        not suffice for a graph and for a step without one.
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
        """Train on a batch; all have the same shapes. The next call overwrites the loss."""
        self._num_calls += 1
        if self._clock.is_running:
            self._is_given_up = True
            self._graph = None
        if self._is_given_up:
            return self._run_step(batch)
        if self._num_calls < NUM_GRAPH_STEPS:
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
        # Recorded, not computed yet. Other threads may use CUDA: the loader's pins memory.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = self._run_step(self._inputs)
