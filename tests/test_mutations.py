import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """\
def larger(one, other):
    if one < other:
        return other
    return one


def unseen(one):
    return one + 1
"""
TESTS = """\
from sdbench.room.code import larger, unseen

def test_larger():
    assert larger(3, 2) == 3
    unseen(1)
"""
JUNIT = (
    '<testsuite><testcase classname="tests.test_toy" name="test_larger" time="0.1"/></testsuite>'
)
TEST = "tests/test_toy.py::test_larger"


def test_faults_are_drawn_planted_and_found_or_not(tmp_path: Path, repository: Path) -> None:
    coverage = pytest.importorskip("coverage", reason="make a list of what the tests cover")
    checkout = tmp_path / "toy"
    code = checkout / "sdbench/room/code.py"
    for path, text in ((code, CODE), (checkout / TEST.partition("::")[0], TESTS)):
        path.parent.mkdir(parents=True)
        path.write_text(text)

    def tool(*arguments: object) -> str:
        program = [sys.executable, repository / "tools/mutations.py", *map(str, arguments)]
        return subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout

    drawn = tool("draw", "--package", checkout / "sdbench", "--seed", 1, "--num", 9)
    assert drawn == tool("draw", "--package", checkout / "sdbench", "--seed", 1, "--num", 9)
    rows = list(csv.DictReader(drawn.splitlines()))
    assert {int(row["line"]) for row in rows} == {2, 3, 4, 8}
    if os.geteuid():
        return  # nobody else can give the tests a /dev/shm of their own
    (tmp_path / "list.csv").write_text(
        drawn + "0,room,sdbench/room/code.py,larger,1,gone,new,not\n"
    )
    (tmp_path / "junit.xml").write_text(JUNIT)
    data = coverage.CoverageData(str(tmp_path / "data"))
    data.set_context(f"{TEST}|run")
    data.add_lines({str(code): [2, 4, 8]})
    data.write()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", checkout]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "toy"]):
        subprocess.run([*git, *arguments], check=True)
    files = {"list": "list.csv", "coverage": "data", "durations": "junit.xml", "out": "out.csv"}
    flags = [part for flag, name in files.items() for part in (f"--{flag}", tmp_path / name)]
    tool("run", "--checkout", checkout, *flags, "--jobs", 1)
    with (tmp_path / "out.csv").open() as file:
        results = {(row["line"], row["result"]) for row in csv.DictReader(file)}
    found_or_not = {("3", "not covered"), ("4", "found"), ("8", "survived")}
    assert found_or_not < results and ("1", "does not apply") in results
    assert "Found by neither:" in tool("table", tmp_path / "out.csv", tmp_path / "out.csv")
