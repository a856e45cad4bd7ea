"""The launcher of this rank: which process it is, and an end of the rank together with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

# By file name or module.
LAUNCHERS = frozenset({"composer", "torchrun", "composer.cli.launcher", "torch.distributed.run"})
# linux/prctl.h
PR_SET_PDEATHSIG = 1


def find_launcher() -> Any:
    """The `psutil.Process` of the launcher that started this process; None if none did."""
    import psutil

    try:
        parent = psutil.Process().parent()
        words = [] if parent is None else parent.cmdline()[:3]
    except psutil.Error:  # it has just died, or is another user's
        return None
    return parent if LAUNCHERS & {Path(word).name for word in words} else None


def end_with_launcher() -> None:
    """Have the kernel send this rank SIGTERM when its launcher dies; on Linux only.

    Any launcher dies of SIGKILL, and `composer` of SIGHUP, without a word to its ranks, which would
    train on and keep their GPUs.
    """
    if sys.platform != "linux" or "RANK" not in os.environ:
        return
    launcher = find_launcher()
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher.pid:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)
