from __future__ import annotations

from pathlib import Path

import pytest

from sdbench.cli import main
from sdbench.report.figures import read_figures


@pytest.fixture
def quoted(repository) -> Path:
    return repository / "results" / "quoted"


@pytest.fixture
def rows_of(tmp_path):
    """A function that runs a command of `scaling` and returns the rows that it writes."""

    def run(*arguments: object) -> list[dict]:
        out = tmp_path / "out.csv"
        assert main(["scaling", *map(str, arguments), "--out", str(out)]) == 0
        return read_figures(out)

    return run
