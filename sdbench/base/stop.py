"""How does a request from outside to stop reach the program?

Ctrl-C raises KeyboardInterrupt; SIGTERM, and SIGHUP when the terminal is closed, raise Terminated:
all in the main thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from types import FrameType

TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS = (signal.SIGINT, *TERMINATIONS)


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. No `except Exception` on the way may swallow it.

    Attributes:
        number: Which of them.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = signal.Signals(number)


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """While the block runs, a signal to stop is an exception in the main thread."""
    with keep_handlers():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, _raise_keyboard_interrupt)
            signal.signal(signal.SIGTERM, _raise_terminated)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
                signal.signal(signal.SIGHUP, _raise_terminated)
        yield


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Undo what the block does to the handlers of signals to stop; importing Composer sets some."""
    handlers = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers:
                signal.signal(number, handler)


def ignore_terminations() -> None:
    """The first reason to end is the one to tell, and nothing may interrupt the telling of it.

    When a rank ends, its launcher stops the others, which by then know why themselves.
    """
    if threading.current_thread() is threading.main_thread():
        for number in TERMINATIONS:
            signal.signal(number, signal.SIG_IGN)


def _raise_keyboard_interrupt(number: int, frame: FrameType | None) -> None:
    ignore_terminations()
    raise KeyboardInterrupt


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP and multiprocessing.parent_process() is not None:
        return  # it reaches all processes of a terminal; a forked worker leaves it to its parent
    ignore_terminations()
    raise Terminated(number)
