"""Names and reads the files that a training run keeps beside its record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.files import refused_unless_read
from sdbench.base.outside import MAX_TABLE_BYTES, parse_json, read_text
from sdbench.record.store import SCHEMA_FILE, check_schema

SCHEMA = SCHEMA_FILE.with_name("history.schema.json")
HISTORY_NAME = "history.jsonl"
# A line for each batch whose loss was not finite.
BAD_BATCHES_NAME = "bad_batches.jsonl"
# Columns of the steps.csv of a training run, which all its processes extend.
TRAIN_STEP_COLUMNS = ("step", "loss", "learning_rate", "images_per_second", "data_wait_percent")


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The events of a run in order, without lines that a kill or a disk has damaged.

    ConfigError: the file cannot be read, or an event does not match its schema.
    """
    path = folder / HISTORY_NAME
    if not path.exists():
        return []
    events = []
    what, allowed = "the events of the run", "the file as the run wrote it"
    with refused_unless_read(path, what, allowed=allowed, flag="the folder of the run"):
        text = read_text(path, max_bytes=MAX_TABLE_BYTES, errors="replace")
        for line in text.splitlines():
            try:
                event = parse_json(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                check_schema(event, SCHEMA)
                events.append(event)
    return events


def cost_of_stops(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the stops of a run have cost, over all its processes.

    ``num_lost_steps`` counts steps after a checkpoint that were trained again; ``lost_s`` is the
    training time of those in steps.csv; ``down_s`` is the time from the last line that a process
    wrote to the first step of the next process.
    """
    restarts = [event for event in events if event["event"] == "begin"][1:]
    facts = ("num_lost_steps", "lost_s", "down_s")
    sums = {fact: sum(restart[fact] for restart in restarts) for fact in facts}
    return {"num_restarts": len(restarts), **sums}
