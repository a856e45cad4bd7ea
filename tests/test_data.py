"""data.py through its front door."""

from __future__ import annotations

import csv
import itertools
import re
import time

import pytest

import data as script
from sdbench.base.errors import RunError
from sdbench.data.batches.loader import CheckedLoader
from sdbench.record.row import FEED_COLUMNS, format_csv, make_feed_row
from sdbench.report.terminal import format_number
from tests.data.datasets import write_folder
from tests.refusals import printed_refusal
from tests.runs import run_and_load
from tests.schemas import validate

SMALL = ("--use_synth_data", "--image_size", "64", "--batch_size", "4")


def run(tmp_path, *argv):
    return run_and_load(script.main, tmp_path / "runs", *argv)


def test_a_run_prints_and_records_how_fast_a_source_feeds(tmp_path, capsys):
    record, exit_code = run(tmp_path, *SMALL, "--num_workers", "0", "--num_batches", "20")
    output = capsys.readouterr().out
    assert exit_code == 0
    validate(record)
    assert (record["status"], record["command"][0]) == ("ok", "data.py")
    assert (record["config"]["num_batches"], record["config"]["num_warmup_batches"]) == (20, 1)
    assert record["config"]["data_format"] == "synthetic"
    assert record["run_id"].endswith("_feed-synthetic-64px")

    summary = record["summary"]
    assert (summary["num_images"], summary["num_measured_steps"]) == (80, 20)
    assert summary["images_per_second"] == pytest.approx(80 / summary["window_s"])
    assert summary["images_per_second_interval"]["kind"] == "within-run"
    assert summary["data_wait_percent"] is None
    # The phases are within the window, and nothing else takes long in it.
    busy_s = sum(summary["ms_per_image"].values()) / 1000 * 80
    assert 0 < busy_s <= summary["window_s"]

    assert "Chosen, each by a flag of its name: num_warmup_batches=1" in output
    assert "--remote" not in output  # synthetic data were asked for
    assert f"  images/s              {format_number(summary['images_per_second'])} (" in output
    folder = tmp_path / "runs" / record["run_id"]
    command = "python -m sdbench benchmark --use_synth_data --image_size 64"
    told = f"\n\nHow fast this machine trains on it: {command}\n\nrecord: {folder}\n"
    assert output.endswith(told)
    assert (folder / "stdout.log").read_text() == output
    assert not (folder / "steps.csv").exists()
    text = format_csv([make_feed_row(record)], columns=FEED_COLUMNS)
    (row,) = csv.DictReader(text.splitlines())
    assert float(row["images_per_second"]) == summary["images_per_second"]


def test_a_dry_run_prints_every_value_as_a_config_file_and_leaves_nothing(tmp_path, capsys):
    argv = [*SMALL, "--num_batches", "20"]
    assert run(tmp_path, *argv, "--dry_run") == (None, 0)
    printed = capsys.readouterr().out
    assert "num_batches: 20  # flag\n" in printed
    assert re.search(r"^num_workers: \d+  # chosen: the cores$", printed, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "feed.yaml").write_text(printed)
    assert run(tmp_path, "--config", str(tmp_path / "feed.yaml"), "--dry_run") == (None, 0)
    values = [line.split("  #")[0] for line in printed.splitlines()]
    assert [line.split("  #")[0] for line in capsys.readouterr().out.splitlines()] == values
    # All checks are made.
    assert run(tmp_path, *argv, "--num_warmup_batches", "0", "--num_workers", "2", "--dry_run") == (
        None,
        2,
    )


def test_no_is_an_answer_for_synthetic_data_by_default(tmp_path, capsys):
    argv = (*SMALL[1:], "--num_workers", "0", "--num_batches", "2")
    record, exit_code = run(tmp_path, *argv, "--target_images_per_second", "1e12")
    assert exit_code == 0
    validate(record)
    output = capsys.readouterr().out
    assert "No --remote, --local or --streams: measuring synthetic data." in output
    assert re.search(r"images/s\? +no\. It takes \d+ worker", output)


def test_a_source_that_is_named_is_not_said_to_be_missing(tmp_path, capsys):
    write_folder(tmp_path / "pictures")
    argv = ("--remote", tmp_path / "pictures", *SMALL[1:], "--num_workers", "0")
    record, exit_code = run(tmp_path, *map(str, argv), "--num_batches", "2")
    assert (exit_code, record["config"]["data_format"]) == (0, "folder")
    assert "synthetic" not in capsys.readouterr().out


def test_a_clock_that_is_set_back_changes_no_time(tmp_path, monkeypatch):
    now_s = itertools.count(time.time(), -3600)
    monkeypatch.setattr(time, "time", lambda: next(now_s))
    argv = ("--num_workers", "0", "--num_batches", "3", "--emulate_step_seconds", "0.05")
    record, exit_code = run(tmp_path, *SMALL, *argv)
    assert exit_code == 0
    validate(record)
    assert 0.15 <= record["summary"]["window_s"] < record["duration_s"] < 600


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        (
            ["--use_synth_data", "--num_workers", "2", "--num_warmup_batches", "3"],
            "--num_warmup_batches, --num_workers or --prefetch_factor",
            3,
        ),
        (
            ["--use_synth_data", "--emulate_step_seconds", "1", "--target_images_per_second", "2"],
            "--emulate_step_seconds or --target_images_per_second",
            1.0,
        ),
    ],
)
def test_bad_input_exits_with_2_and_leaves_no_record(tmp_path, capsys, argv, flag, value):
    assert run(tmp_path, *argv) == (None, 2)
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == (flag, value)


@pytest.mark.parametrize(
    ("error", "status", "exit_code"),
    [
        (RunError("The data ended early in shard.00001.mds", status="invalid"), "invalid", 1),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_a_run_that_fails_leaves_a_record_that_says_why(
    tmp_path, capsys, monkeypatch, error, status, exit_code
):
    iterate = CheckedLoader.__iter__

    def end_early(loader):
        yield next(iterate(loader))
        raise error

    monkeypatch.setattr(CheckedLoader, "__iter__", end_early)
    record, got = run(tmp_path, *SMALL, "--num_workers", "0")
    assert got == exit_code
    validate(record)
    assert (record["status"], record["summary"]) == (status, None)
    assert record["reason"] == (str(error) or "Ctrl-C")
    captured = capsys.readouterr().err
    assert f"{status}: {record['reason']}" in captured and "record: " in captured


def test_the_data_sets_are_importable_by_name():
    for name in ("StreamingLAIONDataset", "SyntheticImageCaptionDataset"):
        assert getattr(script, name).__name__ == name
    assert not hasattr(script, "NoSuchDataset")
