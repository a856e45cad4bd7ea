"""What a training run keeps beside its record: a row for each step, and its events."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def cost_of_stops(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the stops of a run have cost, over all its processes.

    Args:
        events: Of the run.

    Returns:
        ``num_restarts``; ``num_lost_steps``, those of steps.csv behind a checkpoint, which were
        trained again, and ``lost_s``, the training time that they had taken; ``down_s``, the time
        from the last line that a process wrote to the first step of the next.
    """
    restarts = [event for event in events if event["event"] == "begin"][1:]
    facts = ("num_lost_steps", "lost_s", "down_s")
    sums = {fact: sum(restart[fact] for restart in restarts) for fact in facts}
    return {"num_restarts": len(restarts), **sums}
