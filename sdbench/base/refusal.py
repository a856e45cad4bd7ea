"""A program's refusal to run, as values for the program that started it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.secrets import redact

# Names the file that the refusal is written to. Every process that the command starts inherits it.
VARIABLE = "SDBENCH_REFUSAL"


def report_refusal(error: ConfigError | RunError) -> None:
    """Write why this program runs nothing, if the one that started it has asked for that.

    Args:
        error: What is about to be printed.
    """
    path = os.environ.get(VARIABLE)
    if path is not None:
        content = {"error": type(error).__name__, "message": redact(str(error))}
        with contextlib.suppress(OSError):  # the exit code and the printed error still tell it
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def read_refusal(path: Path) -> dict[str, Any] | None:
    """The name of the error's class and its message; None if the program was not refused."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
