"""`Heartbeat` finds lost ranks.

When a rank dies, others see a broken connection, or wait for ever; neither says which rank is lost.
So each rank increases a counter in the ranks' store, in a thread that goes on while the main thread
waits, and reads the counters of other ranks. The first rank, which usually runs the store, reads
all in one request; the others read the first rank's, and all when they look for a lost rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sdbench.ranks.distributed import Ranks, is_store_of_torchrun, name_ranks, open_store

PERIOD_S = 0.5
# Five missing beats in a row. Other threads rarely hold Python's lock for so long.
SILENCE_S = 5 * PERIOD_S
# Time for the main thread to notice a loss by itself and to write the record.
GRACE_S = 15.0
# Statuses of a rank that has ended without a failure of its own.
ENDS_OF_BYSTANDERS = ("ok", "interrupted")


@dataclasses.dataclass
class _Heard:
    """The last beat of another rank, and when this rank read it, on its own clock."""

    count: int
    since_s: float
    num_steps: int
    ended: tuple[str, str] | None  # status and reason

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and not because of another rank."""
        return self.ended is not None and self.ended[0] not in ENDS_OF_BYSTANDERS


class Heartbeat:
    """Beats for this rank and watches the others; with a single rank it does nothing."""

    def __init__(self, ranks: Ranks, *, timeout_s: float) -> None:
        """Beat for the first time, which every rank has to before any rank watches.

        The ranks have joined the process group; one that is silent for `timeout_s` is lost.
        """
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._num_steps = 0
        self._step_began_s: float | None = None
        self._count = 0
        self._is_over = threading.Event()
        self._ended: tuple[str, str] | None = None
        self._talker: threading.Thread | None = None
        self._listens_to_all = ranks.rank == 0
        self._heard: dict[int, _Heard] = {}
        self._last_answer_s = time.monotonic()
        self._store: Any = None
        if ranks.world_size > 1:
            # A separate connection, since one that waits for an answer is blocked.
            self._store = open_store("heartbeat", ranks, is_host=False, timeout_s=timeout_s)
            self._beat()

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Go on beating, and watch the other ranks.

        When one is lost and the main thread does not end the run, `on_loss` is called in another
        thread with a sentence that names the rank; it has to end the process.
        """
        if self._store is None:
            return
        # Until the first step, building the model is what may hang.
        self._step_began_s = self._last_answer_s = time.monotonic()
        self._talker = threading.Thread(target=self._talk, daemon=True)
        self._talker.start()
        threading.Thread(target=self._watch, args=(on_loss,), daemon=True).start()

    def loop_begins(self) -> None:
        """The first step is about to begin."""
        self._step_began_s = time.monotonic()

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """Count a step of an engine."""
        self.steps_taken(index + 1)

    def steps_taken(self, num_steps: int) -> None:
        """Set the number of steps that have ended, of a task without an engine."""
        self._num_steps = num_steps
        self._step_began_s = time.monotonic()

    def has_step_timed_out(self) -> bool:
        """Whether the current step, or the start-up, has taken the whole timeout."""
        began_s = self._step_began_s
        return began_s is not None and time.monotonic() - began_s >= self._timeout_s

    def end(self, status: str, reason: str = "") -> None:
        """Stop beating, and tell the other ranks that this one has ended and is not lost.

        After a bad end the first rank, whose process may run the store, gives the others time to
        read its status and reason.
        """
        if self._talker is None or self._is_over.is_set():
            return
        self._ended = (status, reason)
        self._is_over.set()
        self._talker.join(SILENCE_S)  # it may wait for a store that no longer answers
        if self._ranks.rank == 0 and status not in ENDS_OF_BYSTANDERS:
            time.sleep(2 * PERIOD_S)

    def find_lost(self) -> str | None:
        """Wait as long as it takes to find lost ranks, and name them in a sentence.

        None if no rank is lost, or one has told that it failed.
        """
        if self._talker is None:  # one rank, or `watch` was not called yet
            return None
        self._listens_to_all = True
        end_s = time.monotonic() + SILENCE_S + 2 * PERIOD_S
        while time.monotonic() < end_s:
            if self.failed_elsewhere() is not None:
                return None
            time.sleep(PERIOD_S / 5)
        return self._name_lost(SILENCE_S)

    def failed_elsewhere(self) -> tuple[str, str] | None:
        """Status and reason of the first other rank that has failed, if any."""
        failed = (heard.ended for _, heard in sorted(self._heard.items()) if heard.has_failed)
        return next(failed, None)

    def _talk(self) -> None:
        """Beat and read the others' beats; blocks while the store does not answer.

        `_name_lost` notices a store that is gone. It is not asked again, since torch prints some
        20 lines each time; nor is a store of a first rank that has failed, which ends with it.
        """
        with contextlib.suppress(RuntimeError):
            while not self._is_over.wait(PERIOD_S):
                self._beat()
                self._listen()
                self._last_answer_s = time.monotonic()
                first = self._heard.get(0)
                if first is not None and first.has_failed:
                    return
            self._beat()

    def _beat(self) -> None:
        self._count += 1
        beat = json.dumps([self._count, self._num_steps, self._ended])
        self._store.set(str(self._ranks.rank), beat)

    def _listen(self) -> None:
        ranks: Sequence[int] = (0,)
        if self._listens_to_all:
            ranks = range(self._ranks.world_size)
        others = [rank for rank in ranks if rank != self._ranks.rank]
        values = self._store.multi_get([str(rank) for rank in others]) if others else []
        now_s = time.monotonic()
        for rank, value in zip(others, values, strict=True):
            count, num_steps, ended = json.loads(value)
            known = self._heard.get(rank)
            if known is None or known.count != count:
                ended = None if ended is None else tuple(ended)
                self._heard[rank] = _Heard(count, now_s, num_steps, ended)

    def _watch(self, on_loss: Callable[[str], None]) -> None:
        lost = None
        while lost is None:
            if self._is_over.wait(PERIOD_S):
                return
            lost = self._name_lost(self._timeout_s)
        # Most likely a collective in the main thread has timed out, whose error says more.
        if not self._is_over.wait(GRACE_S):
            on_loss(lost)

    def _name_lost(self, silence_s: float) -> str | None:
        """Name the ranks that have not ended and whose last beat is older than that, if any."""
        now_s = time.monotonic()
        lost = [
            rank
            for rank, heard in sorted(self._heard.items())
            if heard.ended is None and now_s - heard.since_s > silence_s
        ]
        if now_s - self._last_answer_s > silence_s:
            if self._ranks.num_nodes == 1 and is_store_of_torchrun():
                return f"torchrun, which runs the ranks' store, has been silent for {silence_s:g} s"
            lost = [0]  # the first rank ran the store
        if not lost:
            return None
        names = name_ranks(lost, self._ranks)
        heard = self._heard.get(lost[0])
        after = "" if heard is None else f", last heard of after {heard.num_steps} steps"
        return f"{names} has been silent for {silence_s:g} s{after}"
