"""The examples in the help run on the tables that are shipped."""

from __future__ import annotations

import re
import shlex

import pytest

from sdbench.analysis import compare
from sdbench.cli import main
from sdbench.forecast import cost

EPILOGS = [compare.EPILOG, cost.EPILOG]
# Not those that need runs of one's own.
EXAMPLES = [
    line.strip()
    for line in "\n".join(EPILOGS).replace("\\\n", "").splitlines()
    if line.startswith("  python") and not re.search("--help|repeat| runs", line)
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(capsys, tmp_path, monkeypatch, repository, example):
    (tmp_path / "results").symlink_to(repository / "results")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(example)[3:]) == 0
    assert "gpu" in capsys.readouterr().out.lower()
