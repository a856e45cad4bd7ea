"""A run as a row, and files of rows under concurrent writers and faults."""

from __future__ import annotations

import csv
import fcntl
import multiprocessing
import time

from sdbench.record.row import RUN_COLUMNS, append_row, make_row
from tests.report.results_folder import make_gpu_record, make_record


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_flags_power_and_energy_are_columns():
    gpu = {"power_w": 650.0, "energy_j": 40960.0}
    record = make_gpu_record(
        summary__flags=["drift", "noisy"], summary__stability="drift", summary__gpu=gpu
    )
    row = make_row(record)
    assert (row["flags"], row["stability"], row["power_w"]) == ("drift;noisy", "drift", 650.0)
    # 10 measured steps of 2048 images: 40960 J over 20480 images.
    assert row["energy_j_per_image"] == 2.0


def append_often(path, writer):
    for number in range(10):
        append_row(path, make_record(summary__images_per_second=100.0 * writer + number))


def test_rows_of_processes_that_write_at_once_are_whole(tmp_path):
    path, context = tmp_path / "runs.csv", multiprocessing.get_context("fork")
    writers = [context.Process(target=append_often, args=(path, number)) for number in range(1, 9)]
    with path.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for process in writers:
            process.start()
        time.sleep(0.5)
        assert path.read_text() == ""
        fcntl.flock(held, fcntl.LOCK_UN)  # closing does not: the writers have the file, too
    for process in writers:
        process.join()
    assert path.read_text().count("images_per_second,") == 1
    rows = read(path)
    assert all(None not in row and None not in row.values() for row in rows)
    rates = sorted(float(row["images_per_second"]) for row in rows)
    assert rates == [100.0 * writer + number for writer in range(1, 9) for number in range(10)]


def test_a_file_of_an_older_version_is_set_aside_whole(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    old = "source,kind,images_per_second\nan-old-run,measured,1.5\n"
    for number in (1, 2):
        path.write_text(old)
        append_row(path, make_record())
        assert (tmp_path / f"runs.old-{number}.csv").read_text() == old
        assert (
            f"it is now runs.old-{number}.csv, and runs.csv begins anew" in capsys.readouterr().err
        )
    (row,) = read(path)
    assert tuple(row) == RUN_COLUMNS
    assert row["images_per_second"] == str(make_record()["summary"]["images_per_second"])
