"""The table of tasks, and what CONTRIBUTING.md says of tasks and rooms."""

from __future__ import annotations

import pkgutil
import re

from sdbench.run.task import Task
from sdbench.tasks import TASKS


def test_each_row_is_a_task_of_its_kind_and_a_row_of_the_guide(repository):
    guide = (repository / "CONTRIBUTING.md").read_text().partition("<!-- tasks -->")[2]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", guide.partition("## Rules")[0], re.MULTILINE)
    assert [kind for kind, _ in rows] == list(TASKS)
    for kind, program in rows:
        task = pkgutil.resolve_name(TASKS[kind])
        assert issubclass(task, Task) and not task.__abstractmethods__
        assert (task.kind, task.program) == (kind, program)


def test_the_rooms_of_the_guide_are_the_layers_that_are_checked(repository):
    guide = (repository / "CONTRIBUTING.md").read_text().partition("<!-- rooms -->")[2]
    drawn = [line.split("--")[0].split() for line in re.findall(r"^    (.+ -- .+)$", guide, re.M)]
    project = (repository / "pyproject.toml").read_text()
    layers = project.partition("\nlayers = [")[2].partition("\n]")[0]
    checked = [re.findall(r"sdbench\.(\w+)", line) for line in layers.splitlines()]
    assert drawn == [rooms for rooms in checked if rooms and rooms != ["__main__"]]


def test_the_files_that_the_guide_names_are_there(repository):
    guide = (repository / "CONTRIBUTING.md").read_text()
    run = guide.partition("## A run, from")[2].partition("## Rules")[0]
    names = set(re.findall(r"`([a-z_]+/[a-z_/.]*)`", run)) - {"sdbench/"}
    assert len(names) > 10
    assert [name for name in sorted(names) if not (repository / "sdbench" / name).exists()] == []
