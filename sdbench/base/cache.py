"""`private_folder` makes the user's private cache folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sdbench.base.errors import ConfigError


def private_folder(name: str = ".") -> Path:
    """Make and return the folder `name` in ``$XDG_CACHE_HOME/sdbench`` or ``~/.cache/sdbench``.

    Only this user can read and write it; a folder open to others is refused. It may be deleted
    whenever no run is in progress.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sdbench")
    for folder in (root, root / name):
        if fault := _find_fault(folder):
            raise ConfigError(
                f"The cache folder {fault}",
                value=str(folder),
                allowed="a folder of this user with mode 0700, inside one that others cannot write",
                flag="XDG_CACHE_HOME (for copies of data also --local)",
            )
    return root / name


def _find_fault(folder: Path) -> str | None:
    """Make a folder; return why others may have access to it, or None."""
    if not folder.is_absolute():
        return "is not an absolute path"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own, above = folder.lstat(), folder.parent.stat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    mode = stat.filemode(own.st_mode)
    if stat.S_ISLNK(own.st_mode) or own.st_uid != os.geteuid() or own.st_mode & 0o077:
        return f"is a link or open to others (mode {mode}, user {own.st_uid})"
    is_open = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    if is_open or above.st_uid not in (0, os.geteuid()):
        return "could be replaced by another user"
    return None
