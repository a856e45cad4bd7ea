"""Logs of a run for other programs, TensorBoard and W&B, whose failures never end the run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from sdbench.base.files import replace_file

EVENTS_FOLDER_NAME = "tensorboard"
# An observer logs to W&B this often, and where the phase changes: reading a loss waits for the
# device.
PERIOD_S = 10.0
# Has the id of the W&B run, with which the next process of the same run goes on.
ID_NAME = "wandb_id.txt"


class Tracker:
    """Logs figures of a run; its first error becomes a warning and turns it off.

    Attributes:
        program: Name of the other program.
        is_on: Whether it was asked for, on this rank, and has not failed.
    """

    program: ClassVar[str]

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._writer: Any = None  # of the other program

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Log figures of a step, by name."""
        self._guard(lambda: self._log(figures, step))

    def log_picture(self, name: str, path: Path, *, step: int) -> None:
        """Log the picture of a file."""
        self._guard(lambda: self._log_picture(name, path, step))

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def _log_picture(self, name: str, path: Path, step: int) -> None:
        raise NotImplementedError

    def _guard(self, action: Callable[[], None]) -> None:
        if not self.is_on:
            return
        try:
            action()
        except Exception as error:  # of any kind: a log must not end the run
            self.is_on = False
            print(f"warning: {self.program} is off for this run: {error}", file=sys.stderr)


class TensorboardLog(Tracker):
    """Writes event files when asked to."""

    program = "TensorBoard"

    def start(self, *, folder: Path, num_steps: int) -> None:
        """Begin an event file in the folder of a run that goes on after `num_steps` steps.

        TensorBoard hides later steps of older files.
        """

        def open_writer() -> None:
            from tensorboardX import SummaryWriter

            purge_step = num_steps + 1 if num_steps else None
            self._writer = SummaryWriter(str(folder / EVENTS_FOLDER_NAME), purge_step=purge_step)

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


class WandbLog(Tracker):
    """Logs to W&B when asked to: losses as an observer of steps, or the figures it is given."""

    program = "Weights & Biases"

    def __init__(self, *, name: str | None, project: str | None, rank: int) -> None:
        """Log nothing yet; only rank 0 logs, and only if a name or a project is given."""
        super().__init__(is_on=rank == 0 and (name is not None or project is not None))
        self._name = name
        self._project = project
        self._pending: list[tuple[int, str, Callable[[], float]]] = []
        self._last_s = time.monotonic()

    def start(self, *, config: dict[str, Any], folder: Path, has_parts: bool = False) -> None:
        """Open the W&B run; it is offline without an API key or with WANDB_MODE=offline.

        Args:
            config: Settings, without secrets.
            folder: Of the run.
            has_parts: Whether several processes may train the run in turn. All log to one W&B run,
                whose charts have the key ``step`` as their x axis.
        """

        def init() -> None:
            import wandb

            # Without a key wandb.init would ask at the terminal and wait.
            has_key = "WANDB_API_KEY" in os.environ or wandb.api.api_key is not None
            mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
            same_run = {"id": _read_id(folder), "resume": "allow"} if has_parts else {}
            self._writer = wandb.init(
                name=self._name,
                project=self._project,
                config=config,
                dir=str(folder),
                mode=mode,
                # Neither the command line nor the output, which W&B would take as they are: the
                # config and stdout.log have them without secrets.
                settings=wandb.Settings(init_timeout=30, console="off", _disable_meta=True),
                **same_run,
            )
            if has_parts:
                # W&B's own step only rises: it would drop the steps that are trained again.
                self._writer.define_metric("*", step_metric="step")

        self._guard(init)

    def loop_begins(self) -> None:
        """Log nothing yet."""

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """Keep this step to be logged later, and log the kept ones if that is due."""
        if not self.is_on:
            return
        is_due = time.monotonic() - self._last_s >= PERIOD_S
        if self._pending and (is_due or phase != self._pending[-1][1]):
            self._guard(self._log_pending)
        self._pending.append((index, phase, loss))

    def close(self) -> None:
        """Log the steps that are still kept; the loop has ended. Waits for the device."""
        self._guard(self._log_pending)

    def finish(self, summary: dict[str, Any]) -> None:
        """Log the result and close the W&B run."""

        def finish() -> None:
            self._writer.summary.update(summary)
            self._writer.finish()

        self._guard(finish)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        self._writer.log({"step": step, **figures})

    def _log_picture(self, name: str, path: Path, step: int) -> None:
        import wandb

        self._writer.log({"step": step, name: wandb.Image(str(path))})

    def _log_pending(self) -> None:
        for index, phase, loss in self._pending:
            self._writer.log({"loss/train/total": loss(), "phase": phase}, index)
        self._pending.clear()
        self._last_s = time.monotonic()


def _read_id(folder: Path) -> str:
    """The id that the folder keeps; a new one is written there first."""
    import wandb

    path = folder / ID_NAME
    if not path.exists():
        replace_file(path, wandb.util.generate_id())
    return path.read_text(encoding="utf-8")
