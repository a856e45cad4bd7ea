"""Tells the program that started this process why the process fails."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from sdbench.base.secrets import redact

# Names the file. Every process that the command starts inherits the variable.
VARIABLE = "SDBENCH_CAUSE"
# torchrun sets it for each rank, and prints the content of the file last.
TORCHRUN_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# Causes without an exception: SIGKILL ended the command, as the out-of-memory killer does; a rank
# ended silently, and the other ranks have noticed.
KILLED, LOST = "Killed", "Lost"


def report_cause(error: str, message: str) -> None:
    """Write class and message of the error that ends this process to the files that are asked for.

    The first process to do so counts: the others end because of it.
    """
    message = redact(message)
    for_torchrun = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    _write(VARIABLE, {"error": error, "message": message})
    _write(TORCHRUN_VARIABLE, {"message": for_torchrun})


def _write(variable: str, content: object) -> None:
    path = os.environ.get(variable)
    if path is not None:
        # Without the file the exit code and the printed error remain.
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            json.dump(content, file)


def read_cause(path: Path) -> dict[str, str] | None:
    """``error`` and ``message`` as reported, or None."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
