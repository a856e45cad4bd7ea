"""Logs a run to TensorBoard and W&B, whose failures never end the run."""

from __future__ import annotations

import functools
import os
import secrets
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
# Holds the id of the W&B run, which the next process of the same run continues.
ID_NAME = "wandb_id.txt"


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Call a method of a tracker that is on; an error becomes a warning and turns it off."""

    @functools.wraps(method)
    def call(tracker: _Tracker, *args: Any, **options: Any) -> None:
        if not tracker.is_on:
            return
        try:
            method(tracker, *args, **options)
        except Exception as error:  # of any kind: a log must not end the run
            tracker.is_on = False
            print(f"warning: {tracker.program} is off for this run: {error}", file=sys.stderr)

    return call


class _Tracker:
    """Logs figures and pictures of a run to another program.

    Attributes:
        program: Name of the other program.
        is_on: Whether it was asked for, on this rank, and has not failed.
    """

    program: ClassVar[str]

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._writer: Any = None  # of the other program


class TensorboardLog(_Tracker):
    """Writes event files when asked to."""

    program = "TensorBoard"

    @_guarded
    def start(self, *, folder: Path, num_steps: int) -> None:
        """Begin an event file in the folder of a run that goes on after `num_steps` steps.

        TensorBoard hides later steps of older files.
        """
        from torch.utils.tensorboard import SummaryWriter

        purge_step = num_steps + 1 if num_steps else None
        self._writer = SummaryWriter(str(folder / EVENTS_FOLDER_NAME), purge_step=purge_step)

    @_guarded
    def close(self) -> None:
        """Write the figures that are still kept."""
        self._writer.close()

    @_guarded
    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Write scalars."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    @_guarded
    def log_picture(self, name: str, path: Path, *, step: int) -> None:
        """Write an image."""
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        self._writer.add_image(name, pixels, step, dataformats="HWC")


class WandbLog(_Tracker):
    """Logs to W&B when asked to: losses as an observer of steps, or the figures it is given."""

    program = "Weights & Biases"

    def __init__(self, *, name: str | None, project: str | None, rank: int) -> None:
        """Log nothing yet; only rank 0 logs, and only if a name or a project is given."""
        super().__init__(is_on=rank == 0 and (name is not None or project is not None))
        self._name = name
        self._project = project
        self._pending: list[tuple[int, str, Callable[[], float]]] = []
        self._last_s = time.monotonic()

    @_guarded
    def start(self, *, config: dict[str, Any], folder: Path, has_parts: bool = False) -> None:
        """Open the W&B run; it is offline without an API key or with WANDB_MODE=offline.

        `config` has no secrets. With `has_parts` several processes may train the run in turn: all
        log to one W&B run, whose charts have the key ``step`` as their x axis.
        """
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if not mode:
            # Without a key wandb.init would ask at the terminal and wait.
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
        same_run = {}
        if has_parts:
            file = folder / ID_NAME
            if not file.exists():
                replace_file(file, secrets.token_hex(4))
            same_run = {"id": file.read_text(encoding="utf-8"), "resume": "allow"}
        self._writer = wandb.init(
            name=self._name,
            project=self._project,
            config=config,
            dir=str(folder),
            mode=mode,
            # Neither the command line nor the output, which W&B would take as they are: the
            # config and stdout.log have them without secrets.
            settings=wandb.Settings(init_timeout=30, console="off", x_disable_meta=True),
            **same_run,
        )
        if has_parts:
            # W&B's own step only rises: it would drop the steps that are trained again.
            self._writer.define_metric("*", step_metric="step")

    def loop_begins(self) -> None:
        """Log nothing yet."""

    @_guarded
    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """Keep this step to be logged later, and log the kept ones if that is due."""
        is_due = time.monotonic() - self._last_s >= PERIOD_S
        if self._pending and (is_due or phase != self._pending[-1][1]):
            self.close()
        self._pending.append((index, phase, loss))

    @_guarded
    def close(self) -> None:
        """Log the steps that are still kept. Waits for the device."""
        for index, phase, loss in self._pending:
            self._writer.log({"loss/train/total": loss(), "phase": phase}, index)
        self._pending.clear()
        self._last_s = time.monotonic()

    @_guarded
    def finish(self, summary: dict[str, Any]) -> None:
        """Log the result and close the W&B run."""
        self._writer.summary.update(summary)
        self._writer.finish()

    @_guarded
    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Log figures beside the key ``step``."""
        self._writer.log({"step": step, **figures})

    @_guarded
    def log_picture(self, name: str, path: Path, *, step: int) -> None:
        """Log a picture beside the key ``step``."""
        import wandb

        self._writer.log({"step": step, name: wandb.Image(str(path))})


Tracker = TensorboardLog | WandbLog
