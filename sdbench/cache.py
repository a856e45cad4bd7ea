"""Where does the suite keep what can be copied or made again?"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """This user's folder, which may be removed at any time when nothing runs."""
    return Path(tempfile.gettempdir(), f"sdbench-cache-{os.getuid()}")
