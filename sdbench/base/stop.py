"""Turns stop signals into exceptions, and within a training loop into a request to end it.

In the main thread SIGINT (Ctrl-C) raises KeyboardInterrupt; SIGTERM, and SIGHUP when the terminal
is closed, raise Terminated.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS = (signal.SIGINT, *TERMINATIONS)
# A terminal or a scheduler signals both launcher and ranks, and the launcher passes the signal on:
# signals within this time are the same request.
SAME_REQUEST_S = 1.0
# A step that has not ended by then is aborted: 20 s after SIGTERM a scheduler may send SIGKILL.
PATIENCE_S = 10.0


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. No `except Exception` on the way may swallow it.

    Attributes:
        number: Which of them.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = signal.Signals(number)


class StopRequest:
    """The request to end a loop.

    Attributes:
        number: The signal that asked for it; None until one arrives.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._since_s = 0.0
        self._process_id = os.getpid()
        self._reminder: threading.Timer | None = None

    def note(self, number: int) -> None:
        """Take a signal as the request, unless there is one."""
        if self.number is None:
            self.number, self._since_s = signal.Signals(number), time.monotonic()

    def takes(self, number: int) -> bool:
        """Take a signal as the request; False if it has to raise at once."""
        if os.getpid() != self._process_id:
            return False  # a worker that was forked within the loop
        if self.number is None:
            self.note(number)
            self._reminder = threading.Timer(PATIENCE_S, os.kill, (self._process_id, number))
            self._reminder.daemon = True
            self._reminder.start()
            return True
        return time.monotonic() - self._since_s < SAME_REQUEST_S

    def forget(self) -> None:
        """Cancel the reminder: the loop has ended."""
        if self._reminder is not None:
            self._reminder.cancel()


_request: StopRequest | None = None
# A signal that was taken by another process for this one.
_asked: int | None = None


def ask_to_stop(number: int) -> None:
    """End the loop of this process, or one that begins later, as a first stop signal does.

    For a process whose main thread is not ours, which gets no signals: a worker of Ray. A step that
    does not end is not aborted.
    """
    global _asked
    _asked = number
    if _request is not None:
        _request.note(number)


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """During the block a stop signal raises an exception in the main thread."""
    with keep_handlers():
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                # nohup has SIGHUP ignored.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, _obey)
        yield


@contextlib.contextmanager
def stop_signals_ask() -> Iterator[StopRequest]:
    """During the block a first stop signal becomes a request, and only a second one raises.

    The block has to look at the request and end. If it has not ended after `PATIENCE_S`, the signal
    is sent again. When it has, the exception of the signal is raised, also in place of an error:
    the signal may have ended processes that the block depends on.
    """
    global _request
    _request = request = StopRequest()
    if _asked is not None:
        request.note(_asked)
    try:
        yield request
        if request.number is not None:
            raise _stopped_by(request.number)
    except Exception as error:
        if request.number is None:
            raise
        raise _stopped_by(request.number) from error
    finally:
        request.forget()
        _request = None


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Restore the handlers of stop signals after the block; importing Composer sets some."""
    handlers = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers:
                signal.signal(number, handler)


def ignore_terminations(numbers: Sequence[int] = TERMINATIONS) -> None:
    """Ignore further signals, since the record keeps the first reason of an end.

    When a rank ends, its launcher signals the others, which may be ending for that reason.
    """
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


def _obey(number: int, frame: FrameType | None) -> None:
    if _request is not None and _request.takes(number):
        return
    if number == signal.SIGHUP and multiprocessing.parent_process() is not None:
        return  # all processes of a terminal get it; for a forked worker its parent decides
    raise _stopped_by(number)


def _stopped_by(number: int) -> BaseException:
    """The exception of a signal; further signals are ignored."""
    ignore_terminations()
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
