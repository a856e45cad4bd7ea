"""Entry point of `python -m sdbench COMMAND`."""

from sdbench.base.stop import run_program
from sdbench.cli import main

run_program(main)
