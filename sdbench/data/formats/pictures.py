"""The pictures of a folder, with the captions of its table: `list_pictures`."""

from __future__ import annotations

import os
from pathlib import Path

from sdbench.base.errors import ConfigError, blamed_on
from sdbench.data.formats.folder import read_table

# Where generate.py puts pictures, in the folder that it is given, and all of them at a glance.
PICTURES_NAME, GRID_NAME = "pictures", "grid.png"
# Caption tables of generate.py and of data sets, each with the folder of its pictures.
TABLES = {"prompts.csv": PICTURES_NAME, "captions.csv": "."}


def list_pictures(folder: Path) -> list[tuple[Path, str]]:
    """Return pictures with captions, of generate.py or of a data set, in the order of the table."""
    table = next((name for name in TABLES if (folder / name).is_file()), None)
    if table is None:
        what = "the folder has no table of captions" if folder.exists() else "no such folder"
        raise _refusal(what, folder)
    with blamed_on("FOLDER"):
        images, captions = read_table(folder / table, folder=folder / TABLES[table])
    if not images:
        raise _refusal("the folder has no pictures", folder)
    rows = []
    for path, caption in zip(images, captions, strict=True):
        if caption is None or not os.path.isfile(path):
            raise _refusal("a picture of the table, or its caption, is missing", path)
        rows.append((path, caption))
    return rows


def _refusal(what: str, value: Path) -> ConfigError:
    return ConfigError(
        what,
        value=str(value),
        allowed=f"a folder with {' or '.join(TABLES)} and its pictures",
        flag="FOLDER",
    )
