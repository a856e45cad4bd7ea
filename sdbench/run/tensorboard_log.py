"""Logs a training run to event files, which TensorBoard shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdbench.run.tracker import Tracker

FOLDER_NAME = "tensorboard"


class TensorboardLog(Tracker):
    """Writes event files when asked to."""

    program = "TensorBoard"

    def __init__(self, *, is_on: bool) -> None:
        super().__init__(is_on=is_on)
        self._writer: Any = None

    def start(self, *, folder: Path, num_steps: int) -> None:
        """Begin an event file.

        Args:
            folder: Of the run.
            num_steps: Steps of the checkpoint that the run resumes from. TensorBoard hides later
                steps of older files.
        """

        def open_writer() -> None:
            from tensorboardX import SummaryWriter

            purge_step = num_steps + 1 if num_steps else None
            self._writer = SummaryWriter(str(folder / FOLDER_NAME), purge_step=purge_step)

        self._guard(open_writer)

    def close(self) -> None:
        """Write the figures that are still kept."""
        self._guard(lambda: self._writer.close())

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def _log_picture(self, name: str, path: Path, step: int) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        self._writer.add_image(name, pixels, step, dataformats="HWC")
