"""The examples in the help run on the tables that are shipped."""

from __future__ import annotations

import shlex

import pytest

from sdbench.cli import main
from sdbench.scaling import scaling

EXAMPLES = [
    line.strip()
    for text in (scaling.EPILOG, *(command.epilog for command in scaling.COMMANDS.values()))
    for line in text.replace("\\\n", "").splitlines()
    if line.startswith("  python") and "--help" not in line
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(capsys, tmp_path, monkeypatch, repository, example):
    (tmp_path / "results").symlink_to(repository / "results")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(example)[3:]) == 0
    assert "GPU" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *scaling.COMMANDS])
def test_help_is_answered_and_names_no_path_of_this_machine(capsys, repository, command):
    with pytest.raises(SystemExit) as stopped:
        main(["scaling", *command.split(), "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert str(repository) not in "".join(text.split())
