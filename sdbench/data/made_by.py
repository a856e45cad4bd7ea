"""How a data set was made: a hidden file beside its samples, which records take over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdbench import __version__
from sdbench.base.errors import ConfigError
from sdbench.base.files import write_json
from sdbench.base.outside import read_json_object
from sdbench.data.formats.checks import PLACE_FLAGS
from sdbench.record.provenance import git_state

# Hidden files are no samples, whatever the format.
MADE_BY_NAME = ".made_by.json"


def note_how_made(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write down how a data set was made.

    Args:
        folder: Of the data set.
        facts: The command and what decides its output. Of a path the name alone is kept, as the
            data set, and records of runs on it, may be published.

    Raises:
        OSError: It cannot be written.
    """
    named = {name: _without_folders(value) for name, value in facts.items()}
    suite = {"suite_version": __version__, "git_commit": git_state()["commit"]}
    write_json(folder / MADE_BY_NAME, {**named, **suite})


def read_how_made(folder: Path) -> dict[str, Any] | None:
    """What `note_how_made` has written; None where it was not called.

    Raises:
        ConfigError: The file is damaged.
    """
    path = folder / MADE_BY_NAME
    # `Path.is_file` raises where a URL or a command is too long for a name.
    if not os.path.isfile(path):
        return None
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"what says how the data set was made cannot be read ({error})",
            value=str(path),
            allowed="the file as it was written, or none",
            flag=PLACE_FLAGS,
        ) from None


def _without_folders(value: Any) -> Any:
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value
