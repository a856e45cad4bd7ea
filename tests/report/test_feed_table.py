"""The text, table and publication of runs that load data without a model."""

from __future__ import annotations

import copy
import csv
import json

import pytest

from sdbench.analysis.feed_table import format_feed, make_data_table
from sdbench.analysis.publish import main
from sdbench.measure.hardware import as_dict
from sdbench.record.row import make_feed_row
from sdbench.record.store import load_record
from sdbench.report.tables import to_markdown
from tests.machines import make_cpu_machine, make_machine
from tests.report.results_folder import RESULTS, make_text, write_run
from tests.schemas import validate

PUBLISHED = load_record(min(RESULTS.glob("runs/*_feed-mds-512px")))
INTERVAL = {"low": 198.0, "high": 202.5, "level": 0.95, "kind": "within-run", "num_samples": 20}
MS_PER_IMAGE = {"read": 0.5, "decode": 6.25, "transform": 2.0, "tokenize": 0.25, "collate": 0.5}


def make_record(*, config=None, summary=None, machine=None):
    """The published record of a run that loads MDS, with round figures."""
    record = copy.deepcopy(PUBLISHED)
    record["config"] |= {"remote": "data/pairs", "local": None, "num_workers": 2}
    record["config"] |= {"num_batches": 100, **(config or {})}
    record["duration_s"] = 20.0
    record["machine"] = as_dict(machine or make_cpu_machine())
    record["summary"] |= {
        "images_per_second": 200.0,
        "images_per_second_interval": INTERVAL,
        "images_per_second_per_process": 100.0,
        "images_per_second_per_core": 100.0,
        "megabytes_per_second": 20.0,
        "ms_per_image": MS_PER_IMAGE,
        "num_processes": 2,
        "num_measured_steps": 100,
        "window_s": 16.0,
        "num_images": 3200,
        "num_bad_samples": 1,
        "num_dropped_samples": 12,
        **(summary or {}),
    }
    validate(json.loads(json.dumps(record)))
    return record


def test_a_person_reads_every_figure_with_its_unit():
    assert format_feed(make_record()).splitlines() == [
        "  images/s              200 (198 to 202.5, 95 % within-run)",
        "  images/s per process  100 (2 workers; 2 CPU cores)",
        "  read from storage     20 MB/s, 100 kB per image",
        "  time per image        9.5 ms of a process: read 0.5, decode 6.25, transform 2, "
        "tokenize 0.25, collate 0.5",
        "  samples               3200 delivered, 1 bad; 12 of the data set are left out",
    ]


def test_a_large_rate_has_no_exponent_and_the_trainer_may_load_by_itself():
    summary = {"images_per_second": 123456.0, "images_per_second_interval": None}
    text = format_feed(make_record(config={"num_workers": 0}, summary=summary))
    assert "  images/s              123500 (no interval" in text
    assert "100 (the trainer's own, without workers; 2 CPU cores)" in text


def test_a_person_reads_how_long_the_trainer_waits():
    record = make_record(
        config={"emulate_step_seconds": 0.3},
        summary={"data_wait_percent": 25.0, "window_s": 40.0, "images_per_second_per_core": None},
    )
    assert format_feed(record).splitlines()[:2] == [
        "  images/s of the trainer  200 (198 to 202.5, 95 % within-run)",
        "  it waits for data        25.0 % of the time: 0.1 s for each batch, beside steps of "
        "0.3 s",
    ]


CLOSE = "no, but so close that another run may say otherwise"


@pytest.mark.parametrize(
    ("target", "num_needed", "verdict", "workers", "cores"),
    [
        (150, 2, "yes", "2 workers", "2"),
        (100, 1, "yes", "1 worker", "2"),
        (800, 8, "no", "8 workers", "only 2"),
        (201, 3, CLOSE, "3 workers", "only 2"),
    ],
)
def test_a_person_reads_whether_it_is_enough(target, num_needed, verdict, workers, cores):
    record = make_record(
        config={"target_images_per_second": target}, summary={"num_workers_for_target": num_needed}
    )
    name, _, rest = format_feed(record).splitlines()[-1].partition("images/s?")
    assert name.strip() == str(target)
    assert rest.strip() == (
        f"{verdict}. It takes {workers} of 100 images/s, if each has a CPU core of its own; "
        f"this machine has {cores}"
    )


def test_a_gpu_is_not_what_loads():
    feed = make_record(machine=make_machine(cpu_name="Xeon"))
    rows = map(make_feed_row, [feed, {**feed, "kind": "precompute"}])
    assert [row["device"] for row in rows] == ["Xeon", "NVIDIA H100 80GB HBM3"]


def test_runs_of_one_configuration_become_one_line():
    rates = (50.0, 100.0, 200.0)
    records = [make_record(summary={"images_per_second": rate}) for rate in rates]
    emulated = make_record(
        config={"emulate_step_seconds": 0.3},
        summary={"data_wait_percent": 25.0, "images_per_second_per_core": None},
    )
    encoded = make_record()
    encoded["kind"] = "precompute"
    for name in ("ms_per_image", "megabytes_per_second", "images_per_second_per_core"):
        del encoded["summary"][name]
    table = make_data_table([*records, emulated, encoded])
    first, second, third = to_markdown(table).splitlines()[2:]
    # Logs have sd 0.693147: 100 x exp(+-4.302653 x 0.693147 / sqrt(3)) = 17.87 and 559.5.
    assert first == (
        "| CPU | 2 | feed | data/pairs | mds | images | 512 | 32 | 2 | - | 3 "
        "| median 100 (17.87 to 559.5, between-runs) | 100 | 20 | 0.5, 6.25, 2, 0.25, 0.5 | - |"
    )
    assert "| 0.3 | 1 | 200 (198 to 202.5, 95 % within-run) | - | 20 |" in second
    assert second.endswith("| 25 % |")
    assert third.endswith("| 200 (198 to 202.5, 95 % within-run) | - | - | - | - |")


def test_publishing_leaves_the_paths_of_the_machine_behind(tmp_path, capsys):
    place, other = "/" + "somewhere/my pairs", "/" + "elsewhere/a"
    config = {
        "local": place,
        "remote": None,
        "streams": f"s3://bucket/b=1,{other}=2",
        "results_dir": str(tmp_path / "runs"),
    }
    record = make_record(config=config)
    record["command"] = ["data.py", place]
    run = write_run(tmp_path / "runs" / record["run_id"], record)
    (run / "stdout.log").write_text(f"Reading {other} and {place}\nrecord: {run}\n")
    results = tmp_path / "results"
    results.mkdir()
    make_text(results)

    assert main([str(run), "--folder", str(results)]) == 0
    copied = results / "runs" / record["run_id"]
    assert sorted(path.name for path in copied.iterdir()) == ["record.json", "stdout.log"]
    published = json.loads((copied / "record.json").read_text())
    validate(published)
    assert published["command"] == ["data.py", "<local>"]
    assert published["config"]["local"] == "<local>"
    assert published["config"]["streams"] == "s3://bucket/b=1,<streams>=2"
    log = (copied / "stdout.log").read_text()
    assert log == f"Reading <streams> and <local>\nrecord: <results_dir>/{record['run_id']}\n"

    (row,) = csv.DictReader((results / "data.csv").read_text().splitlines())
    assert row["source"] == record["run_id"]
    assert (results / "throughput.csv").read_text().count("\n") == 1
    assert (results / "README.md").read_text().count("| CPU | 2 | feed |") == 1
    assert "published" in capsys.readouterr().out
