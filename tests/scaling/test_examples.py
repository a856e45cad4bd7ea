"""The examples in the help run on the tables that are shipped."""

from __future__ import annotations

import shlex

import pytest

from sdbench.cli import main
from sdbench.scaling import scaling

EXAMPLES = [
    line.strip()
    for text in (scaling.EPILOG, *(epilog for *_, epilog in scaling.COMMANDS.values()))
    for line in text.replace("\\\n", "").splitlines()
    if line.startswith("  python") and "--help" not in line
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(capsys, tmp_path, monkeypatch, repository, example):
    (tmp_path / "results").symlink_to(repository / "results")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(example)[3:]) == 0
    assert "GPU" in capsys.readouterr().out
