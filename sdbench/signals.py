"""How does a request from outside to stop reach the program?

Ctrl-C raises KeyboardInterrupt, SIGTERM raises Terminated, both in the main thread.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(BaseException):
    """SIGTERM arrived. No `except Exception` on the way may swallow it."""


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """While the block runs, a signal to stop is an exception in the main thread."""
    with keep_handlers():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, _raise_keyboard_interrupt)
            signal.signal(signal.SIGTERM, _raise_terminated)
        yield


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Undo what the block does to the handlers of signals to stop; importing Composer sets both."""
    handlers = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers:
                signal.signal(number, handler)


def ignore_sigterm() -> None:
    """The first reason to end is the one to tell, and nothing may interrupt the telling of it.

    When a rank ends, its launcher stops the others, which by then know why themselves.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _raise_keyboard_interrupt(number: int, frame: FrameType | None) -> None:
    ignore_sigterm()
    raise KeyboardInterrupt


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    ignore_sigterm()
    raise Terminated
