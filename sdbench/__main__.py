"""Entry point of `python -m sdbench COMMAND`."""

# PYTHON_ARGCOMPLETE_OK: a shell may start this to complete a command line.

from sdbench.base.stop import run_program
from sdbench.cli import main

run_program(main)
