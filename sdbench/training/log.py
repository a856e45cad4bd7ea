"""`TrainLog` writes steps.csv and history.jsonl of a training run, and logs to trackers."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.files import GrowingFile, replace_file
from sdbench.record.formulas import time_of_training
from sdbench.record.history import (
    BAD_BATCHES_NAME,
    HISTORY_NAME,
    TRAIN_STEP_COLUMNS,
    cost_of_stops,
    read_history,
)
from sdbench.record.store import STEPS_NAME, utc_now
from sdbench.run.trackers import Tracker

# The last step that has ended, saved or not.
MARK_NAME = "last_step"
# Names in trackers, by column of steps.csv after the step and by fact of an event.
TRACKED_COLUMNS = ("loss/train/total", *TRAIN_STEP_COLUMNS[2:])
TRACKED_FACTS = {
    "validation": {"loss": "loss/validation", "ema_loss": "loss/validation_ema"},
    "scores": {"fid": "scores/fid", "clip_score": "scores/clip_score"},
}


class TrainLog:
    """The files of one run folder, and the trackers; on the first rank.

    On a full disk the run goes on: lines are kept until they can be written.
    """

    def __init__(self, folder: Path, *, trackers: Sequence[Tracker] = ()) -> None:
        """Name the files; nothing is written yet."""
        self._folder = folder
        self._steps = GrowingFile(folder / STEPS_NAME)
        self._history = GrowingFile(folder / HISTORY_NAME)
        self._bad_batches = GrowingFile(folder / BAD_BATCHES_NAME)
        self._trackers = trackers
        self._mark: int | None = None

    def has_steps(self) -> bool:
        """Whether a step of the run has ended."""
        mark = self._folder / MARK_NAME
        marked = mark.read_bytes() if mark.exists() else b""
        return bool(marked.strip(b"0\n") or self._read_steps())

    def forget(self) -> bool:
        """Remove the events of a run without a step; False if there are none."""
        has_events = self._history.path.exists()
        for file in (self._history, self._bad_batches):
            file.path.unlink(missing_ok=True)
        return has_events

    def begin(
        self,
        *,
        num_steps: int,
        images_per_step: int,
        passed_over: Sequence[str],
        validated_by: str,
    ) -> None:
        """Remove the steps after `num_steps`, which are trained again, and add the event.

        0 begins a new file. `images_per_step` is the global batch; `validated_by` is the digest of
        what decides validation losses.
        """
        down_s = self._measure_silence()
        self._mark = os.open(self._folder / MARK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        mark = os.pread(self._mark, 13, 0)
        last_step = int(mark) if mark.strip().isdigit() else 0
        known = self._read_steps()
        kept = [row for row in known if int(row[0]) <= num_steps]
        lost = [row for row in known if int(row[0]) > num_steps]
        replace_file(self._steps.path, _as_csv([TRAIN_STEP_COLUMNS, *kept]))
        self.add_event(
            "begin",
            step=num_steps,
            num_lost_steps=max(len(lost), last_step - num_steps),
            lost_s=_add_up_time(lost, images_per_step),
            down_s=down_s,
            passed_over=passed_over,
            validated_by=validated_by,
        )

    def totals(self, *, images_per_step: int) -> dict[str, Any]:
        """Figures of the whole run: `cost_of_stops`, and the seconds trained."""
        costs = cost_of_stops(read_history(self._folder))
        kept_s = _add_up_time(self._read_steps(), images_per_step)
        return {"total_train_s": kept_s + costs["lost_s"], **costs}

    def add_steps(self, rows: Sequence[Sequence[Any]]) -> None:
        """Append steps, each with the values of `TRAIN_STEP_COLUMNS`."""
        self._steps.append(_as_csv(rows))
        for step, *values in rows:
            figures = dict(zip(TRACKED_COLUMNS, values, strict=True))
            for tracker in self._trackers:
                tracker.log(figures, step=step)

    def add_event(self, event: str, *, step: int, **facts: Any) -> None:
        """Append an event with its facts; numbers that are not finite become null."""
        known = _only_finite(facts)
        if known != facts:
            print(
                f"warning: numbers of the event {event} at step {step} are not finite",
                file=sys.stderr,
            )
        line = {"time_utc": utc_now(), "event": event, "step": step, **known}
        self._history.append(json.dumps(line, allow_nan=False) + "\n")
        for tracker in self._trackers:
            if event in TRACKED_FACTS:
                names = TRACKED_FACTS[event].items()
                figures = {name: known[fact] for fact, name in names if known.get(fact) is not None}
                tracker.log(figures, step=step)
            elif event == "samples" and facts["file"] is not None:
                tracker.log_picture("samples", self._folder / facts["file"], step=step)

    def add_bad_batch(self, **facts: Any) -> None:
        """Append a line about a batch, with these facts as JSON values."""
        line = json.dumps({"time_utc": utc_now(), **facts}, allow_nan=False)
        self._bad_batches.append(line + "\n")

    def mark_step(self, step: int) -> None:
        """Note that a step has ended, for the process that resumes the run after a kill."""
        assert self._mark is not None
        with contextlib.suppress(OSError):  # on a full disk the count of lost steps is too low
            os.pwrite(self._mark, b"%012d\n" % step, 0)

    def close(self) -> None:
        """Try once more to write pending lines, and warn of lines that are lost."""
        for file in (self._steps, self._history, self._bad_batches):
            file.close()
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None

    def _read_steps(self) -> list[list[str]]:
        """The whole rows of steps.csv."""
        if not self._steps.path.exists():
            return []
        text = self._steps.path.read_text(encoding="utf-8", errors="replace")
        rows = []
        for row in csv.reader(text.replace("\0", "?").splitlines()[1:]):
            with contextlib.suppress(ValueError):
                _, *figures = int(row[0]), *map(float, row[1:])
                if len(figures) == len(TRAIN_STEP_COLUMNS) - 1:
                    rows.append(row)
        return rows

    def _measure_silence(self) -> float:
        """Seconds since an earlier process last wrote; 0 if it had trained to its end."""
        events = read_history(self._folder)
        if not events or events[-1]["event"] == "end":
            return 0.0
        paths = [file.path for file in (self._steps, self._history) if file.path.exists()]
        written_s = max(path.stat().st_mtime for path in paths)
        return max(0.0, time.time() - written_s)


def _add_up_time(rows: Sequence[Sequence[str]], images_per_step: int) -> float:
    """Seconds of training that steps have taken."""
    place = TRAIN_STEP_COLUMNS.index("images_per_second")
    rates = (float(row[place]) for row in rows)
    return time_of_training(rates, images_per_step=images_per_step)


def _as_csv(rows: Sequence[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _only_finite(value: Any) -> Any:
    """Replace each number that is not finite by None, since JSON has no such numbers."""
    if isinstance(value, dict):
        return {name: _only_finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_only_finite, value))
    is_bad = isinstance(value, float) and not math.isfinite(value)
    return None if is_bad else value
