"""Measure how many images a second this machine trains Stable Diffusion with."""

# PYTHON_ARGCOMPLETE_OK: a shell may start this to complete a command line.

from __future__ import annotations

from collections.abc import Sequence

from sdbench.base.output import protected_output
from sdbench.base.stop import run_program, stoppable
from sdbench.programs import benchmark


@protected_output()
@stoppable
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with these arguments, or those of the process; returns the exit code."""
    return benchmark.main(argv, prog="benchmark.py")


if __name__ == "__main__":
    run_program(main)
