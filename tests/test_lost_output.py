"""A closed terminal or a full disk: measurements are kept, with the exit code of the run."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import benchmark
import data
from sdbench import cli
from sdbench.run.outcome import explain
from tests.forked import exit_codes, forked_ranks, log_of
from tests.runs import only_record
from tests.schemas import validate
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[1]
END_WITHIN_S = 60
# linux/fs.h
MNT_DETACH = 2

TINY = ("--model_name", "nano", "--use_synth_data", "--num_workers", "0", "--engine", "torch")
FEW_STEPS = (
    *("--warmup_batches", "1", "--max_warmup_batches", "1"),
    *("--measure_batches", "2", "--max_measure_batches", "2"),
    *("--profile_batches", "0", "--no_measure_peak"),
)
SMALL_DATA = ("--use_synth_data", "--image_size", "64", "--batch_size", "4", "--num_workers", "0")
BENCHMARK = (*TINY, *FEW_STEPS)
DATA = (*SMALL_DATA, "--num_batches", "3")
ENDLESS = (*SMALL_DATA, "--num_batches", "100000", "--emulate_step_seconds", "0.1")
A_SECOND = (*ENDLESS, "--max_seconds", "1")


def wait_for_record(results: Path) -> None:
    wait_for(lambda: list(results.glob("*/record.json")), what="a record")


def checked_record(results: Path) -> dict:
    record = only_record(results)
    validate(record)
    assert not list(results.glob("*/.reserve"))
    return record


@pytest.mark.slow
@pytest.mark.parametrize("output", ["2>&1 | head -1", "<&- >&- 2>&-"])
def test_output_that_nobody_takes_is_dropped_and_not_the_run(tmp_path, output):
    flags = [*DATA, "--results_dir", str(tmp_path / "runs")]
    program = shlex.join([sys.executable, "data.py", *flags])
    shell = f"{program} {output}\necho ${{PIPESTATUS[0]}} >{tmp_path}/exit_code"
    printed = subprocess.run(
        ["bash", "-c", shell], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout
    assert (tmp_path / "exit_code").read_text() == "0\n"
    record = checked_record(tmp_path / "runs")
    assert record["status"] == "ok"
    assert "Traceback" not in printed and "Exception ignored" not in printed
    # The log has everything, and no descriptor of a closed stream has become a file's.
    log = (tmp_path / "runs" / record["run_id"] / "stdout.log").read_text()
    assert log.endswith(f"record: {tmp_path / 'runs' / record['run_id']}\n")


@pytest.mark.parametrize(
    ("handler", "flags", "exit_code", "status", "reason"),
    [
        (signal.SIG_DFL, ENDLESS, 130, "interrupted", "SIGHUP: "),
        (signal.SIG_IGN, A_SECOND, 0, "ok", ""),  # as nohup starts it
    ],
    ids=["terminal", "nohup"],
)
def test_a_closed_terminal_interrupts_what_nohup_has_not_started(
    tmp_path, handler, flags, exit_code, status, reason
):
    def program():
        signal.signal(signal.SIGHUP, handler)
        return data.main([*flags, "--results_dir", str(tmp_path / "runs")])

    with forked_ranks(program, tmp_path, num_ranks=1) as (process,):
        wait_for_record(tmp_path / "runs")
        os.kill(process.pid, signal.SIGHUP)
        assert exit_codes([process], timeout_s=END_WITHIN_S) == [exit_code]
    record = checked_record(tmp_path / "runs")
    assert record["status"] == status
    assert (record["reason"] or "").startswith(reason)


@pytest.mark.slow
def test_a_terminal_closed_over_a_launcher_interrupts_its_ranks(tmp_path):
    composer = str(Path(sys.executable).with_name("composer"))
    flags = ("--measure_batches", "1000000", "--num_threads", "1", "--results_dir", str(tmp_path))
    process = subprocess.Popen(
        [composer, "-n", "2", "benchmark.py", *TINY, *flags],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A run that ended badly in the tests' own process has left SIGHUP ignored.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        wait_for_record(tmp_path)
        ranks = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(END_WITHIN_S) == -signal.SIGHUP
        # Before the ranks are killed, which are in the launcher's group and still write the record.
        assert psutil.wait_procs(ranks, timeout=END_WITHIN_S)[1] == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    record = checked_record(tmp_path)
    assert record["status"] == "interrupted", record["reason"]
    assert "SIGHUP: " in record["reason"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 MiB."""
    if sys.platform != "linux":
        pytest.skip("a disk of its own takes Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"small", bytes(folder), b"tmpfs", 0, b"size=32m") != 0:
        pytest.skip(f"a disk cannot be mounted: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(bytes(folder), MNT_DETACH)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError) as caught:
        while True:
            file.write(bytes(4096))
    assert caught.value.errno == errno.ENOSPC


PRECOMPUTE = ("precompute", "--model_name", "nano", "--use_synth_data", "--max_samples", "8")


@pytest.mark.parametrize(
    ("main", "flags", "status", "told"),
    [
        (data.main, A_SECOND, "ok", "images/s"),
        (cli.main, PRECOMPUTE, "failed", "No space left on device"),
    ],
    ids=["data", "precompute"],
)
def test_a_disk_that_fills_costs_no_figures(small_disk, tmp_path, main, flags, status, told):
    results = small_disk / "runs"
    argv = [*flags, "--results_dir", str(results)]
    if status == "failed":
        argv += ["--folder", str(small_disk / "latents")]
    with forked_ranks(lambda: main(argv), tmp_path, num_ranks=1) as (process,):
        wait_for_record(results)
        os.kill(process.pid, signal.SIGSTOP)  # it has not ended when the disk is full
        fill(small_disk)
        os.kill(process.pid, signal.SIGCONT)
        codes = exit_codes([process], timeout_s=END_WITHIN_S)
    record = checked_record(results)
    assert (record["status"], codes) == (status, [0 if status == "ok" else 1])
    assert (record["summary"] is None) == (status == "failed")
    printed = log_of(tmp_path, 0).read_text()
    assert told in (record["reason"] or printed)
    assert "Traceback" not in printed


DRAWING = ("generate", "--model_name", "nano", "--prompts", "a cat")


@pytest.mark.parametrize(
    ("main", "flags", "folder_flag", "num_free_bytes"),
    [
        (data.main, DATA, "--results_dir", 0),
        (cli.main, DRAWING, "--folder", 2**17),  # enough for all but the record
    ],
)
def test_a_disk_that_is_full_at_the_start_is_bad_input(
    small_disk, capsys, main, flags, folder_flag, num_free_bytes
):
    fill(small_disk)
    filler = small_disk / "filler"
    os.truncate(filler, filler.stat().st_size - num_free_bytes)
    assert main([*flags, folder_flag, str(small_disk / "new")]) == 2
    assert f"change it with {folder_flag}." in capsys.readouterr().err
    assert not list(small_disk.glob("**/*.json"))


def test_a_table_that_cannot_be_written_is_told_and_costs_no_run(tmp_path, capsys):
    (tmp_path / "runs.csv").mkdir()
    assert benchmark.main([*BENCHMARK, "--results_dir", str(tmp_path)]) == 0
    assert checked_record(tmp_path)["status"] == "ok"
    assert "warning: runs.csv could not be written" in capsys.readouterr().err


def test_a_full_disk_is_the_reason_of_a_failure_and_no_traceback(capsys):
    with pytest.raises(OSError) as caught, open("/dev/full", "w") as file:
        file.write("text")
    failure = explain(caught.value)
    assert (failure.status, failure.exit_code) == ("failed", 1)
    assert "free some, or choose another folder" in failure.reason
    assert capsys.readouterr().err == ""
