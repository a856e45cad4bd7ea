"""Repeating a command through the command line: interval between runs, failures kept."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdbench.cli import main
from tests.refusals import refusal_of
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
FAKE = str(Path(__file__).with_name("fake_benchmark.py"))
PRECOMPUTED = ("--latents", "precomputed", "--remote", "latents")
pytestmark = pytest.mark.usefixtures("starts")


def times_of_records(folder: Path) -> dict[str, int]:
    """When the record of each run was written, in ns."""
    return {one.parts[-3]: one.stat().st_mtime_ns for one in folder.glob("*/*/record.json")}


def test_each_run_is_fresh_and_three_have_an_interval_and_what_is_missing_is_made(
    tmp_path, starts, capsys
):
    folder, size = tmp_path / "repeat", ("--device_train_microbatch_size", "4")
    argv = ["repeat", "3", "--folder", str(folder), "--", "python", FAKE, *size]
    assert main(argv) == 0
    assert starts.read_text().splitlines() == [" ".join(size)] * 3
    before = times_of_records(folder)
    output = capsys.readouterr().out
    assert "images/s of 3 runs: median 8.75, from 8.75 to 8.75\n" in output
    assert "run 3/3" in output and "95 % interval between runs: 8.75 to 8.75 (" in output

    shutil.rmtree(folder / "2")
    assert main(argv) == 0
    assert len(starts.read_text().splitlines()) == 4
    after = times_of_records(folder)
    assert {run: after[run] == time_ns for run, time_ns in before.items()} == {
        "1": True,
        "2": False,
        "3": True,
    }
    output = capsys.readouterr().out
    assert "2 of 3 runs done" in output and "images/s of 3 runs: median 8.75" in output


def test_runs_of_another_command_are_not_mixed_with_these(tmp_path, starts):
    argv = ("repeat", "1", "--folder", tmp_path / "repeat", "--", "python", FAKE, "--batch_size")
    assert main([*map(str, argv), "1"]) == 0
    error = refusal_of(*argv, "2")
    assert error.flag == "--folder"
    assert error.value.startswith("COMMAND [") and error.value.endswith("'--batch_size', '2']")
    assert starts.read_text() == "--batch_size 1\n"


def test_a_folder_with_other_files_is_left_as_it_is(tmp_path):
    (tmp_path / "1").mkdir()  # the loop would make the first run here
    error = refusal_of("repeat", "1", "--folder", tmp_path, "--", "python", FAKE)
    assert (error.flag, error.value) == ("--folder", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.slow
def test_two_commands_take_turns_and_are_compared(tmp_path, starts, capsys):
    folder = tmp_path / "repeat"
    slow = ["python", FAKE, "--seed", "5"]  # a second each: run ids tell seconds
    against = shlex.join([*slow, "--device_train_microbatch_size", "2"])
    argv = ["repeat", "2", "--folder", str(folder), "--against", against, "--", *slow]
    assert main([*argv, "--device_train_microbatch_size", "4"]) == 0
    order = [line.split()[-1] for line in starts.read_text().splitlines()]
    assert order == ["2", "4"] * 2
    sides = f"{folder}/baseline {folder}/candidate"
    output = capsys.readouterr().out
    assert re.findall(r"median ([\d.]+)", output) == ["7.5", "8.75"]
    assert f"python -m sdbench compare {sides}\n" in output
    assert "compared: micro_batch, global_batch: 2 -> 4" in output
    assert "1.17x  1.167 to 1.167  faster" in output


def test_failed_runs_are_told_and_the_others_are_kept(tmp_path, capsys):
    folder = tmp_path / "repeat"
    argv = ["repeat", "1", "--folder", str(folder), "--against", f"python {FAKE} --seed 3"]
    assert main([*argv, "--", "python", FAKE]) == 1
    printed = capsys.readouterr()
    assert "no run ended well" in printed.out
    assert "it takes 3 that ended well" in printed.out
    assert "not compared: no row on this side has a figure" in printed.err
    assert len(list(folder.glob("candidate/1/*/record.json"))) == 1


def test_the_program_of_another_checkout_may_have_other_flags(tmp_path, starts):
    other = tmp_path / "benchmark.py"
    other.symlink_to(FAKE)
    argv = ["repeat", "1", "--folder", str(tmp_path / "repeat"), "--", "python", str(other)]
    assert main([*argv, "--flag_of_before", "1"]) == 0
    assert starts.read_text() == "--flag_of_before 1\n"


@pytest.mark.parametrize("start", ["python -m sdbench", "sdbench"])
def test_the_flags_of_a_command_of_the_package_are_checked_before_a_start(tmp_path, start):
    command = [*start.split(), "benchmark", "--use_emma"]
    refusal = refusal_of("repeat", "1", "--folder", tmp_path / "repeat", "--", *command)
    assert (refusal.value, refusal.flag) == ("--use_emma", "--use_ema")
    assert not (tmp_path / "repeat").exists()


def test_a_command_that_is_refused_is_started_once(tmp_path, starts):
    folder = tmp_path / "repeat"
    refusal = refusal_of("repeat", "5", "--folder", folder, "--", "python", FAKE, "--seed", "4")
    assert (refusal.flag, "the seed is unlucky" in refusal.what) == ("COMMAND", True)
    assert len(starts.read_text().splitlines()) == 1


@pytest.mark.slow
def test_ctrl_c_ends_the_run_and_keeps_what_has_ended(tmp_path, repository, starts):
    folder = tmp_path / "repeat"
    argv = ["repeat", "50", "--folder", str(folder), "--", "python", FAKE, "--seed", "5"]
    process = subprocess.Popen(
        # What a run that is stopped has printed is kept without secrets.
        [sys.executable, "-m", "sdbench", *argv, "--remote=https://host/a.tar?sig=mine"],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len([*folder.glob("*/*/record.json")]) >= 2, what="the second start")
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped by Ctrl-C" in errors and "Traceback" not in errors
    assert re.search(r"images/s of (1 run|\d+ runs): median ", output)
    log = (folder / "2" / "output.log").read_text()
    assert "https://host/a.tar" in log and "mine" not in log
    logs = [path.read_text() for path in folder.glob("*/output.log")]
    assert any("KeyboardInterrupt" in text for text in logs)  # the run was told of Ctrl-C, too
    num_started = len(starts.read_text().splitlines())
    time.sleep(1.5)
    assert len(starts.read_text().splitlines()) == num_started


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        (["0", "--", "python", FAKE], "N", "0"),
        (["3"], "COMMAND", ""),
        (["3", "--folder", "/dev/null/runs", "--", "python", FAKE], "--folder", "/dev/null/runs"),
        (["3", "--", "python", FAKE, "--results_dir", "x"], "COMMAND", "--results_dir"),
        (["3", "--against", "python 'x", "--", "python", FAKE], "--against", "python 'x"),
        (["3", "--against", "no-such-one", "--", "python", FAKE], "COMMAND", "no-such-one"),
        (["3", "--", "python", f"{ROOT}/benchmark.py", "--lr", "much"], "--lr", "much"),
        (
            ["3", "--", "python", f"{ROOT}/benchmark.py", "--train_text_encoder", *PRECOMPUTED],
            "--latents or --train_text_encoder",
            "precomputed",
        ),
        (
            ["3", "--against", f"python {ROOT}/data.py --num_workers=x", "--", "python"],
            "--num_workers",
            "x",
        ),
    ],
)
def test_wrong_input_is_refused(argv, flag, value):
    error = refusal_of("repeat", *argv)
    assert (error.flag, error.value) == (flag, value)
