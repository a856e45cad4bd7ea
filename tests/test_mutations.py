import csv
import subprocess
import sys
from pathlib import Path

CODE = """\
def larger(one, other):
    if one < other:
        return other
    return one


def unseen(one):
    return one + 1
"""


def test_faults_are_drawn_by_their_seed(tmp_path: Path, repository: Path) -> None:
    checkout = tmp_path / "toy"
    code = checkout / "sdbench/room/code.py"
    code.parent.mkdir(parents=True)
    code.write_text(CODE)

    def tool(*arguments: object) -> str:
        program = [sys.executable, repository / "tools/mutations.py", *map(str, arguments)]
        return subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout

    drawn = tool("draw", "--package", checkout / "sdbench", "--seed", 1, "--num", 9)
    assert drawn == tool("draw", "--package", checkout / "sdbench", "--seed", 1, "--num", 9)
    rows = list(csv.DictReader(drawn.splitlines()))
    assert {int(row["line"]) for row in rows} == {2, 3, 4, 8}
