"""`find_recipe` and `find_table`: files of configs/ and results/, by the names that users give.

An installed package has copies of them (setup.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.base.names import by_similarity

_PACKAGE = Path(__file__).resolve().parents[1]
_COPIES = _PACKAGE / "carried"
# The folder that has configs/ and results/.
_CARRIED = _COPIES if _COPIES.is_dir() else _PACKAGE.parent
# Of an installed package it has the tables alone.
RESULTS = _CARRIED / "results"
THROUGHPUT = RESULTS / "throughput.csv"


def find_recipe(given: str) -> Path:
    """The file with this path, or the recipe of the suite with this name."""
    recipes = _CARRIED.glob("configs/**/*.yaml")
    return _find(given, "recipe", recipes, suffix=".yaml", flag="--config")


def find_table(given: Path) -> Path:
    """The file with this path, or the table of the suite with this name."""
    tables = [*RESULTS.glob("quoted/*.csv"), THROUGHPUT]
    return _find(given, "table", tables, suffix=".csv", flag="the path given")


def _find(given: str | Path, what: str, files: Iterable[Path], *, suffix: str, flag: str) -> Path:
    """The file with this path, or the one whose path ends like it, with the suffix or without."""
    if os.path.exists(given) and not os.path.isdir(given):
        return Path(given)
    known = {file.with_suffix("").parts: file for file in files}
    words = Path(str(given).removesuffix(suffix)).parts
    for parts, file in known.items():
        if parts[-len(words) :] == words:
            return file
    names = by_similarity("".join(words[-1:]), (parts[-1] for parts in known))
    raise ConfigError(
        f"this is no file, and no {what} of the suite has this name",
        value=str(given),
        allowed=" | ".join(["the path of a file", *names]),
        flag=flag,
    )
