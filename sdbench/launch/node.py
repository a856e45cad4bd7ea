"""The first process of a node under a scheduler or in a container; it runs the launcher.

    python -m sdbench.launch.node GRACE_S LAUNCHER ARGUMENTS...

A scheduler or a container that stops a job may signal its first process alone. This one passes the
signal on to every rank, which then has the grace to write its record. Before and after the run it
removes what killed runs left in shared memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sdbench.base.shared_memory import remove_stale_shared_memory
from sdbench.launch import guard

LAUNCHER_SCRIPT = Path(__file__).with_name("stop_grace.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a launcher to its end; returns its exit code, 128 + n if signal n ended it."""
    grace_s, launcher, *arguments = sys.argv[1:] if argv is None else argv
    _clean("before the run")
    command = [sys.executable, str(LAUNCHER_SCRIPT), launcher, grace_s, *arguments]
    exit_code = guard.main(command, grace_s=float(grace_s), has_starter=False)
    _clean("after the run")
    return exit_code


def _clean(when: str) -> None:
    num_removed = remove_stale_shared_memory()
    if num_removed:
        print(f"removed {num_removed} pieces of shared memory {when} that no process uses")


if __name__ == "__main__":
    sys.exit(main())
