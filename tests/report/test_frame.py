"""The frame of all figures, and the lines of docs/results.md for a notebook."""

from __future__ import annotations

import json
import re
import shutil

import pandas as pd
import pytest

from sdbench.base.errors import ConfigError
from sdbench.record.columns import COLUMNS
from sdbench.report.figures import read_figures
from sdbench.results import load
from tests.documents import ROOT
from tests.report.results_folder import RESULTS


@pytest.fixture(scope="module")
def figures() -> pd.DataFrame:
    return load()


def test_the_frame_has_each_figure_of_the_tables_once_with_its_value(figures):
    assert list(figures.columns) == list(COLUMNS)
    runs = figures[figures.kind == "measured"]
    # Records beside runs/ are of runs whose times say nothing, or of what was removed.
    assert sorted(runs.source) == sorted(path.name for path in RESULTS.glob("runs/2*"))
    for name in ("throughput.csv", "data.csv"):
        for row in read_figures(RESULTS / name):
            if row["kind"] != "measured":
                continue
            (found,) = runs[runs.source == row["source"]].to_dict("records")
            known = {column: found[column] for column, value in row.items() if value is not None}
            assert known == {column: value for column, value in row.items() if value is not None}
            assert all(pd.isna(found[column]) for column, value in row.items() if value is None)
    quoted = figures[figures.kind == "quoted"]
    assert len(quoted) == sum(len(read_figures(path)) for path in RESULTS.glob("quoted/*.csv"))
    predicted = read_figures(RESULTS / "predictions.csv")
    assert (figures.kind == "predicted").sum() == len(predicted) > 0
    assert predicted[0].keys() <= COLUMNS.keys()


def test_names_stay_text_and_unknown_numbers_are_no_zeros(figures):
    types = figures.dtypes.astype(str)
    assert (types.gpu, types.ema, types.num_gpus) == ("string", "boolean", "Int64")
    quoted = figures[figures.kind == "quoted"]
    assert quoted.num_workers.isna().any()
    assert not (quoted.num_workers == 0).any()


def test_a_run_counts_once_and_what_cannot_be_read_is_named(tmp_path, capsys):
    run = min(RESULTS.glob("runs/*_tiny-*"), default=min(RESULTS.glob("runs/*")))
    for name in ("one", "copy"):
        shutil.copytree(run, tmp_path / name / run.name)
    bad = tmp_path / "bad"
    shutil.copytree(run, bad)
    record = json.loads((bad / "record.json").read_text())
    (bad / "record.json").write_text(json.dumps(record | {"schema_version": 1}))
    assert load(tmp_path).source.tolist() == [run.name]
    assert str(bad) in capsys.readouterr().err
    with pytest.raises(ConfigError):
        load(tmp_path / "nothing")


def test_the_lines_for_a_notebook_run(monkeypatch):
    text = (ROOT / "docs" / "results.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(lines.split("\n\n")[-1].splitlines()) == 4
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(lines, names)
    best = names["best"]
    a100, h100 = (
        best.loc[("quoted", name), "online"]
        for name in ("A100-SXM4-80GB (p4de.24xlarge)", "H100-SXM5-80GB (p5.48xlarge)")
    )
    assert (a100, h100) == (204.22 / 8, 385.31 / 8)
