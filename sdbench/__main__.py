"""Entry point of `python -m sdbench COMMAND`."""

from sdbench.base.stop import end_program
from sdbench.cli import main

end_program(main())
