"""Times of training runs against the number of workers: Ray's table, and runs beside it."""

from __future__ import annotations

import copy

from sdbench.analysis.quoted import load_figures
from sdbench.analysis.training_times import collect, make_time_table
from sdbench.record.store import load_record
from tests.report.results_folder import RESULTS, rows_of

PUBLISHED = load_record(min(RESULTS.glob("runs/*_small-128px-fast-dreambooth")))


def run_of(number: int, duration_s: float, *, rate: float = 1.0, **settings: object) -> dict:
    """A published run of train.py with another number of ranks, time and rate."""
    record = copy.deepcopy(PUBLISHED)
    record["ranks"]["world_size"], record["duration_s"] = number, duration_s
    record["summary"]["images_per_second"] = rate
    record["config"].update(batch_size=2 * number, **settings)
    return record


def test_the_seeds_table_and_ours_beside_it() -> None:
    quoted = load_figures(RESULTS / "quoted")[0]["ray_dreambooth_l4"]
    resumed = run_of(4, 1.0)
    resumed["summary"]["num_restarts"] = 1
    failed = {**run_of(4, 1.0), "status": "failed"}
    runs = [run_of(2, 60.0), run_of(1, 90.0, rate=0.5), run_of(1, 100.0), run_of(1, 110.0)]
    collected = collect([*runs, run_of(1, 70.0, lr=0.5), resumed, failed], quoted, folder="mine")
    rows = rows_of(make_time_table(collected))
    columns = ("workers", "runs", "time of the run, s", "speed-up", "efficiency, %")
    # Logs of 90, 100, 110 have mean 4.60182 and sd 0.10038: exp(4.60182 +- 4.302653 x 0.05795).
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("1", "3", "802.14", "1", "100"),
        ("2", "3", "487.82", "1.64", "82.2"),
        ("4", "3", "313.25", "2.56", "64"),
        ("1", "3", "median 100 (77.67 to 127.9, between-runs)", "1", "100"),
        ("2", "1", "60", "1.67", "83.3"),
        ("1", "1", "70", "1", "100"),
    ]
    assert {row["pictures seen"] for row in rows[3:]} == {"1600"}
    assert rows[3]["images/s while it trains"] == "1"  # the median of 0.5, 1 and 1


def test_without_runs_and_figures_there_is_nothing_to_show() -> None:
    assert make_time_table(collect([], [], folder="mine")) is None
