"""Entry point of `python -m sdbench COMMAND`."""

import sys

from sdbench.cli import main

sys.exit(main())
