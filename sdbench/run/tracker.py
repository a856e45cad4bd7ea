"""`Tracker`, the base of logs for other programs, whose failures never end the run."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar


class Tracker(abc.ABC):
    """Logs figures of a run; its first error becomes a warning and turns it off.

    Attributes:
        program: Name of the other program.
        is_on: Whether it was asked for, on this rank, and has not failed.
    """

    program: ClassVar[str]

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Log figures of a step, by name."""
        self._guard(lambda: self._log(figures, step))

    def log_picture(self, name: str, path: Path, *, step: int) -> None:
        """Log the picture of a file."""
        self._guard(lambda: self._log_picture(name, path, step))

    @abc.abstractmethod
    def _log(self, figures: Mapping[str, float], step: int) -> None:
        """As `log`; may raise."""

    @abc.abstractmethod
    def _log_picture(self, name: str, path: Path, step: int) -> None:
        """As `log_picture`; may raise."""

    def _guard(self, action: Callable[[], None]) -> None:
        if not self.is_on:
            return
        try:
            action()
        # Any error: a log must not end the run.
        except Exception as error:
            self.is_on = False
            print(f"warning: {self.program} is off for this run: {error}", file=sys.stderr)
