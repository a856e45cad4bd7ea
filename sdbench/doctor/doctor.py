"""Is everything ready for an expensive job, on each of its nodes?

python -m sdbench doctor
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence

from sdbench.doctor.checks import is_stuck
from sdbench.doctor.examine import examine
from sdbench.doctor.flags import parse
from sdbench.doctor.job import Job
from sdbench.doctor.meeting import find_ranks
from sdbench.doctor.printout import to_json, to_text

# Of an output that is no terminal.
PLAIN_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Look at everything, and say what was found.

    Args:
        argv: Arguments of the command; None takes those of the process.

    Returns:
        The exit code. The verdict is the first rank's; the others end with 0 once it has it.

    Raises:
        ConfigError: A flag, or what Slurm says about the ranks, is of no use.
    """
    flags = vars(parse(argv))
    strict, as_json = flags.pop("strict"), flags.pop("json")
    job = Job(ranks=find_ranks(), **flags)
    exit_code = 0
    try:
        with _only_results_on_stdout():
            report, take_leave = examine(job)
        if report is not None:
            text = to_json(report, strict=strict) if as_json else to_text(report, width=_width())
            # A rank that has not met the first one must not spoil what that one prints.
            print(text, file=sys.stdout if job.ranks.rank == 0 else sys.stderr, flush=True)
            exit_code = report.exit_code(strict=strict)
        take_leave()
    except KeyboardInterrupt:
        exit_code = 130
    if is_stuck() or job.ranks.world_size > 1:
        # Nothing is left to tidy up, and what hangs would keep the interpreter from ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _width() -> int:
    return shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns


@contextlib.contextmanager
def _only_results_on_stdout() -> Iterator[None]:
    """Send what libraries print, in Python or in C as NCCL does, to standard error."""
    sys.stdout.flush()
    python_stdout, stdout = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = python_stdout
        os.dup2(stdout, 1)
        os.close(stdout)
