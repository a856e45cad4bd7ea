"""Runs composer or torchrun with another time between SIGTERM and SIGKILL of its ranks.

    python stop_grace.py LAUNCHER GRACE_S ARGUMENTS...

By themselves both kill a rank 30 s after they have sent it SIGTERM, even in the middle of a step,
and do not wait for it at all when a second SIGTERM arrives.
"""

from __future__ import annotations

import datetime
import signal
import sys
from typing import Any


def main(name: str, grace_s: float) -> Any:
    """Run a launcher on the rest of `sys.argv`, with `grace_s` for ranks that it stops."""
    if name == "torchrun":
        from torch.distributed import run as launcher
        from torch.distributed.elastic.multiprocessing.api import PContext

        close = PContext.close

        # From torch 2.14 on torchrun names its own 30 s.
        def close_with_grace(context: Any, death_sig: Any = None, timeout: float = 0.0) -> None:
            _ignore_terminations()
            close(context, death_sig, max(timeout, grace_s))

        PContext.close = close_with_grace
    else:
        from composer.cli import launcher

        clean_up = launcher._cleanup_processes

        def clean_up_with_grace(processes: Any) -> None:
            _ignore_terminations()
            clean_up(processes)

        launcher._cleanup_processes = clean_up_with_grace
        launcher.CLEANUP_TIMEOUT = datetime.timedelta(seconds=grace_s)
    return launcher.main()


def _ignore_terminations() -> None:
    # A scheduler signals all processes of a job, and the node's first process passes it on as well.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules must not shadow the launcher's
    _, launcher_name, grace, *sys.argv[1:] = sys.argv
    sys.exit(main(launcher_name, float(grace)))
