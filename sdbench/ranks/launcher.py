"""Finds the launcher of this rank, and lets the rank end together with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sdbench
from sdbench.ranks.ray_cluster import RAY_BEGAN_S

COMPOSER, TORCHRUN = "composer", "torchrun"
# The launchers, by the name of their file or module.
LAUNCHERS = {
    COMPOSER: COMPOSER,
    TORCHRUN: TORCHRUN,
    "composer.cli.launcher": COMPOSER,
    "torch.distributed.run": TORCHRUN,
}
# In a record: a single process without a launcher.
NO_LAUNCHER = "none"
# linux/prctl.h
PR_SET_PDEATHSIG = 1


def find_launcher() -> Any:
    """The `psutil.Process` of the launcher that started this process, or None."""
    return _find()[0]


def launcher_name() -> str | None:
    """What started the ranks: composer, torchrun, `NO_LAUNCHER`, or None for another program."""
    name = _find()[1]
    return NO_LAUNCHER if name is None and "RANK" not in os.environ else name


def typed_command(command: Sequence[str]) -> list[str] | None:
    """What was typed for a run on one node, whose record has this command.

    None if a program started the ranks that is not known.
    """
    launcher, name = _find()
    if name is None:
        if "RANK" in os.environ and RAY_BEGAN_S not in os.environ:
            return None
        script = Path(sdbench.__file__).parents[1] / command[0]  # an installed package has none
        program = [os.path.relpath(script)] if script.is_file() else ["-m", "sdbench", script.stem]
        return ["python", *program, *command[1:]]
    words = launcher.cmdline()
    start = next(place for place, word in enumerate(words) if Path(word).name in LAUNCHERS)
    return [name, *words[start + 1 :]]


def run_began_s() -> float:
    """When the command of this run was given, in seconds since 1970; the ranks of a node agree."""
    import psutil

    if RAY_BEGAN_S in os.environ:  # Ray may have started this process long before
        return float(os.environ[RAY_BEGAN_S])
    return (find_launcher() or psutil.Process()).create_time()


def _find() -> tuple[Any, str | None]:
    """The launcher's process and its name, or None."""
    import psutil

    try:
        parent = psutil.Process().parent()
        words = [] if parent is None else parent.cmdline()[:3]
    except psutil.Error:  # it has just died, or is another user's
        return None, None
    names = [LAUNCHERS[name] for word in words if (name := Path(word).name) in LAUNCHERS]
    return (parent, names[0]) if names else (None, None)


def end_with_launcher() -> None:
    """Have the kernel send this rank SIGTERM when its launcher dies; on Linux only.

    SIGKILL ends any launcher, and SIGHUP `composer`, without a signal to the ranks, which would go
    on and keep their GPUs.
    """
    if sys.platform != "linux" or "RANK" not in os.environ:
        return
    launcher = find_launcher()
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher.pid:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)
