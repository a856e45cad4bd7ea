"""`SweepRun`: a run of a sweep, with its state on disk, which survives any interruption.

When a run has ended, its outcome is written to cell.json in one piece. A run without this file is
made again; all others stay as they are.
"""

from __future__ import annotations

import dataclasses
import shutil
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.files import write_json
from sdbench.base.outside import read_json_object
from sdbench.launch.child import Outcome
from sdbench.launch.runs import Run, in_rounds
from sdbench.launch.sweep_file import Cell, SweepFile
from sdbench.record.provenance import git_state, package_versions
from sdbench.record.store import OK, RECORD_NAME, load_record

STATE_NAME = "cell.json"
ENVIRONMENT_NAME = "environment.json"
# The facts that are read again, with their types.
FACTS_OF_OUTCOME = {
    "status": str,
    "reason": str | None,
    "duration_s": int | float,
    "run": str | None,
}


@dataclasses.dataclass(frozen=True)
class SweepRun(Run):
    """The n-th measurement of a cell of a sweep."""

    cell: Cell
    repeat: int

    def outcome(self) -> dict[str, Any] | None:
        """The content of cell.json; None if the run has not ended, or if its record is gone."""
        path = self.folder / STATE_NAME
        if not path.is_file():
            return None
        outcome = _read_state(path, facts=FACTS_OF_OUTCOME, without="the run is made again")
        has_record = outcome["run"] is not None
        is_whole = not has_record or (self.folder / outcome["run"] / RECORD_NAME).is_file()
        return outcome if is_whole else None

    def record(self) -> dict[str, Any] | None:
        """The record; None without one, or if it could not be read when the run ended."""
        outcome = self.outcome()
        if outcome is None or outcome["run"] is None:
            return None
        try:
            return load_record(self.folder / outcome["run"])
        except ValueError as error:
            if outcome["status"] != OK:
                return None  # cell.json gives the reason
            raise ConfigError(
                f"the record of a run that ended well cannot be read ({error})",
                value=str(self.folder / outcome["run"]),
                allowed="the record as it was written; without cell.json the run is made again",
                flag="--folder",
            ) from None

    def end(self, outcome: Outcome) -> None:
        """Write the outcome."""
        content = {
            "settings": dict(self.cell.settings),
            "command": list(self.command),
            "status": outcome.status,
            "reason": outcome.reason,
            "exit_code": outcome.exit_code,
            "duration_s": outcome.duration_s,
            "run": outcome.run,
        }
        write_json(self.folder / STATE_NAME, content)

    def clear(self) -> None:
        """Remove the files of an unfinished or failed attempt."""
        (self.folder / STATE_NAME).unlink(missing_ok=True)  # first: a half-cleared run is no run
        if self.folder.is_dir():
            shutil.rmtree(self.folder)


def list_runs(sweep: SweepFile, *, folder: Path) -> list[SweepRun]:
    """All runs in the order in which they are made."""
    return [
        SweepRun(cell.described, cell.command, folder / f"{cell.key}-{repeat}", cell, repeat)
        for repeat, cell in in_rounds(sweep.cells, times=sweep.repeats)
    ]


def check_environment(folder: Path, *, allow_other: bool) -> None:
    """Refuse to go on with a sweep that was begun under other code, libraries or hardware."""
    import psutil

    here = {
        "commit": git_state()["commit"],
        **package_versions(),
        "num_cpu_cores": psutil.cpu_count(),
        # Rounded: a kernel takes a little more or less of it from one boot to the next.
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
    }
    path = folder / ENVIRONMENT_NAME
    if not path.is_file():
        write_json(path, here)
        return
    began = _read_state(path, facts={}, without="the sweep goes on unchecked")
    changes = [
        f"{name} {began.get(name)} -> {here.get(name)}"
        for name in sorted({*began, *here})
        if began.get(name) != here.get(name)
    ]
    if changes and not allow_other:
        raise ConfigError(
            "the sweep was begun under other code, libraries or hardware: rows would not compare",
            value="; ".join(changes),
            allowed="the same ones, another folder, or --allow_mixed",
            flag="--folder or --allow_mixed",
        )


def _read_state(
    path: Path, *, facts: Mapping[str, type | types.UnionType], without: str
) -> dict[str, Any]:
    """Read a file that the sweep has written.

    Args:
        path: The file.
        facts: What it has to hold, by name.
        without: What happens if the file is removed, for the error.
    """
    try:
        content = read_json_object(path)
        for name, kind in facts.items():
            if not isinstance(content.get(name, ...), kind):
                raise ValueError(f"{name} is {content.get(name, 'missing')!r}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"a file of the sweep cannot be read ({error})",
            value=str(path),
            allowed=f"the file as it was written; without it {without}",
            flag="--folder",
        ) from None
    return content
