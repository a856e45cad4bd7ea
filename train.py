"""Train Stable Diffusion, with checkpoints to go on from, and a model to draw with at the end."""

# PYTHON_ARGCOMPLETE_OK: a shell may start this to complete a command line.

from __future__ import annotations

from collections.abc import Sequence

from sdbench.base.output import protected_output
from sdbench.base.stop import run_program, stoppable
from sdbench.programs import train


@protected_output()
@stoppable
def main(argv: Sequence[str] | None = None) -> int:
    """Train a model with these arguments, or those of the process; returns the exit code."""
    return train.main(argv, prog="train.py")


if __name__ == "__main__":
    run_program(main)
