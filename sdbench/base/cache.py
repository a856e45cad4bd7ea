"""`private_folder` makes the user's private cache folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sdbench.base.errors import ConfigError


def private_folder(name: str = ".") -> Path:
    """Make and return the folder `name` in ``$XDG_CACHE_HOME/sdbench`` or ``~/.cache/sdbench``.

    Only this user can read and write it. It may be deleted whenever no run is in progress.

    Raises:
        ConfigError: It cannot be made, is another user's, or can be replaced by another user.
    """
    root = _cache_home() / "sdbench"
    for folder in (root, root / name):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            own, above = folder.lstat(), folder.parent.stat()
        except OSError as error:
            reason = f"cannot be made ({error.strerror})"
            raise _refusal(f"The cache folder {reason}", folder) from error
        if stat.S_ISLNK(own.st_mode):
            raise _refusal("The cache folder is a link", folder)
        if own.st_uid != os.geteuid():
            raise _refusal(f"The cache folder belongs to user {own.st_uid}", folder)
        if own.st_mode & 0o077:
            mode = stat.S_IMODE(own.st_mode)
            raise _refusal(f"The cache folder is open to others (mode {mode:04o})", folder)
        is_open = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
        if is_open or above.st_uid not in (0, os.geteuid()):
            raise _refusal("Others could exchange the cache folder for another", folder)
    return root / name


def _cache_home() -> Path:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise _refusal("There is no home folder for a cache", None) from error
    if not home.is_absolute():
        raise _refusal("The cache folder is not an absolute path", home)
    return home


def _refusal(what: str, folder: Path | None) -> ConfigError:
    return ConfigError(
        what,
        value=folder and str(folder),
        allowed="a folder of this user's with mode 0700, in one that others cannot change",
        flag="XDG_CACHE_HOME (for copies of data also --local)",
    )
