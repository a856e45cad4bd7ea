"""Writes what a training run says as it goes: steps.csv, history.jsonl, and to trackers."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.files import replace_file
from sdbench.record.history import HISTORY_NAME, TRAIN_STEP_COLUMNS
from sdbench.record.store import STEPS_NAME, utc_now
from sdbench.run.tracker import Tracker

# Names in trackers, by column of steps.csv and by fact of an event.
TRACKED_COLUMNS = {
    "loss": "loss/train/total",
    "learning_rate": "learning_rate",
    "images_per_second": "images_per_second",
    "data_wait_percent": "data_wait_percent",
}
TRACKED_FACTS = {
    "validation": {"loss": "loss/validation", "ema_loss": "loss/validation_ema"},
    "scores": {"fid": "scores/fid", "clip_score": "scores/clip_score"},
}


class TrainLog:
    """The files of one run folder, and the trackers; on the first rank."""

    def __init__(self, folder: Path, *, trackers: Sequence[Tracker] = ()) -> None:
        """Name the files; nothing is written yet.

        Args:
            folder: Of the run.
            trackers: Get the figures and the pictures as well.
        """
        self._folder = folder
        self._steps = folder / STEPS_NAME
        self._history = folder / HISTORY_NAME
        self._trackers = trackers

    def begin(self, *, num_steps: int) -> None:
        """Forget the steps behind a checkpoint, which are trained again, and add the event.

        Args:
            num_steps: Steps of the checkpoint; 0 begins a new file.
        """
        known: list[Sequence[Any]] = []
        if self._steps.exists():
            with self._steps.open(newline="", encoding="utf-8") as file:
                known = list(csv.reader(file))[1:]
        kept = [row for row in known if int(row[0]) <= num_steps]
        replace_file(self._steps, _as_csv([TRAIN_STEP_COLUMNS, *kept]))
        self.add_event("begin", step=num_steps, num_lost_steps=len(known) - len(kept))

    def add_steps(self, rows: Sequence[Sequence[Any]]) -> None:
        """Append steps, each with the values of `TRAIN_STEP_COLUMNS`."""
        _append(self._steps, _as_csv(rows))
        for row in rows:
            values = dict(zip(TRAIN_STEP_COLUMNS, row, strict=True))
            figures = {name: values[column] for column, name in TRACKED_COLUMNS.items()}
            for tracker in self._trackers:
                tracker.log(figures, step=values["step"])

    def add_event(self, event: str, *, step: int, **facts: Any) -> None:
        """Append an event: begin, end, save, validation, samples, scores.

        Args:
            event: Its name.
            step: Steps that the run had when it happened.
            **facts: JSON values.
        """
        known = {"time_utc": utc_now(), "event": event, "step": step, **facts}
        _append(self._history, json.dumps(known, allow_nan=False) + "\n")
        for tracker in self._trackers:
            if event in TRACKED_FACTS:
                names = TRACKED_FACTS[event].items()
                figures = {name: facts[fact] for fact, name in names if fact in facts}
                tracker.log(figures, step=step)
            elif event == "samples":
                tracker.log_picture("samples", self._folder / facts["file"], step=step)


def _as_csv(rows: Sequence[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _append(path: Path, text: str) -> None:
    """Append in one write, so that a kill leaves whole lines, and to the disk."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
