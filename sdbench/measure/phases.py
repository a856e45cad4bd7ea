"""Splits the time of a training step into phases.

This is done in a few profiled steps after the measured window. Each switch to another phase waits
for the device, so that work counts in the phase that started it; the waits make these steps slower,
so they are not measured. Time outside all phases is `other`: the phases add up to the step.

Ranks that average gradients end every step together. The time that a rank waits for others is in
the phases `WAITS`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sdbench.record.formulas import total_s

DATA_WAIT = "data_wait"
HOST_TO_DEVICE = "host_to_device"
VAE_ENCODE = "vae_encode"
TEXT_ENCODE = "text_encode"
UNET_FORWARD = "unet_forward"
BACKWARD = "backward"
GRADIENT_COMMUNICATION = "gradient_communication"
RANK_WAIT = "rank_wait"
OPTIMIZER = "optimizer"
EMA = "ema"
OTHER = "other"
PHASES = (
    DATA_WAIT,
    HOST_TO_DEVICE,
    VAE_ENCODE,
    TEXT_ENCODE,
    UNET_FORWARD,
    BACKWARD,
    GRADIENT_COMMUNICATION,
    RANK_WAIT,
    OPTIMIZER,
    EMA,
    OTHER,
)
WAITS = (GRADIENT_COMMUNICATION, RANK_WAIT)
# Two profiled steps on devices of one kind vary by less than a fifth.
MIN_TIMES_MEDIAN = 1.2


class PhaseClock:
    """Adds up the `seconds` of each phase in the profiled steps of a rank; else does nothing."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        """Measure nothing yet; `synchronize` waits for the compute stream."""
        self._clock = clock
        self._synchronize = synchronize
        self._phase = OTHER
        self._since_s = 0.0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.is_running = False

    def start(self) -> None:
        """The first profiled step is about to begin."""
        self._synchronize()
        self.is_running = True
        self._phase, self._since_s = OTHER, self._clock()

    def stop(self) -> None:
        """The last profiled step has ended."""
        self.switch(OTHER)
        self.is_running = False

    def switch(self, phase: str) -> str:
        """End the current phase, which is returned, and begin another."""
        assert phase in self.seconds
        previous = self._phase
        if self.is_running:
            self._synchronize()
            now_s = self._clock()
            self.seconds[previous] += now_s - self._since_s
            self._phase, self._since_s = phase, now_s
        return previous

    def end(self, phase: str) -> None:
        """End a phase, unless another one is the current one."""
        if self._phase == phase:
            self.switch(OTHER)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Switch to a phase for the block, or the decorated function, and back."""
        previous = self.switch(name)
        try:
            yield
        finally:
            self.switch(previous)


def merge_phases(ranks: Sequence[Mapping[str, float]], *, num_steps: int) -> dict[str, Any]:
    """The record's `breakdown` of a step: means over ranks and `num_steps` profiled steps.

    The last rank to have its gradients waits for no other while they are averaged: its time is
    communication, and the other ranks' longer times include waiting for it.

    `ranks` are the seconds of each phase of a step on each rank.
    """
    communication_s = min(rank[GRADIENT_COMMUNICATION] for rank in ranks)
    split = [
        {
            **rank,
            GRADIENT_COMMUNICATION: communication_s,
            RANK_WAIT: rank[RANK_WAIT] + rank[GRADIENT_COMMUNICATION] - communication_s,
        }
        for rank in ranks
    ]
    seconds = {phase: sum(rank[phase] for rank in split) / len(ranks) for phase in PHASES}
    return {"num_steps": num_steps, "step_time_s": total_s(seconds), "seconds": seconds}


def find_stragglers(
    ranks: Sequence[Mapping[str, float]], *, ranks_per_node: int
) -> list[dict[str, Any]]:
    """Ranks that work a fifth longer on a step than the median rank, the slowest first.

    Ranks that average gradients end every step together, at the pace of the slowest, so step times
    do not show which rank is slow. The time that a rank works without waiting for others does.
    FSDP's waits are part of forward and backward passes: a rank that is slow in those alone may not
    be found. With an even number of ranks the lower median is taken, so that one of two ranks can
    be slow. `ranks` are the seconds of each phase of a profiled step on each rank.
    """
    own = [{phase: rank[phase] for phase in PHASES if phase not in WAITS} for rank in ranks]
    own_step_times_s = [sum(rank.values()) for rank in own]
    median_s = statistics.median_low(own_step_times_s)
    medians_s = {phase: statistics.median_low(rank[phase] for rank in own) for phase in own[0]}
    found = [
        {
            "rank": rank,
            "node": rank // ranks_per_node,
            "own_step_time_s": own_s,
            "times_median": own_s / median_s,
            "slow_phase": max(medians_s, key=lambda phase: own[rank][phase] - medians_s[phase]),
        }
        for rank, own_s in enumerate(own_step_times_s)
        if own_s >= MIN_TIMES_MEDIAN * median_s and own_s > median_s
    ]
    return sorted(found, key=lambda rank: -rank["own_step_time_s"])
