"""How does a command end with the program that started it, whatever kills either of them?

Run as a script between the two: `python guard.py GRACE_S COMMAND...`. Its standard input is a pipe
from the program. When that closes, because the program asks for an end or has died itself, the
command and everything that it has started are asked to end, and killed if they have not after the
grace.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(command: list[str], *, grace_s: float) -> int:
    """Run a command to its end, or until standard input closes.

    Args:
        command: Program and arguments.
        grace_s: How long what is asked to end may take.

    Returns:
        Its exit code; for one that a signal ended 128 plus its number, as a shell has it.
    """
    if sys.platform == "linux":
        # Ranks whose launcher has died become children of this process and are still found.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_starter, args=(grace_s,), daemon=True).start()
    exit_code = process.wait()
    end_processes(psutil.Process().children(recursive=True), grace_s=grace_s)
    return exit_code if exit_code >= 0 else 128 - exit_code


def end_processes(processes: list[psutil.Process], *, grace_s: float) -> None:
    """Ask processes to end, and kill those that have not after the grace."""
    for process in processes:
        _tell(process, psutil.Process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        _tell(process, psutil.Process.kill)


def _end_with_starter(grace_s: float) -> None:
    # Returns when the other end of the pipe is closed. Not sys.stdin, whose lock the thread would
    # hold when the interpreter ends.
    os.read(0, 1)
    end_processes(psutil.Process().children(recursive=True), grace_s=grace_s)


def _tell(process: psutil.Process, what: object) -> None:
    try:
        what(process)  # type: ignore[operator]
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], grace_s=float(sys.argv[1])))
