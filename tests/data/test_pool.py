"""Is all work done once, by whom it should be, and does nothing outlive it?"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from pathlib import Path

import psutil
import pytest

from sdbench.base.errors import RunError
from sdbench.data.convert.pool import WorkReport, run_work


def tell(number: int) -> WorkReport:
    return WorkReport(number, [str(os.getpid())])


def fail(number: int) -> WorkReport:
    raise RunError(f"number {number} is bad")


def die(number: int) -> WorkReport:
    os._exit(9)


def wait(folder: Path, number: int) -> WorkReport:
    (folder / str(number)).touch()
    time.sleep(100)


def run(work, *, num_workers: int | None, num_pieces: int = 6) -> tuple[list[int], set[str]]:
    """The numbers that were worked on, and the processes that did it."""
    numbers = range(num_pieces)
    with run_work(work, numbers, num_workers=num_workers, num_samples=sum(numbers)) as reports:
        done = list(reports)
    return [report.num_read for report in done], {name for report in done for name in report.bad}


HERE = str(os.getpid())


@pytest.mark.slow
def test_in_this_process_or_in_others(monkeypatch):
    for num_workers in (0, None):
        assert run(tell, num_workers=num_workers) == ([0, 1, 2, 3, 4, 5], {HERE})
    assert run(tell, num_workers=None, num_pieces=0) == ([], set())
    numbers, processes = run(tell, num_workers=2)
    assert sorted(numbers) == [0, 1, 2, 3, 4, 5]
    assert HERE not in processes and processes
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    numbers, processes = run(tell, num_workers=None, num_pieces=70)
    assert sorted(numbers) == [*range(70)]  # 2,415 samples, which are worth processes
    assert HERE not in processes


@pytest.mark.parametrize(
    ("work", "told"), [(fail, r"number \d is bad"), (die, "A worker process died")]
)
def test_an_error_or_a_death_ends_all_processes(work, told):
    with pytest.raises(RunError, match=told):
        run(work, num_workers=2)
    assert multiprocessing.active_children() == []


def test_processes_end_with_a_killed_parent(tmp_path):
    work = functools.partial(wait, tmp_path)
    fork = multiprocessing.get_context("fork")
    parent = fork.Process(target=run, args=(work,), kwargs={"num_workers": 2})
    parent.start()
    while len(list(tmp_path.iterdir())) < 2:
        assert parent.is_alive()
        time.sleep(0.05)
    children = psutil.Process(parent.pid).children()
    parent.kill()
    parent.join()
    assert len(children) >= 2
    assert psutil.wait_procs(children, timeout=10)[1] == []
