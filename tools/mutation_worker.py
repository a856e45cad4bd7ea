"""Runs tests in forks of a process that has imported their third-party packages.

Imports of torch, Composer and others take longer than most tests. Each line of JSON on standard
input is a job, answered by a line on standard output.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

# Ray starts threads when it is imported.
NOT_IMPORTED = {"sdbench", "tests", "ray"}
# A fork loses threads. The library (pyarrow) starts this one again.
KNOWN_THREADS = {"jemalloc_bg_thd"}
# linux/sched.h, linux/mount.h, linux/prctl.h
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_CHILD_SUBREAPER = 36
PARENT = os.getppid()  # another one if it has died


def import_what_is_imported(folder: Path) -> None:
    """Run every import of third-party code in the tests and the package."""
    statements = set()
    for path in [*folder.glob("sdbench/**/*.py"), *folder.glob("tests/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                statements |= {f"import {name.name}" for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                statements |= {f"from {node.module} import {name.name}" for name in node.names}
    for statement in sorted(statements):
        if statement.split()[1].partition(".")[0] not in NOT_IMPORTED:
            with contextlib.suppress(Exception):
                exec(statement, {})
    tasks = Path("/proc/self/task").iterdir()
    threads = [task.joinpath("comm").read_text().strip() for task in tasks][1:]
    assert set(threads) <= KNOWN_THREADS, threads


class Watch:
    """Runs the named tests in order and notes starts and failures as they happen."""

    def __init__(self, tests: list[str], notes: Path):
        self._places = {test: place for place, test in enumerate(tests)}
        self._notes = notes

    def _note(self, what: str, test: str) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps([what, test, time.monotonic()]) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """After the sorting of tests/conftest.py."""
        chosen = [item for item in items if item.nodeid in self._places]
        items[:] = sorted(chosen, key=lambda item: self._places[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported fails."""
        if report.failed:
            self._note("failed", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Known even if the process dies."""
        self._note("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Also where it is the set-up that fails."""
        if report.failed:
            is_late = "Timeout (" in str(report.longrepr)
            self._note("late" if is_late else "failed", report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """The process did not die."""
        self._note("ended", "")


def _run_pytest(copy: Path, tests: list[str], scratch: Path, limit_s: float) -> None:
    """In a fork: never returns."""
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    assert (
        libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, None) == 0
    ), os.strerror(ctypes.get_errno())
    log = os.open(copy.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    os.chdir(copy)
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    sys.argv, sys.path[0] = ["pytest"], str(copy)
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", f"timeout={limit_s:.0f}"]
    pytest.main([*options, *files], plugins=[Watch(tests, scratch / "notes")])
    sys.stdout.flush()
    os._exit(0)


def run_tests(copy: Path, tests: list[str], limit_s: float, end_s: float) -> tuple[int, str, str]:
    """Return the number of tests that began, and the result of the first that failed or the last.

    A test that hangs is ended after `limit_s` ("late"), all tests at `end_s` ("cut").
    """
    scratch = Path(tempfile.mkdtemp(dir=copy.parent))
    notes = scratch / "notes"
    notes.touch()
    child = os.fork()
    if child == 0:
        try:
            _run_pytest(copy, tests, scratch, limit_s)
        finally:
            os._exit(1)
    try:
        while is_running := os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end_s or os.getppid() != PARENT:
                break
            time.sleep(0.05)
    finally:
        _end_children()
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    shutil.rmtree(scratch, ignore_errors=True)
    num_run = sum(what == "started" for what, *_ in lines)
    for what, test, _ in lines:
        if what in ("failed", "late"):
            return num_run, what, test
    what, test, start_s = lines[-1] if lines else ("failed", tests[0], 0.0)
    if is_running and what == "started":
        is_hanging = time.monotonic() - start_s > limit_s
        return num_run, "late" if is_hanging else "cut", test
    return num_run, "failed" if what == "started" else "passed", test  # the process died in it


def _end_children() -> None:
    """End processes that the tests left running; they became children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while running := children.read_text().split():
        for pid in map(int, running):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def judge(
    copy: Path, *, file: str, text: str, tests: list[str], limit_s: float, whole_s: float
) -> dict[str, object]:
    """Run the tests on the mutated file until one fails twice with it and passes without it."""
    end_s = time.monotonic() + whole_s
    path = copy / file
    clean = path.read_text()
    num_run, excluded = 0, []

    def write(source: str) -> None:
        path.write_text(source)
        # A cached file of the same size and second would count as its compilation.
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)

    def run(source: str, some: list[str], end_s: float) -> tuple[int, str, str]:
        write(source)
        return run_tests(copy, some, limit_s, end_s)

    rest, result, test = tests, "survived", ""
    try:
        while rest and result == "survived":
            num, what, test = run(text, rest, end_s)
            num_run += num
            if what in ("passed", "cut"):
                result = "survived" if what == "passed" else "unfinished"
                break
            # The first test of a file that cannot be imported represents it.
            places = [place for place, one in enumerate(rest) if one.startswith(test)]
            place = rest.index(test) if test in rest else min(places, default=0)
            alone, rest = rest[place : place + 1], rest[place + 1 :]
            without = run(clean, alone, time.monotonic() + whole_s)[1]
            if without in ("failed", "late"):
                excluded += alone
            elif without == "cut":
                result = "unfinished"
            elif run(text, alone, time.monotonic() + whole_s)[1] != "passed":
                result = "timeout" if what == "late" else "found"
    finally:
        write(clean)
    test = test if result in ("found", "timeout") else ""
    return {"result": result, "test": test, "num_run": num_run, "excluded": excluded}


def main() -> None:
    """Answer until the input ends."""
    copy = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed at an import is no answer
    import_what_is_imported(copy)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(judge(copy, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
