"""`Harm`: its pickle runs code where it is read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path


class Harm:
    """Pickled, it makes a folder when it is read by `pickle.load`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)

    def check_not_done(self, pickled: bytes | None = None) -> None:
        """Check that nobody has read it, and that it would have been seen: it is read here."""
        assert not self.path.exists()
        pickle.loads(pickled or pickle.dumps(self))
        assert self.path.exists()
