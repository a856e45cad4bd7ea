"""Runs and their records: `finished_run` trains once in a process of tests, and copies that."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sdbench.record.store import load_record

_RESULTS: dict[tuple[str, ...], Path] = {}


def finished_run(main: Callable[[Sequence[str]], int], *argv: str, results: Path) -> Path:
    """Have the results of a run that has ended well.

    For tests of what is done with a run. Tests of how it is made start one of their own.

    Args:
        main: Of a program, e.g. `benchmark.main`.
        argv: Its arguments without --results_dir.
        results: A folder that does not exist yet, for a copy of the results.

    Returns:
        The folder of the run in the copy.
    """
    key = (main.__module__, *argv)
    if key not in _RESULTS:
        made = Path(tempfile.mkdtemp(prefix="finished-"), "runs")
        assert main([*argv, "--results_dir", str(made)]) == 0
        _RESULTS[key] = made
    shutil.copytree(_RESULTS[key], results)
    (record,) = results.glob("*/record.json")
    return record.parent


def only_record(results: Path) -> dict[str, Any]:
    """The record of the one run in a results folder."""
    (path,) = results.glob("*/record.json")
    return load_record(path)
