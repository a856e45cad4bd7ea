"""Reads the records that a user points to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.record.store import load_record


def read_record(path: Path, *, flag: str) -> dict[str, Any]:
    """Read a record.

    Args:
        path: record.json, or the run folder that holds it.
        flag: The flag that the path was given with.

    Raises:
        ConfigError: It cannot be read, or is none of this version of the suite.
    """
    try:
        return load_record(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"a record cannot be read ({error})",
            value=str(path),
            allowed="a record that this version of the suite reads, as it was written",
            flag=flag,
        ) from None
