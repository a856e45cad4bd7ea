"""Entry point of `python -m sdbench COMMAND`."""

# PYTHON_ARGCOMPLETE_OK: a shell may start this to complete a command line.

import sys

from sdbench.cli import main

sys.exit(main())
