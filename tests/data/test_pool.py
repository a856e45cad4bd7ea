"""Is all work done once, by whom it should be, and does nothing outlive it?"""

from __future__ import annotations

import multiprocessing
import os

import pytest

from sdbench.base.errors import RunError
from sdbench.data.prepare import pool
from sdbench.data.prepare.pool import WorkReport, run_work


def tell(number: int) -> WorkReport:
    return WorkReport(number, [str(os.getpid())])


def fail(number: int) -> WorkReport:
    raise RunError(f"number {number} is bad")


def die(number: int) -> WorkReport:
    os._exit(9)


def run(work, *, num_workers: int | None, num_pieces: int = 6) -> tuple[list[int], set[str]]:
    """The numbers that were worked on, and the processes that did it."""
    with run_work(work, range(num_pieces), num_workers=num_workers) as reports:
        done = list(reports)
    return [report.num_read for report in done], {name for report in done for name in report.bad}


HERE = str(os.getpid())


def test_in_this_process():
    assert run(tell, num_workers=0) == ([0, 1, 2, 3, 4, 5], {HERE})
    assert run(tell, num_workers=None) == ([0, 1, 2, 3, 4, 5], {HERE})
    assert run(tell, num_workers=None, num_pieces=0) == ([], set())


def test_in_others():
    numbers, processes = run(tell, num_workers=2)
    assert sorted(numbers) == [0, 1, 2, 3, 4, 5]
    assert HERE not in processes and processes


def test_in_others_where_it_takes_long(monkeypatch):
    monkeypatch.setattr(pool, "WORTH_PROCESSES_S", -1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    numbers, processes = run(tell, num_workers=None)
    assert numbers[:2] == [0, 1] and sorted(numbers[2:]) == [2, 3, 4, 5]
    assert HERE in processes and len(processes) > 1


def test_an_error_ends_all_processes():
    with pytest.raises(RunError, match=r"number \d is bad"):
        run(fail, num_workers=2)
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_is_an_error():
    with pytest.raises(RunError, match="A worker process died"):
        run(die, num_workers=2)
    assert multiprocessing.active_children() == []
