"""The band of losses tells recipes that change the training from those that do not."""

from __future__ import annotations

import math

import pytest

from sdbench.analysis.ladder import pure_preset
from sdbench.analysis.loss_band import (
    INSIDE,
    NO_BAND,
    NUM_STEPS,
    OUTSIDE,
    LossRun,
    make_tables,
    read_run,
)
from sdbench.analysis.report import LADDER_PAGE, README, load_losses
from sdbench.cli import main
from tests.refusals import refusal_of, refused
from tests.report.results_folder import RESULTS, make_recipe, make_text, rows_of, write_run

# Five others whose losses lie 0.01, 0.02, 0.03, 0.04 and 0.05 above the reference at every step:
# their standard deviation is sqrt(0.0010 / 4) = 0.0158114, and the band 0.0474342.
OTHERS = (0.01, 0.02, 0.03, 0.04, 0.05)
CURVE = [1.0 / (1 + step) for step in range(NUM_STEPS)]


def make_run(losses, *, preset="seed", weights_seed=17, **settings):
    record = make_recipe(preset=preset, **settings)
    record["config"]["weights_seed"] = weights_seed
    return LossRun(record, losses)


def shifted(by):
    return [loss + by for loss in CURVE]


def with_one_bad_step(by, *, step=31):
    return [loss + (by if number == step else 0.0) for number, loss in enumerate(CURVE)]


def make_band_runs():
    runs = [make_run(CURVE)]
    return runs + [make_run(shifted(by), weights_seed=18 + n) for n, by in enumerate(OTHERS)]


def judge(*recipes):
    (table,) = make_tables([*make_band_runs(), *recipes])
    assert "the band is 3 x 0.01581 = 0.04743 to either side of the reference" in table.caption
    return {row["recipe"]: row for row in rows_of(table) if row["verdict"]}


def test_a_recipe_is_inside_unless_one_step_leaves_the_band():
    found = judge(
        make_run(with_one_bad_step(0.047), precision="amp_bf16"),
        make_run(with_one_bad_step(-0.048), attention="eager"),
        make_run(shifted(0.001), preset="fast"),
        make_run(with_one_bad_step(math.nan, step=7), precision="bf16"),
    )
    assert {name: row["verdict"] for name, row in found.items()} == {
        "--preset seed --precision amp_bf16": INSIDE,
        "--preset seed --attention eager": OUTSIDE,
        "--preset fast": INSIDE,
        "--preset seed --precision bf16": OUTSIDE,
    }
    outside = found["--preset seed --attention eager"]
    # A single bad step is not averaged away.
    names = ("largest deviation", "at step", "mean deviation")
    assert [outside[name] for name in names] == ["0.048", "31", "-0.00096"]
    assert found["--preset seed --precision bf16"]["at step"] == "7"


def test_four_runs_make_no_band():
    (table,) = make_tables([*make_band_runs()[:-1], make_run(CURVE, preset="fast")])
    assert rows_of(table)[-1]["verdict"] == NO_BAND
    assert table.caption.endswith("no band yet, 4 of 5 runs that make it")


def test_runs_on_other_data_or_another_device_are_not_compared():
    drawn_otherwise = make_run(CURVE, preset="fast")
    drawn_otherwise.record["workload"]["drawing"] = 2  # the others are from before
    others = [
        make_run(CURVE, preset="fast", **change)
        for change in ({"image_size": 512}, {"seed": 18}, {"on_gpu": True})
    ]
    assert judge(drawn_otherwise, *others) == {}
    # The engine, the EMA and the preset's name are no other data.
    lean = make_run(CURVE, preset="fast", engine="torch", use_ema=True)
    assert list(judge(lean)) == ["--preset fast"]


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    for name in (README, LADDER_PAGE):
        make_text(folder, name)
    return folder


def test_runs_of_losses_are_published_apart_from_those_of_speed(tmp_path, results):
    record = make_recipe(precision="fp32")
    run = write_run(tmp_path / "run", record, num_steps=NUM_STEPS)
    assert main(["publish", "--numerics", str(run), "--folder", str(results)]) == 0
    published = results / "numerics" / record["run_id"]
    assert {path.name for path in published.iterdir()} == {"record.json", "stdout.log", "steps.csv"}
    assert len((results / "throughput.csv").read_text().splitlines()) == 1
    assert "no band yet, 0 of 5" in (results / "ladder.md").read_text()


def test_a_run_of_too_few_steps_is_not_published_for_its_losses(tmp_path, results):
    run = write_run(tmp_path / "run", make_recipe(precision="fp32"), num_steps=49)
    error = refusal_of("publish", "--numerics", run, "--folder", results)
    assert (error.flag, error.value) == ("--numerics", str(run / "steps.csv"))
    assert not (results / "numerics").exists()
    (run / "steps.csv").write_text("index,loss\n0,much\n")
    with refused("--numerics"):
        read_run(make_recipe(), run)


def test_no_preset_is_outside_the_committed_band():
    runs = load_losses(RESULTS)[0]
    presets = {run.record["run_id"] for run in runs if pure_preset(run.record)}
    rows = [row for table in make_tables(runs) for row in rows_of(table) if row["run"] in presets]
    verdicts = {row["verdict"] for row in rows} - {""}
    assert verdicts == {INSIDE}
