"""Turns stop signals into exceptions, and within a training loop into a request to end it.

In the main thread SIGINT (Ctrl-C) raises KeyboardInterrupt; SIGTERM, and SIGHUP when the terminal
is closed, raise Terminated. A program that they end has exit code 130.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from sdbench.base.errors import EXIT_INTERRUPTED, ConfigError
from sdbench.base.packages import INSTALL

PACKAGE = Path(__file__).resolve().parents[1]
TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS = (signal.SIGINT, *TERMINATIONS)
# A terminal or a scheduler signals both launcher and ranks, and the launcher passes the signal on:
# signals within this time are the same request.
SAME_REQUEST_S = 1.0
# A block that has not ended by then is broken off, unless its caller knows how long it takes.
PATIENCE_S = 10.0
# By then the code that drops exceptions has most likely ended; if not, the signal comes again.
SEND_AGAIN_S = 0.01
# How often a wait in another thread than the main one looks at the request.
LOOK_S = 0.5


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; not an Exception, which code on the way may swallow."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = signal.Signals(number)


STOPS = (KeyboardInterrupt, Terminated)


def signal_of(stop: BaseException | None) -> signal.Signals:
    """The signal whose exception this is."""
    return stop.number if isinstance(stop, Terminated) else signal.SIGINT


class StopRequest:
    """The request to end a loop; its `number` is None until a signal arrives."""

    def __init__(self, patience_s: Callable[[], float] = lambda: PATIENCE_S) -> None:
        """Wait for a signal; `patience_s` then gives the seconds until the loop is broken off."""
        self._patience_s = patience_s
        self.number: signal.Signals | None = None
        self._since_s = 0.0
        self._raises = False
        self._reminder: threading.Timer | None = None

    def note(self, number: int) -> None:
        """Take a signal as the request, unless there is one."""
        if self.number is None:
            self.number, self._since_s = signal.Signals(number), time.monotonic()

    @contextlib.contextmanager
    def raises_at_once(self) -> Iterator[None]:
        """During the block a signal raises, also one that has come before.

        For work that may be broken off anywhere, since nothing is kept of it.
        """
        self._raises = True
        try:
            self.obey()
            yield
        finally:
            self._raises = False

    def obey(self) -> None:
        """Raise a signal that has come, where signals raise at once."""
        if self._raises and self.number is not None:
            raise stopped_by(self.number)

    def takes(self, number: int) -> bool:
        """Take a signal as the request; False if it has to raise at once."""
        if self._raises:
            return False
        if self.number is None:
            self.note(number)
            # A reminder that comes earlier would count as the same request.
            patience_s = max(self._patience_s(), 1.1 * SAME_REQUEST_S)
            self._reminder = threading.Timer(patience_s, os.kill, (os.getpid(), number))
            self._reminder.daemon = True
            self._reminder.start()
            return True
        return time.monotonic() - self._since_s < SAME_REQUEST_S

    def forget(self) -> None:
        """Cancel the reminder: the loop has ended."""
        if self._reminder is not None:
            self._reminder.cancel()


_request: StopRequest | None = None
# The process whose main thread is stopped by exceptions; not that of a forked worker.
_process_id: int | None = None
# When the exception of a signal was raised.
_stopped_s: float | None = None
# A stop signal that another process received for this one.
_asked: int | None = None


def waited(is_over: Callable[[float], bool], timeout_s: float) -> bool:
    """Wait in parts, between which a stop signal is obeyed; False if the time has run out.

    `is_over` waits for so many seconds. A signal interrupts it only in the main thread, which is
    not that of a rank in a worker of Ray.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        if _request is not None:
            _request.obey()
        left_s = end_s - time.monotonic()
        if is_over(max(0.0, min(LOOK_S, left_s))):
            return True
        if left_s <= LOOK_S:
            return False


def ask_to_stop(number: int) -> None:
    """End the loop of this process, or one that begins later, as a first stop signal does.

    For a worker of Ray, whose main thread is not ours. A step that does not end is not aborted.
    """
    global _asked
    _asked = number
    if _request is not None:
        _request.note(number)


def stoppable(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate the `main` of a program, which a stop signal ends with exit code 130.

    A run that has begun writes its record first, and ends by itself.
    """

    @functools.wraps(main)
    def stoppable_main(*args: object, **options: object) -> int:
        with stop_signals_raise():
            try:
                return main(*args, **options)
            except STOPS as stop:
                ignore_terminations(STOP_SIGNALS)
                name = stop.number.name if isinstance(stop, Terminated) else "Ctrl-C"
                print(f"stopped by {name}", file=sys.stderr)
                return EXIT_INTERRUPTED

    return stoppable_main


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a `stoppable` main, and end the process with its exit code, which no signal changes."""
    for number in TERMINATIONS:
        if signal.getsignal(number) != signal.SIG_IGN:
            # A signal before main is obeyed when a run begins; a later one has no effect.
            signal.signal(number, lambda number, _: ask_to_stop(number))
    try:
        exit_code = main()
    except ModuleNotFoundError as error:
        exit_code = _refuse_without_package(error)
    keep_exit_code(exit_code)
    gc.freeze()  # or Python ends with a search for garbage in all modules: 0.8 s
    sys.exit(exit_code)


def _refuse_without_package(error: ModuleNotFoundError) -> int:
    """Print what to install if a file of this package imports what is not installed."""
    importer = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    if not importer.is_relative_to(PACKAGE) or str(error.name).split(".")[0] == PACKAGE.name:
        raise error
    refusal = ConfigError(
        f"the package {error.name} is not installed for this Python",
        value=sys.executable,
        allowed="a Python with the packages of requirements.txt, as make benchmark sets it up",
        flag=f"`source .venv/bin/activate`, or `{INSTALL}`",
    )
    print(f"error: {refusal}", file=sys.stderr)
    return refusal.exit_code


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """During the block a stop signal raises an exception in the main thread."""
    global _process_id, _stopped_s
    with keep_handlers(), _dropped_stops_come_again():
        if threading.current_thread() is threading.main_thread():
            _process_id, _stopped_s = os.getpid(), None
            for number in STOP_SIGNALS:
                # nohup ignores SIGHUP.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, _obey)
        yield


@contextlib.contextmanager
def stop_signals_ask(patience_s: Callable[[], float] = lambda: PATIENCE_S) -> Iterator[StopRequest]:
    """During the block a first stop signal becomes a request, and only a second one raises.

    The block has to look at the request and end. If it has not ended within `patience_s`, the
    signal is sent again. When it has, the exception of the signal is raised, also in place of an
    error: the signal may have ended processes that the block depends on.
    """
    global _request
    _request = request = StopRequest(patience_s)
    if _asked is not None:
        request.note(_asked)
    try:
        yield request
        if request.number is not None:
            raise stopped_by(request.number)
    except Exception as error:
        if request.number is None:
            raise
        raise stopped_by(request.number) from error
    finally:
        request.forget()
        _request = None


@contextlib.contextmanager
def _dropped_stops_come_again() -> Iterator[None]:
    """During the block a stop whose exception Python drops is sent again.

    Python drops exceptions of destructors and of callbacks of a fork: a Ctrl-C while worker
    processes are started would have no effect.
    """
    reminders: list[threading.Timer] = []

    def look_at(dropped: Any) -> None:
        global _stopped_s
        if os.getpid() != _process_id or not issubclass(dropped.exc_type, STOPS):
            known(dropped)
            return
        _stopped_s = None
        number = signal_of(dropped.exc_value)
        reminders.append(threading.Timer(SEND_AGAIN_S, os.kill, (os.getpid(), number)))
        reminders[-1].start()

    known, sys.unraisablehook = sys.unraisablehook, look_at
    try:
        yield
    finally:
        sys.unraisablehook = known
        for reminder in reminders:
            reminder.cancel()


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

    When a rank ends, its launcher signals the others, which may be ending for the same reason.
    """
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


def stopped_by(number: int) -> BaseException:
    """The exception of a signal; a later signal raises again, in case this one is dropped."""
    global _stopped_s
    _stopped_s = time.monotonic()
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


def obey_parent_alone() -> None:
    """In a worker process, obey SIGTERM only from the parent.

    A scheduler sends SIGTERM to all processes of a job, and a trainer that is told to stop still
    needs its workers for the current step. Linux only: elsewhere a process cannot tell who sent a
    signal.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)


def keep_exit_code(exit_code: int) -> None:
    """Ignore SIGTERM and SIGHUP from now on; Ctrl-C ends the process at once with this exit code.

    A launcher sends SIGTERM to the other ranks when one is gone; at its own end Python still
    removes shared memory and the like.
    """
    ignore_terminations()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(exit_code))


def _obey(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _process_id:
        if number == signal.SIGTERM:
            raise stopped_by(number)
        return  # all processes of a terminal get it; the parent decides for a forked worker
    if _stopped_s is not None and time.monotonic() - _stopped_s < SAME_REQUEST_S:
        return
    if _request is not None and _request.takes(number):
        return
    raise stopped_by(number)
