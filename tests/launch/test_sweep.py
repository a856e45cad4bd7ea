"""Sweeps through the command line: plans, rows for every end, going on where they were stopped."""

from __future__ import annotations

import csv
import fcntl
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sdbench.base.cause import KILLED, LOST
from sdbench.cli import main
from sdbench.launch import child
from tests.refusals import refusal_of
from tests.waiting import wait_for

FAKE = str(Path(__file__).with_name("fake_benchmark.py"))
pytestmark = pytest.mark.usefixtures("starts")


def write_sweep(tmp_path, **content):
    file = tmp_path / "my.yaml"
    file.write_text(json.dumps({"launcher": "python", "script": FAKE, **content}))  # JSON is YAML
    return str(file)


def sweep(tmp_path, *argv, **content):
    """Run a sweep in this process; the exit code and the rows of its table."""
    folder = tmp_path / "sweep"
    code = main(["sweep", write_sweep(tmp_path, **content), "--folder", str(folder), *argv])
    return code, rows_of(folder) if (folder / "runs.csv").exists() else []


def rows_of(folder):
    with (folder / "runs.csv").open() as table:
        return list(csv.DictReader(table))


@pytest.fixture
def time_is_up_when_one_hangs(monkeypatch, impatient):
    """A run takes its whole time when the fake benchmark hangs, and never before that."""

    class Timed(subprocess.Popen):
        def __init__(self, command, *, stdout, **options):
            self.log = Path(stdout.name)
            super().__init__(command, stdout=stdout, **options)

        def wait(self, timeout=None):
            while timeout is not None and self.poll() is None:
                if self.log.read_text().startswith("rank "):
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.02)
            return super().wait()

    names = {**vars(subprocess), "Popen": Timed}
    monkeypatch.setattr(child, "subprocess", SimpleNamespace(**names))


def num_starts(starts):
    return len(starts.read_text().splitlines()) if starts.exists() else 0


@pytest.mark.slow
def test_every_cell_is_a_run_and_a_row(tmp_path, starts, capsys):
    grid = {"device_train_microbatch_size": [2, 4], "use_ema": [True, False]}
    code, rows = sweep(tmp_path, grid=grid, base={"model_name": "tiny", "crop": "random"})
    assert code == 0
    assert [row["images_per_second"] for row in rows] == ["7.5", "7.5", "8.75", "8.75"]
    assert starts.read_text().splitlines() == [
        f"--model_name=tiny --crop=random --device_train_microbatch_size={size} {ema}"
        for size in (2, 4)
        for ema in ("--use_ema", "--no_use_ema")
    ]
    output = capsys.readouterr().out
    assert "4 commands x 1" in output and "0 of 4 runs done" in output
    assert "run 4/4: " in output and "s left" in output


@pytest.mark.parametrize("argv", [(), ("--dry_run",)], ids=["started", "dry_run"])
def test_a_cell_that_the_rules_refuse_is_named_before_any_run(tmp_path, starts, argv):
    base = {"model_name": "tiny", "train_text_encoder": True}
    file = write_sweep(tmp_path, base=base, grid={"latents": ["online", "precomputed"]})
    refusal = refusal_of("sweep", file, "--folder", tmp_path / "sweep", *argv)
    assert refusal.what.startswith("a cell of the sweep would be refused (latents=precomputed): ")
    assert (refusal.value, refusal.allowed) == ("precomputed", "online")
    assert refusal.flag == f"--latents or --train_text_encoder in {file}"
    assert num_starts(starts) == 0 and not (tmp_path / "sweep").exists()


def test_rules_that_ask_for_the_machine_or_the_preset_refuse_no_cell(tmp_path):
    """What tf32 takes is a GPU, and what fp32 copies take is the bf16 of some presets."""
    cells = [{"precision": "tf32"}, {"master_weights": "fp32"}, {"sharding": "zero1"}]
    assert sweep(tmp_path, "--dry_run", list=cells) == (0, [])


@pytest.mark.slow
def test_out_of_memory_is_a_row_and_a_finding(tmp_path, starts):
    grid = {"device_train_microbatch_size": [4, 8]}
    code, rows = sweep(tmp_path, grid=grid)
    assert code == 0
    assert [row["status"] for row in rows] == ["ok", "oom"]
    assert "CUDA out of memory" in rows[1]["reason"] and rows[1]["micro_batch"] == "8"
    assert rows[1]["images_per_second"] == ""
    assert sweep(tmp_path, grid=grid)[0] == 0
    assert num_starts(starts) == 2  # a second start repeats nothing


@pytest.mark.slow
def test_what_hangs_dies_or_is_refused_is_a_row_and_the_sweep_goes_on(
    tmp_path, time_is_up_when_one_hangs, capsys
):
    cells = [{"seed": seed} for seed in (2, 3, 4, 1)]
    code, rows = sweep(tmp_path, list=cells, timeout_s=800)
    assert code == 1
    assert [row["status"] for row in rows] == ["timeout", "failed", "failed", "ok"]
    reasons = [row["reason"] for row in rows]
    assert reasons[0] == "it did not end within 800 s"
    assert reasons[1].startswith("killed, as by the out-of-memory killer: ")
    assert reasons[2].startswith("it ended with exit code 2: the seed is unlucky: got 4")
    # The rank that would not end has been killed.
    logs = [path.read_text() for path in (tmp_path / "sweep").glob("*/output.log")]
    (log,) = [text for text in logs if text.startswith("rank ")]
    assert is_gone(int(log.split()[1]))
    assert "the seed is unlucky" in capsys.readouterr().out


@pytest.mark.slow
def test_when_the_budget_is_spent_the_rest_is_named_and_made_the_next_time(
    tmp_path, starts, time_is_up_when_one_hangs, capsys
):
    cells = [{"seed": 1}, {"seed": 2}, {"seed": 7}]  # the second hangs
    code, rows = sweep(tmp_path, list=cells, budget_s=800)
    assert code == 0
    assert [row["status"] for row in rows] == ["ok"]
    output = capsys.readouterr().out
    assert "at most 13 min\n" in output
    assert "time is up; the same command makes the 2 missing runs:\n  seed=2\n" in output
    assert num_starts(starts) == 2
    # Its own time-out is a finding, and what is behind it is measured.
    code, rows = sweep(tmp_path, list=cells, budget_s=800, timeout_s=200)
    assert code == 1
    assert [row["status"] for row in rows] == ["ok", "timeout", "ok"]


def test_a_budget_too_small_for_any_run_is_no_success(tmp_path, impatient):
    code, rows = sweep(tmp_path, list=[{"seed": 2}], budget_s=0.5)
    assert (code, rows) == (1, [])


@pytest.mark.slow
def test_a_dry_run_shows_the_plan_and_another_cell_is_the_only_one_that_runs(
    tmp_path, starts, capsys
):
    one, two = ({"device_train_microbatch_size": sizes} for sizes in ([2], [2, 4]))
    assert sweep(tmp_path, "--dry_run", grid=two, timeout_s=600) == (0, [])
    assert num_starts(starts) == 0
    output = capsys.readouterr().out
    assert "device_train_microbatch_size=2: to run" in output and "at most 20 min\n" in output
    sweep(tmp_path, grid=one)
    sweep(tmp_path, "--dry_run", grid=two)
    assert "about 0 min\n" in capsys.readouterr().out
    _, rows = sweep(tmp_path, grid=two, repeats=2)
    # Round by round.
    sizes = [line.split("=")[1] for line in starts.read_text().splitlines()]
    assert sizes == ["2", "4", "2", "4"] and len(rows) == 4


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ({"grid": {"micro_batch": [1]}}, "micro_batch"),
        ({"gird": {"seed": [1]}, "list": [{"seed": 1}]}, "gird"),
        ({"grid": {"batch_size": ["many"]}}, "many"),
        ({"grid": {"seed": 1}}, {"seed": 1}),
        ({"base": {"seed": 1}}, None),
        ({"list": [{"results_dir": "x"}]}, "results_dir"),
        ({"list": [{"seed": 1}], "timeout_s": True}, True),
        ({"list": [{"seed": 1}], "launcher": "'unclosed"}, "'unclosed"),
        ({"list": [{"seed": 1}], "script": "benchmrk.py"}, "benchmrk.py"),
        ({"list": [{"lr": 1e-4}, {"lr": "0.0001"}]}, {}),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(tmp_path, starts, content, value):
    assert sweep(tmp_path, **content) == (2, [])
    error = refusal_of("sweep", tmp_path / "my.yaml", "--folder", tmp_path / "sweep")
    assert error.value == value
    assert num_starts(starts) == 0


def test_a_sweep_does_not_go_on_under_other_code(tmp_path, capsys):
    grid = {"device_train_microbatch_size": [2]}
    sweep(tmp_path, grid=grid)
    file = tmp_path / "sweep" / "environment.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "torch": "1.12.1"}))
    assert sweep(tmp_path, grid=grid)[0] == 2
    assert "got 'torch 1.12.1 -> " in capsys.readouterr().err


def test_rows_of_another_machine_are_told(tmp_path, capsys):
    sweep(tmp_path, list=[{"seed": 1}])
    (file,) = (tmp_path / "sweep").glob("*/*/record.json")
    record = json.loads(file.read_text())
    slug, record["machine"]["slug"] = record["machine"]["slug"], "8-x100"
    file.write_text(json.dumps(record))
    assert "caution" not in capsys.readouterr().err
    assert sweep(tmp_path, list=[{"seed": 1}, {"seed": 5}])[0] == 0
    machines = ", ".join(sorted([slug, "8-x100"]))
    assert f"caution: measured on different machines: {machines}\n" in capsys.readouterr().err


def test_two_sweeps_do_not_share_a_folder(tmp_path, capsys):
    (tmp_path / "sweep").mkdir()
    with (tmp_path / "sweep" / child.LOCK_NAME).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep(tmp_path, list=[{"seed": 1}]) == (2, [])
    assert "another command is at work in this folder" in capsys.readouterr().err
    assert sweep(tmp_path, list=[{"seed": 1}])[0] == 0


@pytest.mark.parametrize(
    ("first", "exit_code", "cause", "said"),
    [
        # The launcher's own exit code is that of rank 0, which it has ended itself.
        ("report_cause('ValueError', 'no luck')", 241, "ValueError", "no luck"),
        ("report_cause(LOST, 'rank 1 is silent')", 241, LOST, "rank 1 is silent"),
        ("", 247, KILLED, "the last line"),  # composer has 256 - 9 for SIGKILL
        ("", 143, None, "it was ended by signal 15 (SIGTERM): the last line"),
        ("os.system(f'{sys.executable} -c 1/0')", 1, None, "ZeroDivisionError: division by zero"),
        ("", 255, None, "it ended with exit code 255: the last line"),  # exit(-1), no SIGHUP
    ],
)
def test_what_the_first_process_to_end_says_is_the_cause(
    tmp_path, repository, monkeypatch, first, exit_code, cause, said
):
    monkeypatch.setenv("PYTHONPATH", str(repository))
    lines = ("import os, sys", "from sdbench.base.cause import LOST, report_cause", first)
    lines += ("print('the last line')", f"sys.exit({exit_code})")
    command = [sys.executable, "-c", "\n".join(lines)]
    outcome = child.run_child(command, folder=tmp_path / "run")
    assert (outcome.status, outcome.exit_code, outcome.cause) == ("failed", exit_code, cause)
    assert outcome.reason.endswith(said)


def test_a_record_of_another_version_is_a_failed_row(tmp_path):
    code, (row,) = sweep(tmp_path, list=[{"seed": 6}])
    assert (code, row["status"]) == (1, "failed")
    assert "its record cannot be read" in row["reason"]


def test_a_record_that_was_broken_after_its_run_is_refused(tmp_path, starts, capsys):
    sweep(tmp_path, list=[{"seed": 1}])
    (file,) = (tmp_path / "sweep").glob("*/*/record.json")
    rate = r'"images_per_second": [0-9.]+'
    file.write_text(re.sub(rate, '"images_per_second": NaN', file.read_text()))
    assert sweep(tmp_path, list=[{"seed": 1}])[0] == 2
    assert "$.summary.images_per_second: nan is no finite number" in capsys.readouterr().err
    shutil.rmtree(file.parent)  # without its folder the run is made again
    assert sweep(tmp_path, list=[{"seed": 1}])[0] == 0 and num_starts(starts) == 2


SECRETS = ("hf_0123456789", "hunter2")


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("wandb_name", "hf_0123456789", "<HF_TOKEN>"),
        ("remote", "pipe:curl -H 'X-Key: hunter2' http://host/a.tar", "pipe:curl"),
    ],
)
def test_secrets_that_a_command_prints_stay_out(
    tmp_path, starts, monkeypatch, capsys, setting, value, shown
):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    content = {"base": {"seed": 4}, "list": [{setting: value}, {}]}
    assert sweep(tmp_path, **content)[0] == sweep(tmp_path, **content)[0] == 1
    assert value in starts.read_text()  # the command gets it
    assert num_starts(starts) == 2  # the second start knew the runs of the first
    texts = [path.read_text() for path in (tmp_path / "sweep").rglob("*") if path.is_file()]
    printed = "".join(capsys.readouterr())
    assert not any(secret in text for secret in SECRETS for text in [*texts, printed])
    assert f"--{setting}={shown}" in "".join(texts) and f"{setting}={shown}" in printed


def test_the_shipped_sweeps_are_valid(repository, tmp_path, capsys):
    (tmp_path / "benchmark.py").symlink_to(repository / "benchmark.py")
    for name, num_cells in (("seeds", 12), ("tiny", 4), ("presets", 2), ("sharding_cpu", 7)):
        assert main(["sweep", str(repository / "sweeps" / f"{name}.yaml"), "--dry_run"]) == 0
        assert f"{num_cells} commands x " in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_killed_in_the_middle_goes_on_where_it_was(tmp_path, repository):
    file = write_sweep(tmp_path, base={"seed": 5}, grid={"batch_size": [1, 2, 3, 4]})
    folder = tmp_path / "sweep"
    command = [sys.executable, "-m", "sdbench", "sweep", file, "--folder", str(folder)]

    process = subprocess.Popen(command, cwd=repository, stdout=subprocess.DEVNULL)
    wait_for(lambda: len([*folder.glob("*/outcome.json")]) == 2, what="the second end")
    wait_for(lambda: len([*folder.glob("*/*/record.json")]) == 3, what="the third start")
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: all(is_gone(one.pid) for one in started), what="the end of what it started")

    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/outcome.json")}
    assert len(before) in (2, 3)  # the third may have ended just before the signal
    completed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert f"{len(before)} of 4 runs done" in completed.stdout
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    rows = rows_of(folder)
    assert [(row["global_batch"], row["status"]) for row in rows] == [
        (str(size), "ok") for size in (1, 2, 3, 4)
    ]
    assert len({row["source"] for row in rows}) == 4


def is_gone(pid):
    """Whether a process has ended; where nobody asks for its exit code it stays as a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
