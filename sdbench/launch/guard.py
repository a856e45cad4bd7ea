"""Ends a command together with the program that started it, whatever kills either of them.

Run as a script between the two: `python guard.py GRACE_S COMMAND...`. Its standard input is a pipe
from the program, which writes the number of the signal that has stopped it. Then, or when the pipe
closes (the program asks for an end, or has died), or when this process gets a signal to stop, the
command and all its descendants are sent that signal, or SIGTERM, and are killed after the grace.
The program hands it a locked file, which stays locked until all of them are gone: the next
measurement waits for that lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import psutil

# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 0.05
# The kernel needs a while to free what a killed process holds, such as 16 GiB or a GPU.
KILLED_WITHIN_S = 60.0


def main(command: list[str], *, grace_s: float, has_starter: bool = True) -> int:
    """Run a command to its end, or until it is asked to stop; returns its exit code, as a shell.

    With a starter, standard input is that program's pipe; without, only a signal stops it.
    """
    # A list, and no event: a signal may arrive while this thread holds an event's lock.
    signals: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: signals.append(number))
    if has_starter:
        threading.Thread(target=_wait_for_starter, args=(signals,), daemon=True).start()
    if sys.platform == "linux":
        # Ranks whose launcher has died become children of this process and are still found.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_guard)
    while process.poll() is None and not signals:
        time.sleep(POLL_S)
    # The same signal, so that a run says and records that it was Ctrl-C.
    _end(process, signals[0] if signals else signal.SIGTERM, grace_s=grace_s)
    assert process.returncode is not None
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end(process: subprocess.Popen, number: int, *, grace_s: float) -> None:
    """End a command and all its descendants by a signal, and come back when they are gone."""
    stages = ((number, grace_s), (signal.SIGKILL, KILLED_WITHIN_S))
    for sent, patience_s in stages:
        left = [one for one in psutil.Process().children(recursive=True) if _is_alive(one)]
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(sent)
        end_s = time.monotonic() + patience_s
        while process.poll() is None or any(_is_alive(one) for one in left):
            if time.monotonic() > end_s:
                break
            time.sleep(POLL_S)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for_starter(signals: list[int]) -> None:
    # Not sys.stdin, whose lock the thread would hold when the interpreter ends.
    told = os.read(0, 1)  # a signal, or nothing when the other end of the pipe is closed
    signals.append(told[0] if told else signal.SIGTERM)


def _end_with_guard() -> None:
    """Have the kernel end the command should the guard be killed; runs in its process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], grace_s=float(sys.argv[1])))
