"""Runs `mutations.py run`: plants a fault in a copy and runs the tests that cover its lines.

Coverage is collected once, for the suite without faults, with the test as the context of each line.
A file, RC below, configures `coverage` and pytest-cov:

    [run]
    source = /CHECKOUT/sdbench
    parallel = true
    context = ${SDBENCH_TEST-}
    data_file = /FOLDER/.coverage
    disable_warnings = no-data-collected, module-not-measured, module-not-imported

In the checkout, with the absolute path of RC:

    COVERAGE_OF_PROCESSES=RC PYTHONPATH=tools python -m pytest -n auto --dist loadfile \
        -p coverage_by_test --cov --cov-config=RC --cov-context=test --cov-report= \
        --junitxml=JUNIT.xml

Each job has a clone of the checkout and a process that has imported third-party packages; tests run
in forks of it (`mutation_worker.py`), with /dev/shm and temporary files of their own. The shortest
tests by recorded seconds run first, up to the budget. A fault is found if a test fails twice with
it and passes without it; a test that fails without it in this harness is excluded from then on
(RESULT.excluded.txt). A row is unfinished if it took three times the budget because the machine was
busy; the next run repeats it, and the last row of a fault counts.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coverage import CoverageData
from mutations import FUNCTIONS, Mutation, apply

COLUMNS = [
    *("id", "room", "file", "function", "line", "change"),
    *("result", "test", "num_run", "num_left_out", "num_covering", "seconds"),
]
LEAST_LIMIT_S = 90  # of a test; it may have to make what others made for it
# Before torch is imported, as in tests/conftest.py.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}


class Tests:
    """The tests that cover each line, and their durations."""

    def __init__(self, checkout: Path, coverage: Path, durations: Path):
        self._checkout = checkout
        self._data = CoverageData(str(coverage))
        self._data.read()
        if not self._data.measured_contexts():
            sys.exit(f"{coverage} holds no coverage by test.")
        self._contexts: dict[str, dict[int, list[str]]] = {}
        self.seconds = _read_durations(durations, checkout)
        self._of_file: dict[str, list[str]] = defaultdict(list)
        for test in self.seconds:
            self._of_file[_file_of(test)].append(test)

    def covering(self, file: str, lines: range, text: bytes) -> tuple[set[str], bool]:
        """Return the tests that run one of these lines, and True if coverage shows it.

        Coverage attributes code that runs at import to the first test only. For such code, and
        where no test is known, these are the tests that run any line of the file or name its
        module.
        """
        contexts = self._read_contexts(file)
        begins = _begin_of_statement(text, lines)
        tests = self._of_contexts(
            context for line in range(begins, lines.stop) for context in contexts.get(line, ())
        )
        if tests and _is_in_function(text, lines.start):
            return tests, True
        of_any = self._of_contexts(context for some in contexts.values() for context in some)
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package, _, name = module.rpartition(".")
        for path, of_file in self._of_file.items():
            source = (self._checkout / path).read_text()
            if module in source or f"from {package} import {name}" in source:
                of_any.update(of_file)
        return tests | of_any, bool(tests)

    def _read_contexts(self, file: str) -> dict[int, list[str]]:
        if file not in self._contexts:
            names = [name for name in self._data.measured_files() if name.endswith("/" + file)]
            self._contexts[file] = self._data.contexts_by_lineno(names[0]) if names else {}
        return self._contexts[file]

    def _of_contexts(self, contexts) -> set[str]:
        """Return the tests, and all tests of a file if one set up a fixture for the others."""
        phases: dict[str, set[str]] = defaultdict(set)
        for context in set(contexts) - {""}:
            test, _, phase = context.rpartition("|")
            phases[phase].add(test)
        tests = set().union(*phases.values())
        for file in {_file_of(test) for test in phases["setup"]}:
            if sum(_file_of(test) == file for test in phases["setup"]) == 1:
                tests.update(self._of_file[file])
        return tests

    def choose(self, tests: set[str], budget_s: float) -> list[str]:
        """Return the shortest tests within the budget, at least one, grouped by file."""
        chosen: dict[str, list[str]] = defaultdict(list)
        left_s = budget_s
        for test in sorted(tests, key=lambda test: (self.seconds.get(test, 1.0), test)):
            left_s -= self.seconds.get(test, 1.0)
            if left_s < 0 and chosen:
                break
            chosen[_file_of(test)].append(test)
        groups = chosen.values()
        in_turn = sorted(groups, key=lambda some: sum(self.seconds.get(one, 1.0) for one in some))
        return [test for group in in_turn for test in group]


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _read_durations(path: Path, checkout: Path) -> dict[str, float]:
    seconds = {}
    for case in ET.parse(path).iter("testcase"):
        parts = case.get("classname").split(".")
        for num in range(len(parts), 0, -1):
            if (checkout / (file := "/".join(parts[:num]) + ".py")).is_file():
                names = "::".join([file, *parts[num:], case.get("name")])
                seconds[names] = float(case.get("time"))
                break
    return seconds


def _begin_of_statement(text: bytes, lines: range) -> int:
    around = [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= lines.start <= node.end_lineno
    ]
    return max(around, default=lines.start)


def _is_in_function(text: bytes, line: int) -> bool:
    return any(
        isinstance(node, FUNCTIONS) and node.body[0].lineno <= line <= node.end_lineno
        for node in ast.walk(ast.parse(text))
    )


class Worker:
    """A clone and the process that runs tests in it, one fault at a time."""

    def __init__(self, checkout: Path, folder: str):
        self.copy = Path(folder, "copy")
        subprocess.run(["git", "clone", "-q", "--shared", checkout, self.copy], check=True)
        # Records name the commit and changed files: they must not show the fault.
        files = subprocess.check_output(["git", "ls-files", "-z", "*.py"], cwd=self.copy)
        hide = ["git", "update-index", "--assume-unchanged", "-z", "--stdin"]
        subprocess.run(hide, input=files, cwd=self.copy, check=True)
        environment = {**os.environ, **ENVIRONMENT, "TMPDIR": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("mutation_worker.py"), self.copy],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **job: object) -> dict:
        """Return the answer of `mutation_worker.judge`."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the worker ended with {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def run(rows: Sequence[Mutation], args: argparse.Namespace) -> None:
    """Append a line to `args.out` for each mutation that has none there."""
    if os.geteuid():
        sys.exit("Only root can give tests a /dev/shm of their own.")
    status = ["git", "status", "--porcelain", "--untracked-files=no"]
    if subprocess.check_output(status, cwd=args.checkout):
        sys.exit(f"{args.checkout} has changes that are not committed: they are not in a clone.")
    tests = Tests(args.checkout, args.coverage, args.durations)
    excluded_file = args.out.with_suffix(".excluded.txt")
    excluded = set(excluded_file.read_text().split("\n")) if excluded_file.exists() else set()
    done = set()
    if args.out.exists():
        with args.out.open(newline="") as file:
            done = {row["id"] for row in csv.DictReader(file) if row["result"] != "unfinished"}
    else:
        args.out.write_text(",".join(COLUMNS) + "\n")
    writing = threading.Lock()

    def judge(row: Mutation, worker: Worker) -> None:
        start_s = time.monotonic()
        facts = _judge(row, worker, tests, excluded, args.budget_s)
        change = f"{row.original.strip()} -> {row.mutated.strip()}".replace("\n", " ")
        line = {**row._asdict(), "change": change, **facts}
        line["seconds"] = round(time.monotonic() - start_s, 1)
        with writing:
            for test in set(facts.get("excluded", ())) - excluded:
                excluded.add(test)
                with excluded_file.open("a") as file:
                    file.write(test + "\n")
            with args.out.open("a", newline="") as file:
                writer = csv.DictWriter(
                    file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n"
                )
                writer.writerow(line)
        print(row.id, row.file, line["line"], line["result"], line["seconds"], flush=True)

    waiting: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
    for row in rows:
        if row.id not in done:
            waiting.put(row)

    def work(folder: str) -> None:
        worker = Worker(args.checkout, folder)
        try:
            while True:
                judge(waiting.get_nowait(), worker)
        except queue.Empty:
            worker.close()

    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        folders = [tempfile.mkdtemp(dir=folder) for _ in range(args.jobs)]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(work, folders))


def _judge(
    row: Mutation, worker: Worker, tests: Tests, excluded: set[str], budget_s: float
) -> dict[str, object]:
    text = (worker.copy / row.file).read_bytes() if (worker.copy / row.file).exists() else b""
    if (applied := apply(row, text)) is None:
        return {"result": "does not apply"}
    mutated, lines = applied
    covering, is_known = tests.covering(row.file, lines, text)
    covering -= excluded
    chosen = tests.choose(covering, budget_s)
    longest_s = max((tests.seconds.get(test, 1.0) for test in chosen), default=0)
    answer = worker.ask(
        file=row.file,
        text=mutated.decode(),
        tests=chosen,
        limit_s=LEAST_LIMIT_S + 3 * longest_s,
        whole_s=3 * max(budget_s, longest_s),
    )
    if answer["result"] == "survived" and not is_known:
        answer["result"] = "not covered"
    left_out = (
        len(covering) - answer["num_run"] if not answer["test"] else len(covering) - len(chosen)
    )
    return {**answer, "line": lines.start, "num_covering": len(covering), "num_left_out": left_out}
