"""The committed tables, plots and pages are what the committed records and quoted figures give."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from sdbench.analysis.report import rebuild
from sdbench.cli import main
from sdbench.record.store import load_record
from tests.refusals import refusal_of
from tests.report.results_folder import (
    RESULTS,
    make_record,
    make_results,
    make_text,
    write_run,
)

COMMITTED = ("README.md", "ladder.md", "throughput.csv", "data.csv", "index.html")
COMMITTED += ("plots/*.svg",)


def read_all(results):
    paths = [path for pattern in COMMITTED for path in sorted(results.glob(pattern))]
    return {str(path.relative_to(results)): path.read_text(encoding="utf-8") for path in paths}


def test_what_is_committed_is_what_the_committed_records_give(tmp_path):
    made = tmp_path / "results"
    shutil.copytree(RESULTS, made)
    shutil.copytree(RESULTS.parent / "docs", tmp_path / "docs")  # the page links to what is there
    committed = read_all(RESULTS)
    assert {"README.md", "throughput.csv", "data.csv", "index.html"} <= committed.keys()
    # Sources are told by their authors and not by our numbers of them.
    assert not [name for name, text in committed.items() if re.search(r"\bseed[ _]?0\d\d", text)]
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
    make_text(tmp_path)
    readme = tmp_path / "README.md"
    text = readme.read_text()
    assert text.count("-->\n<!-- end") == 6
    readme.write_text(text.replace("headlines -->\n<!-- end", "headlines -->\nold table\n<!-- end"))
    rebuild(tmp_path)
    assert readme.read_text() == text.replace("-->\n<!-- end", "-->\nNo runs yet.\n<!-- end")


def test_a_readme_without_a_place_for_a_table_stops_everything(tmp_path):
    make_text(tmp_path)
    readme = tmp_path / "README.md"
    text = "<!-- begin generated: comparison -->"
    readme.write_text(text)
    value = "no <!-- end generated: comparison -->"
    assert refusal_of("report", "--folder", tmp_path).value == value
    assert readme.read_text() == text
    assert not (tmp_path / "throughput.csv").exists()
    readme.unlink()
    assert refusal_of("report", "--folder", tmp_path).value == str(readme)


def test_a_copy_of_a_record_is_named_and_left_out(tmp_path, capsys):
    make_text(tmp_path)
    run = write_run(tmp_path / "runs" / "copy", make_record())
    assert main(["report", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert f"got '{run / 'record.json'}'" in printed.err
    assert "from 0 runs and 0 figures" in printed.out and "left out" in printed.out


def test_a_page_of_ones_own_runs_needs_no_folder_of_results(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batch = {"config__batch_size": 8}
    records = [make_record(config__device_train_microbatch_size=size, **batch) for size in (2, 4)]
    records.append(make_record(status="failed", reason="no disk", summary=None))
    runs = make_results(Path("results"), *records, quoted=False) / "runs"
    resumed = load_record(min(RESULTS.glob("runs/*_small-128px-fast-dreambooth")))
    resumed["summary"]["num_restarts"] = 1
    (runs / resumed["run_id"]).mkdir()
    (runs / resumed["run_id"] / "record.json").write_text(json.dumps(resumed))
    shutil.copytree(runs, "again")  # copies of the same runs count once
    page = tmp_path / "my.html"
    assert main(["report", str(runs), "again", "--out", "my.html"]) == 0
    written, counts, without_row = capsys.readouterr().out.splitlines()[-3:]
    assert (written, counts) == (f"wrote {page}", "a page of 2 runs")
    assert "(failed)" in without_row and f"{resumed['run_id']} (resumed: " in without_row
    text = page.read_text(encoding="utf-8")
    assert f"{resumed['run_id']} (resumed: " in text
    assert "[1] results/runs, again" in text  # the source of a chart
    assert text.count("<h2>Best of each machine</h2>") == 1 and "Figures of others" not in text
    assert ">step_times" not in text and "<figcaption>Step times" in text
    refusal = refusal_of("report", runs, tmp_path / "none")  # one that is there does not hide it
    assert (refusal.what, refusal.flag) == ("no such folder", "RUNS")
    assert refusal_of("report", runs, "--folder", tmp_path).flag == "--folder"
    assert refusal_of("report", "--out", page).flag == "--out"


def test_publishing_begins_a_folder_and_may_be_repeated(tmp_path, capsys):
    (run,) = (make_results(tmp_path / "mine", make_record(), quoted=False) / "runs").iterdir()
    results = tmp_path / "new"
    for said in ("published", "published before:"):
        assert main(["publish", str(run), "--folder", str(results)]) == 0
        assert capsys.readouterr().out.startswith(f"{said} {results / 'runs' / run.name}\n")
    assert "| 1 x Intel Xeon Processor, 2 cores |" in (results / "README.md").read_text()
    record = json.loads((run / "record.json").read_text())
    record["duration_s"] += 1
    (run / "record.json").write_text(json.dumps(record))
    assert refusal_of("publish", run, "--folder", results).value == str(results / "runs" / run.name)


def test_a_run_is_not_published_where_its_tables_cannot_be_made(tmp_path):
    (run,) = (make_results(tmp_path / "mine", make_record(), quoted=False) / "runs").iterdir()
    results = make_results(tmp_path / "results", quoted=False)
    (results / "README.md").write_text("no place")
    assert refusal_of("publish", run, "--folder", results).flag == "--folder"
    assert list((results / "runs").iterdir()) == []
