"""A time limit on loading in the training process, where no worker is watched by torch."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from sdbench.base.errors import RunError


@contextlib.contextmanager
def time_limit(timeout_s: float, *, message: str) -> Iterator[None]:
    """Raise if the block takes longer.

    A timer's signal interrupts what waits in the interpreter: locks, sleeps, sockets. It reaches
    the main thread only; in another one, or inside a C function that never returns, nothing can
    be interrupted, and there is no limit. A timer that runs already is put back afterwards.

    Args:
        timeout_s: Seconds that the block may take.
        message: What to say.

    Raises:
        RunError: The time is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise RunError(message)

    former_handler = signal.signal(signal.SIGALRM, interrupt)
    former_timer = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *former_timer)
        signal.signal(signal.SIGALRM, former_handler)
