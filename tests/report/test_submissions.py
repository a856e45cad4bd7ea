"""Results that others submit: what is accepted, what is refused, and how the tables show them."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess

import pytest

from sdbench.cli import main
from sdbench.record.provenance import is_in_history
from sdbench.results.submissions import load_submissions
from tests.refusals import refusal_of
from tests.report.results_folder import RESULTS, make_record, make_results, write_run

NAME = "Ada Lovelace"
RATES = (0.46, 0.47, 0.48)
SECRET = f"hf_{'aB3' * 12}"
UNKNOWN = "0" * 40
WHO = ("-c", "user.name=a", "-c", "user.email=a@b.org")


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """The last commit of a history that the suite takes for its own."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "history"))

    def git(*arguments):
        command = ["git", *WHO, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet", "--bare")
    (tmp_path / "nothing").touch()
    tree = git("hash-object", "-t", "tree", "-w", str(tmp_path / "nothing"))
    git("update-ref", "HEAD", git("commit-tree", tree, "-m", "x"))
    return git("rev-parse", "HEAD")


@pytest.fixture
def runs(tmp_path, commit):
    """The folders of three runs of one configuration."""
    return [
        write_run(tmp_path / "runs" / run_id, make_run(run_id, rate, commit))
        for rate in RATES
        for run_id in [f"20261129T12{round(100 * rate):04d}Z_2-core-cpu_sd2-base-256px-fast"]
    ]


def make_run(run_id, rate, commit, **changes):
    clean = {"git__commit": commit, "git__dirty": False, "summary__flags": []}
    rate = {"summary__images_per_second": rate, "summary__images_per_second_interval": None}
    return make_record(**{"run_id": run_id, **rate, **clean, **changes})


def edit(place, **changes):
    """Change a record without anything that follows from it, e.g. ``git__dirty=True``."""
    file = place / "record.json" if place.is_dir() else place
    record = json.loads(file.read_text())
    for path, value in changes.items():
        *folders, name = path.split("__")
        part = record
        for folder in folders:
            part = part[folder]
        part[name] = value
    file.write_text(json.dumps(record))


def submit(results, *runs, name=NAME):
    return ["publish", *map(str, runs), "--submitter", name, "--folder", str(results)]


def rows_of(results):
    with (results / "throughput.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_an_accepted_result_is_told_apart_and_goes_with_its_file(tmp_path, runs, capsys):
    # The same machine and configuration were measured here, faster.
    own = make_record(summary__flags=[])
    results = make_results(tmp_path / "results", own, quoted=False)
    (results / "quoted").mkdir()
    figure = "source,watts,submitter,images_per_second\nx,9,B,5\n"
    (results / "quoted" / "a.csv").write_text(figure)
    assert main(["report", "--folder", str(results)]) == 0
    before = [[*row.items()] for row in rows_of(results)]
    assert main(submit(results, *runs)) == 0
    (file,) = (results / "submitted").iterdir()
    assert file.name == f"{runs[0].name}.json"
    printed = capsys.readouterr().out
    assert f"published {file}\n" in printed and f"git add {results}\n" in printed
    rows = rows_of(results)
    assert [row["kind"] for row in rows] == ["measured", *["submitted"] * 3, "quoted"]
    assert {(row["source"], row["submitter"]) for row in rows[1:4]} == {(file.stem, NAME)}
    assert [float(row["images_per_second"]) for row in rows[1:4]] == list(RATES)
    # No cell of the other rows has moved.
    assert [[*row.items()] for row in (rows[0], rows[4])] == before
    readme = (results / "README.md").read_text()
    best = [line for line in readme.splitlines() if line.startswith("| ") and "0.4" in line]
    assert [NAME in line for line in best] == [False, True]
    assert "median 0.47 (" in best[1] and "median" not in best[0]
    assert '<tr data-kind="submitted">' in (results / "index.html").read_text()
    # The same again changes nothing; without the file, nothing of it is left.
    assert main(submit(results, *runs)) == 0
    assert f"published before: {file}\n" in capsys.readouterr().out
    file.unlink()
    assert main(["report", "--folder", str(results)]) == 0
    assert [row["kind"] for row in rows_of(results)] == ["measured", "quoted"]
    pages = [path for path in results.rglob("*") if path.suffix in (".md", ".html", ".csv")]
    assert not [path for path in pages if NAME in path.read_text()]


def of_another_program(runs):
    shutil.rmtree(runs[1])
    shutil.copytree(min(RESULTS.glob("runs/*_feed-folder-512px")), runs[1])
    (runs[1] / "steps.csv").touch()


def copy_the_first(runs):
    shutil.rmtree(runs[1])
    shutil.copytree(runs[0], runs[1])
    edit(runs[1], run_id=runs[1].name)


def take_a_step(runs):
    """Count a measured step among those before the window."""
    table = runs[1] / "steps.csv"
    table.write_text(table.read_text().replace("measured", "warmup", 1))


def lengthen(runs):
    with (runs[1] / "record.json").open("a") as file:
        file.write(" " * 5_000_000)


def changed(**changes):
    return lambda runs: edit(runs[1], **changes)


# As read from a GPU on which another process computed.
GPU = {
    **dict.fromkeys(("utilization_percent", "power_w", "energy_j", "temperature_c")),
    **dict.fromkeys(("power_limit_w", "default_power_limit_w", "sm_clock_mhz")),
    **{"max_sm_clock_mhz": None, "throttle_reasons": [], "num_other_processes": 1},
}
FAILED = {"status": "failed", "reason": "no disk", "summary": None}
INVALID = {"status": "invalid", "reason": "a short epoch", "summary": None}
PLACE = "the place of the second run"
# What is done to three runs (a function may return others), and the value that is refused.
BAD = {
    "another-schema": (changed(schema_version=1), PLACE),
    "an-edited-rate": (changed(summary__images_per_second=4.7), PLACE),
    "an-edited-median": (changed(summary__step_time_p50_s=4.0), PLACE),
    "an-edited-step": (take_a_step, PLACE),
    "no-json": (lambda runs: (runs[1] / "record.json").write_text("images/s: 9"), PLACE),
    "too-long": (lengthen, PLACE),
    "no-steps": (lambda runs: (runs[1] / "steps.csv").unlink(), PLACE),
    "no-table-of-steps": (lambda runs: (runs[1] / "steps.csv").write_text("a\n1\n"), "2 lines"),
    "a-secret": (changed(command=["benchmark.py", SECRET]), PLACE),
    "uncommitted-changes": (changed(git__dirty=True), True),
    "changes-not-known": (changed(git__dirty=None), None),
    "an-unknown-commit": (changed(git__commit=UNKNOWN), UNKNOWN),
    "no-commit": (changed(git__commit=None), None),
    "too-few": (lambda runs: runs[:2], 2),
    "none": (lambda runs: [], 0),
    "a-busy-machine": (changed(summary__flags=["busy"]), ["busy"]),
    "a-shared-gpu": (
        changed(summary__flags=["shared"], summary__gpu=GPU, summary__gpu_utilization_percent=None),
        ["shared"],
    ),
    "flags-not-known": (changed(summary__flags=None), None),
    "an-invalid-run": (changed(**INVALID), "invalid"),
    "a-failed-run": (changed(**FAILED), "failed"),
    "several-configurations": (changed(config__lr=0.5), "lr"),
    "a-run-twice": (lambda runs: [*runs, runs[1]], PLACE),
    "a-copy-of-a-run": (copy_the_first, PLACE),
    "another-program": (of_another_program, "feed"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_result_is_refused_and_leaves_nothing(name, tmp_path, runs):
    results = make_results(tmp_path / "results", quoted=False)
    spoil, value = BAD[name]
    changed = spoil(runs)
    given = changed if isinstance(changed, list) else runs
    command, *argv = submit(results, *given)
    error = refusal_of(command, *argv)
    assert error.exit_code == 2 and error.what and error.allowed and "RUN" in error.flag
    if value == PLACE:
        assert runs[1].name in error.value
    else:
        assert error.value == value
    assert SECRET not in str(error)
    assert {path.name for path in results.iterdir()} == {"README.md"}


@pytest.mark.parametrize("name", ["", " ", "a/b", "<b>", "A" * 41, "\u202eadA"])
def test_a_name_that_a_table_cannot_show_is_refused(name, tmp_path, runs):
    results = make_results(tmp_path / "results", quoted=False)
    command, *argv = submit(results, *runs, name=name)
    error = refusal_of(command, *argv)
    assert (error.value, "--submitter" in error.flag) == (name, True)


def test_no_run_is_counted_twice(tmp_path, runs, commit):
    results = make_results(tmp_path / "results", quoted=False)
    later = [
        write_run(tmp_path / "runs" / run_id, make_run(run_id, rate, commit))
        for rate in (0.491, 0.492)
        for run_id in [f"20261129T13{round(1000 * rate):04d}Z_2-core-cpu_sd2-base-256px-fast"]
    ]
    assert main(submit(results, *runs)) == 0
    file = results / "submitted" / f"{runs[0].name}.json"
    # Under the name that is there, and under another.
    error = refusal_of(*submit(results, *runs, later[0]))
    assert (error.value, error.flag) == (str(file), "RUN")
    assert refusal_of(*submit(results, *runs[1:], later[0])).value == ", ".join(
        run.name for run in runs[1:]
    )
    assert main(["publish", str(later[0]), "--folder", str(results)]) == 0
    assert refusal_of(*submit(results, *later, runs[0], name="B")).value == str(file)
    file.unlink()
    assert refusal_of(*submit(results, *later, runs[2])).value == later[0].name
    assert not file.parent.exists()


# What is done to the text of an accepted file.
EDITS = {
    "a-rate": lambda text: text.replace('"images_per_second": 0.47', '"images_per_second": 4.7'),
    "a-key": lambda text: text.replace("{", '{"note": "fast", ', 1),
    "a-secret": lambda text: text.replace('"benchmark.py"', f'"benchmark.py", "{SECRET}"', 1),
    "a-commit": lambda text: re.sub('"commit": "[0-9a-f]{40}"', f'"commit": "{UNKNOWN}"', text),
    "a-name": lambda text: text.replace(NAME, "<b>"),
    "two-runs": lambda text: json.dumps(json.loads(text) | {"runs": json.loads(text)["runs"][:2]}),
    "half": lambda text: text[: len(text) // 2],
    "long": lambda text: text + " " * 5_000_000,
    "a-list": lambda text: "[]",
}


@pytest.mark.parametrize("name", [*EDITS, "copied", "renamed"])
def test_report_leaves_out_what_publish_would_refuse(name, tmp_path, runs, capsys):
    results = make_results(tmp_path / "results", quoted=False)
    assert main(submit(results, *runs)) == 0
    (file,) = (results / "submitted").iterdir()
    bad = file
    if name in EDITS:
        text = file.read_text()
        file.write_text(EDITS[name](text))
        assert file.read_text() != text
    else:
        bad = file.with_name(f"20261130{file.name[8:]}")
        (shutil.copy if name == "copied" else shutil.move)(file, bad)
    capsys.readouterr()
    assert main(["report", "--folder", str(results)]) == 1
    assert capsys.readouterr().err.count("left out: ") == 1
    assert (name == "copied") == (len(rows_of(results)) == 3)
    _, left_out = load_submissions(results, known=())
    assert left_out == [bad]


def test_where_the_history_ends_a_commit_is_not_asked_for(tmp_path, runs, commit, monkeypatch):
    assert [is_in_history(one) for one in (commit, UNKNOWN)] == [True, False]
    (tmp_path / "history" / "shallow").write_text(f"{commit}\n")
    assert [is_in_history(one) for one in (commit, UNKNOWN)] == [True, None]
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    assert is_in_history(commit) is None
    results = make_results(tmp_path / "results", quoted=False)
    assert main(submit(results, *runs)) == 0


def test_every_committed_submission_is_accepted():
    own = [path.name for path in (RESULTS / "runs").iterdir()]
    files = [*(RESULTS / "submitted").glob("*")]
    assert [path for path in files if path.suffix != ".json"] == []
    _, left_out = load_submissions(RESULTS, known=own)
    assert left_out == []
