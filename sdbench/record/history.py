"""What a training run keeps beside its record: a row for each step, and its events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HISTORY_NAME = "history.jsonl"
# A line for each batch whose loss was not finite.
BAD_BATCHES_NAME = "bad_batches.jsonl"
# Of the steps.csv of a training run, which goes on over all its processes.
TRAIN_STEP_COLUMNS = ("step", "loss", "learning_rate", "images_per_second", "data_wait_percent")


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The events of a run in order; a last line that a kill has cut off is left out."""
    path = folder / HISTORY_NAME
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
