"""A heartbeat among the ranks, which tells the ones that are gone.

A rank whose neighbour dies sees a broken connection, or sees nothing and waits; neither tells it
which rank is gone. So each rank counts up a number in the store at which the ranks have met, in a
thread of its own that goes on whatever the main thread waits for, and listens for the others. The
first rank listens to all, since that is one question to a store that is mostly its own; the others
listen to the first, and to all once they have to know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sdbench.ranks.distributed import Ranks, name_ranks, open_store

PERIOD_S = 0.5
# Five beats in a row that did not come. A thread that holds Python's lock for so long is rare.
SILENCE_S = 5 * PERIOD_S
# How long the main thread may take to notice a loss by itself, and then to write the record.
GRACE_S = 15.0
# Statuses of a record that a rank ends with through no fault of its own.
ENDS_OF_BYSTANDERS = ("ok", "interrupted")


@dataclasses.dataclass
class _Heard:
    """What is known of another rank.

    Attributes:
        count: Of its last beat.
        since_s: When that came, on this rank's clock.
        num_steps: Steps that it had ended by then.
        ended: Its last word, the status and the reason of its end; None while it goes on.
    """

    count: int
    since_s: float
    num_steps: int
    ended: tuple[str, str] | None


class Heartbeat:
    """The beat of this rank, and what it hears of the others. Without others it does nothing."""

    def __init__(self, ranks: Ranks, *, timeout_s: float) -> None:
        """Beat for the first time. Every rank has to, before any of them watches.

        Args:
            ranks: The place of this process; it has joined the process group.
            timeout_s: Silence after which a rank is taken for lost.
        """
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._num_steps = 0
        self._count = 0
        self._is_over = threading.Event()
        self._ended: tuple[str, str] | None = None
        self._talker: threading.Thread | None = None
        self._listens_to_all = ranks.rank == 0
        self._heard: dict[int, _Heard] = {}
        self._last_answer_s = time.monotonic()
        self._store: Any = None
        if ranks.world_size > 1:
            # A connection of our own: one that is waiting for an answer serves nobody else.
            self._store = open_store("heartbeat", is_host=False, timeout_s=timeout_s)
            self._beat()

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Go on beating, and watch the other ranks.

        Args:
            on_loss: Is called in another thread when a rank was silent for the timeout and the main
                thread has not ended the run by itself: with the sentence that names the rank. It
                is expected to end the process.
        """
        if self._store is None:
            return
        self._last_answer_s = time.monotonic()
        self._talker = threading.Thread(target=self._talk, daemon=True)
        self._talker.start()
        threading.Thread(target=self._watch, args=(on_loss,), daemon=True).start()

    def loop_begins(self) -> None:
        """The first step is about to begin."""

    def step_ends(self, *, index: int, phase: str, loss: float, num_steps: int) -> None:
        """A step has ended: the next beat says so."""
        self._num_steps = index + 1

    def end(self, status: str, reason: str = "") -> None:
        """Stop beating, with a last word for those who would otherwise take it for a death.

        Args:
            status: Of a record.
            reason: Why, unless all went well.
        """
        if self._talker is None or self._is_over.is_set():
            return
        self._ended = (status, reason)
        self._is_over.set()
        self._talker.join(SILENCE_S)  # which may wait for a store that answers no more

    def find_lost(self) -> str | None:
        """Name the ranks that are gone, after listening for as long as that takes.

        Returns:
            A sentence without a full stop; None if all are there, or have said why they end.
        """
        if self._store is None:
            return None
        self._listens_to_all = True
        time.sleep(SILENCE_S + 2 * PERIOD_S)
        return self._name(self._find_silent(SILENCE_S), SILENCE_S)

    def failed_elsewhere(self) -> tuple[str, str] | None:
        """Status and reason of another rank's failure, if one has told of its own."""
        for _, heard in sorted(self._heard.items()):
            if heard.ended is not None and heard.ended[0] not in ENDS_OF_BYSTANDERS:
                return heard.ended
        return None

    def _talk(self) -> None:
        """Beat and listen. May come to a standstill when the store does."""
        while not self._is_over.wait(PERIOD_S):
            # What the store does not answer, `_find_silent` tells by the time.
            with contextlib.suppress(RuntimeError):
                self._beat()
                self._listen()
                self._last_answer_s = time.monotonic()
        with contextlib.suppress(RuntimeError):
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
            lost = self._name(self._find_silent(self._timeout_s), self._timeout_s)
        # The main thread has most likely been told by its own time-out, and knows more.
        if not self._is_over.wait(GRACE_S):
            on_loss(lost)

    def _find_silent(self, silence_s: float) -> list[int]:
        """Ranks that have not been heard of for so long, though they said no last word."""
        now_s = time.monotonic()
        if now_s - self._last_answer_s > silence_s:
            return [0]  # the store is the first rank's, and gone with it
        return [
            rank
            for rank, heard in sorted(self._heard.items())
            if heard.ended is None and now_s - heard.since_s > silence_s
        ]

    def _name(self, lost: Sequence[int], silence_s: float) -> str | None:
        if not lost:
            return None
        names = name_ranks(lost, self._ranks)
        heard = self._heard.get(lost[0])
        after = "" if heard is None else f", last heard of after {heard.num_steps} steps"
        return f"{names} has been silent for {silence_s:g} s{after}"
