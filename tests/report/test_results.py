"""The committed tables, plots and pages are what the committed records and quoted figures give."""

from __future__ import annotations

import json
import shutil

import pytest

from sdbench.analysis.report import rebuild
from sdbench.cli import main
from tests.refusals import refusal_of
from tests.report.results_folder import RESULTS, make_readme, make_record

COMMITTED = ("README.md", "ladder.md", "throughput.csv", "data.csv", "index.html")
COMMITTED += ("plots/*.svg", "pages/*.md")


def read_all(results):
    paths = [path for pattern in COMMITTED for path in sorted(results.glob(pattern))]
    return {str(path.relative_to(results)): path.read_text(encoding="utf-8") for path in paths}


def test_what_is_committed_is_what_the_committed_records_give(tmp_path):
    made = tmp_path / "results"
    shutil.copytree(RESULTS, made)
    committed = read_all(RESULTS)
    assert {"README.md", "throughput.csv", "data.csv", "index.html"} <= committed.keys()
    for name in committed:
        if name.endswith((".csv", ".html", ".svg")):
            (made / name).unlink()
    assert main(["report", "--folder", str(made)]) == 0
    fresh = read_all(made)
    assert fresh.keys() == committed.keys()
    different = [name for name in committed if fresh[name] != committed[name]]
    assert different == [], "run python -m sdbench report, and commit what it makes"
    pictures = {path.stem for path in RESULTS.glob("plots/*.png")}
    assert pictures - {"page"} == {path.stem for path in RESULTS.glob("plots/*.svg")}


def test_rebuilding_keeps_the_text_around_the_tables(tmp_path):
    make_readme(tmp_path)
    readme = tmp_path / "README.md"
    text = readme.read_text()
    assert text.count("-->\n<!-- end") == 5
    readme.write_text(text.replace("headlines -->\n<!-- end", "headlines -->\nold table\n<!-- end"))
    rebuild(tmp_path)
    assert readme.read_text() == text.replace("-->\n<!-- end", "-->\nNo runs yet.\n<!-- end")


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("pages/a.md", "# A page\n", "no <!-- begin generated: runs ... -->"),
        ("pages/a.md", "<!-- begin generated: runs 2031* -->", "2031*"),
        (
            "README.md",
            "<!-- begin generated: comparison -->",
            "no <!-- end generated: comparison -->",
        ),
    ],
)
def test_a_file_that_is_not_what_it_should_be_stops_everything(tmp_path, name, content, value):
    make_readme(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    before = (tmp_path / "README.md").read_text()
    assert refusal_of("report", "--folder", tmp_path).value == value
    assert (tmp_path / "README.md").read_text() == before
    assert not (tmp_path / "throughput.csv").exists()
    (tmp_path / "README.md").unlink()
    assert refusal_of("report", "--folder", tmp_path).value == str(tmp_path / "README.md")


def test_a_copy_of_a_record_is_named_and_left_out(tmp_path, capsys):
    make_readme(tmp_path)
    path = tmp_path / "runs" / "copy" / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(make_record()))
    assert main(["report", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert f"got '{path}'" in printed.err
    assert "from 0 runs and 0 figures" in printed.out and "left out" in printed.out
