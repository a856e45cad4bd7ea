"""What the step law cannot know: intervals against planted steps, and figures that are refused."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from sdbench.cli import main
from sdbench.measure.phases import PHASES
from sdbench.scaling.points import TableFlags, make_points, read_rows
from sdbench.statistics.law import (
    COMMUNICATION,
    LATENCY,
    MICRO_BATCH,
    OVERHEAD,
    OVERHEAD_WITH_COMMUNICATION,
    Point,
    Setup,
    fit_law,
)
from tests.refusals import refusal_of
from tests.report.results_folder import make_gpu_record

HEADER = "gpu,num_gpus,micro_batch,global_batch,images_per_second"
WITH_COMMUNICATION = f"{HEADER},gradient_communication_s"


def work_s(setup, micro_batch_s, overhead_s):
    return setup.num_micro_batches * micro_batch_s + overhead_s


def step_s(setup, micro_batch_s, overhead_s, communication_s, cover_s=0.0, latency_s=0.0):
    """Seconds of a step whose communication hides behind so much of the last micro-batch."""
    num_nodes = math.ceil(setup.num_gpus / 8)
    exposed_s = max(0.0, communication_s * (1 - 1 / num_nodes) - cover_s)
    waited_s = exposed_s + latency_s * (setup.num_gpus - 1)
    return work_s(setup, micro_batch_s, overhead_s) + waited_s


def strong(num_gpus):
    return Setup(num_gpus, 2048 // num_gpus, 4)


def weak(num_gpus):
    return Setup(num_gpus, 32, 4)


def point_of(setup, seconds):
    return Point(setup, setup.images_per_step / seconds)


def holds(prediction, rate) -> bool:
    low, high = prediction.images_per_second_low, prediction.images_per_second_high
    return (low or 0.0) <= rate <= (high or math.inf)


@pytest.fixture
def table(tmp_path):
    def write(*rows, header=HEADER):
        path = tmp_path / "table.csv"
        path.write_text("\n".join((header, *rows)))
        return path

    return write


# What the points do not tell.


@pytest.fixture
def one_batch():
    """A law of 0.2, 0.3 and 0.4 s on 8 to 256 GPUs that share one batch evenly.

    With n nodes there are 64 / n micro-batches, so that a communication of 0.4 x (1 - 1 / n) cannot
    be told from 0.4 of overhead less 0.4 / 64 of each micro-batch: 0.19375 and 0.7 s.
    """
    setups = [strong(num_gpus) for num_gpus in (8, 16, 32, 64, 128, 256)]
    return fit_law([point_of(setup, step_s(setup, 0.2, 0.3, 0.4)) for setup in setups])


def test_an_overhead_that_may_be_communication_is_called_so(one_batch):
    assert one_batch.terms == (MICRO_BATCH, OVERHEAD_WITH_COMMUNICATION)
    assert one_batch.seconds == pytest.approx((0.19375, 0.7))
    # At most all of the 0.7 s is communication: 0.7 / 64 more in a micro-batch. At least none is.
    assert one_batch.constant(MICRO_BATCH)[1:] == pytest.approx((0.19375, 0.2046875), rel=1e-3)
    # On 32 nodes a communication of 0.7 s takes 0.7 x 31 / 32 = 0.678125.
    ends = one_batch.constant(OVERHEAD_WITH_COMMUNICATION)[1:]
    assert ends == pytest.approx((0.678125, 0.7), rel=1e-3)


def test_another_division_of_the_step_is_extrapolated_and_its_interval_holds_both_ends(one_batch):
    # 8 micro-batches on one node take 8 x 0.2 + 0.3 = 1.9 s. The law says 8 x 0.19375 + 0.7 = 2.25,
    # and without any overhead but communication it would be 8 x 0.2046875 = 1.6375.
    prediction = one_batch.predict(Setup(8, 32, 4))
    assert prediction.step_time_s == pytest.approx(2.25)
    assert prediction.images_per_second_low == pytest.approx(256 / 2.25, rel=1e-3)
    assert prediction.images_per_second_high == pytest.approx(256 / 1.6375, rel=1e-3)
    assert prediction.is_extrapolated
    assert not any(one_batch.predict(point.setup).is_extrapolated for point in one_batch.points)


def test_one_node_says_nothing_of_several():
    setups = [Setup(num_gpus, 32 // num_gpus, 4) for num_gpus in (1, 2, 4, 8)]
    law = fit_law([point_of(setup, step_s(setup, 0.2, 0.3, 0.0)) for setup in setups])
    assert OVERHEAD in law.terms
    prediction = law.predict(Setup(64, 4, 4))
    assert prediction.is_extrapolated
    assert prediction.images_per_second_low is None


def test_a_last_micro_batch_of_one_image_may_be_cheaper_where_none_was_measured(one_batch):
    # 2 micro-batches of 4 and 1: as much as two of 4, or a quarter of it less for the last.
    prediction = one_batch.predict(Setup(256, 5, 4))
    assert prediction.step_time_s == pytest.approx(2 * 0.19375 + 0.7)
    assert prediction.images_per_second_high >= 256 * 5 / (1.25 * 0.19375 + 0.7) * 0.999
    assert prediction.is_extrapolated


# Intervals.


@pytest.mark.parametrize(
    ("setup_of", "cover", "latency_s"),
    [
        pytest.param(strong, 0.0, 0.0, id="strong", marks=pytest.mark.slow),
        pytest.param(weak, 0.0, 0.0, id="weak"),
        pytest.param(strong, 1.0, 0.0, id="hidden communication"),
        pytest.param(strong, 0.0, 1e-3, id="latency of ranks", marks=pytest.mark.slow),
    ],
)
def test_intervals_hold_the_truth_of_four_kinds_of_steps(setup_of, cover, latency_s):
    random = np.random.default_rng(20)
    held = {num_gpus: [] for num_gpus in (64, 48, 256, 512)}
    widths = []
    for _ in range(40):
        micro_batch_s = random.uniform(0.1, 0.3)
        constants = (
            *(micro_batch_s, random.uniform(0.1, 0.4), random.uniform(0.1, 0.5)),
            *(cover * random.uniform(0.2, 1) * micro_batch_s, latency_s * random.uniform(0.1, 1)),
        )

        def figure(num_gpus, constants=constants):
            setup = setup_of(num_gpus)
            noise = math.exp(0.01 * random.standard_normal())
            return point_of(setup, step_s(setup, *constants) * noise)

        law = fit_law([figure(num_gpus) for num_gpus in (8, 16, 32, 64, 96, 128)])
        for num_gpus, found in held.items():
            prediction = law.predict(setup_of(num_gpus))
            found.append(holds(prediction, figure(num_gpus).images_per_second))
            assert prediction.is_extrapolated == (num_gpus > 128)
        prediction = law.predict(setup_of(64))
        low, high = prediction.images_per_second_low, prediction.images_per_second_high
        widths.append((high - low) / prediction.images_per_second)
    assert np.mean(list(held.values())) >= 0.93
    # A figure of 1 % cannot be known better than to 4 %; an interval without an end is no use.
    assert 0.04 < np.median(widths) < 0.2


def test_the_chart_of_aws_holds_the_machines_beyond_those_that_were_fitted(quoted):
    points = make_points(read_rows(TableFlags(tables=(quoted / "aws_p5_scaling.csv",))))
    law = fit_law([point for point in points if point.setup.num_gpus <= 128])
    beyond = [point for point in points if point.setup.num_gpus > 128]
    # The table of results/scaling.md.
    printed = {
        192: (2721, 2416, 2930),
        256: (3732, 2960, 4119),
        320: (3499, 2545, 3972),
        384: (3499, 2353, 4087),
        448: (4573, 2516, 5449),
        512: (5226, 2649, 6268),
    }
    assert [point.setup.num_gpus for point in beyond] == list(printed)
    for point in beyond:
        prediction = law.predict(point.setup)
        assert prediction.is_extrapolated
        assert holds(prediction, point.images_per_second)
        ends = (prediction.images_per_second_low, prediction.images_per_second_high)
        found = (prediction.images_per_second, *ends)
        assert found == pytest.approx(printed[point.setup.num_gpus], rel=1e-3)


# Communication by itself.


def test_seconds_of_communication_tell_what_hides_and_what_grows_with_ranks(table, rows_of, capsys):
    # 0.15 of 0.3 s hide: nothing is to be seen on 2 nodes, and 0.3 x (63 / 64 - 0.5) on 64.
    constants = (0.2, 0.3, 0.3, 0.15, 1e-4)
    rows = []
    for num_gpus in (8, 16, 32, 64, 128):
        setup = strong(num_gpus)
        seconds = step_s(setup, *constants)
        waited_s = seconds - work_s(setup, 0.2, 0.3)
        rows.append(f"H100,{num_gpus},4,2048,{2048 / seconds!r},{waited_s!r}")
    path = table(*rows, header=WITH_COMMUNICATION)
    law = fit_law(make_points(read_rows(TableFlags(tables=(path,)))))
    assert law.terms == (MICRO_BATCH, OVERHEAD, COMMUNICATION, LATENCY)
    assert law.seconds == pytest.approx((0.2, 0.3, 0.3, 1e-4), rel=1e-4)
    assert law.hidden_share == 0.5
    (row,) = rows_of("predict", path, "--num_gpus", "512")
    # 0.2 + 0.3 + 0.3 x (63 / 64 - 0.5) + 511e-4
    assert row["step_time_s"] == pytest.approx(0.6964125, rel=1e-4)
    assert main(["scaling", "fit", str(path)]) == 0
    assert "about 50 % of the communication hides" in capsys.readouterr().out


def test_seconds_of_communication_narrow_an_extrapolation():
    random = np.random.default_rng(21)
    held, widths = [], {True: [], False: []}
    for _ in range(30):
        constants = (0.2, 0.3, random.uniform(0.2, 0.5), 0.1, random.uniform(1e-4, 1e-3))
        points = []
        for num_gpus in (8, 16, 32, 64, 96, 128):
            setup, noise = strong(num_gpus), math.exp(0.01 * random.standard_normal())
            seconds = step_s(setup, *constants)
            waited_s = seconds - work_s(setup, 0.2, 0.3)
            waited_s *= math.exp(0.01 * random.standard_normal())
            points.append(Point(setup, setup.images_per_step / (seconds * noise), waited_s))
        plain = [dataclasses.replace(point, communication_s=None) for point in points]
        for is_known, figures in ((True, points), (False, plain)):
            prediction = fit_law(figures).predict(strong(256))
            low, high = prediction.images_per_second_low, prediction.images_per_second_high
            widths[is_known].append((high - low) / prediction.images_per_second)
            if is_known:
                held.append(holds(prediction, 2048 / step_s(strong(256), *constants)))
    assert np.mean(held) >= 0.93
    assert np.median(widths[True]) < 0.6 * np.median(widths[False])


def test_runs_bring_the_seconds_that_they_wait_for_gradients(tmp_path):
    folders = []
    for number, (num_gpus, seconds, waited_s) in enumerate(
        [(8, 13.3, 0.1), (16, 7.1, 0.3), (32, 4.0, 0.4), (64, 2.4, 0.45)]
    ):
        # The clock of the phases made the step twice as long.
        parts = {"backward": 2 * (seconds - waited_s), "gradient_communication": 2 * waited_s}
        record = make_gpu_record(
            run_id=f"20261123T00000{number}Z_h200_fast",
            ranks__world_size=num_gpus,
            config__device_train_microbatch_size=4,
            summary__images_per_second=2048 / seconds,
            summary__breakdown={
                **{"num_steps": 2, "step_time_s": 2 * seconds},
                "seconds": {**dict.fromkeys(PHASES, 0.0), **parts},
            },
        )
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        (folders[-1] / "record.json").write_text(json.dumps(record))
    points = make_points(read_rows(TableFlags(tables=tuple(folders))))
    assert [point.setup.num_gpus for point in points] == [8, 16, 32, 64]
    assert [point.communication_s for point in points] == pytest.approx([0.1, 0.3, 0.4, 0.45])


# What is refused, or warned of.


def test_a_run_that_trains_nothing_is_refused(repository):
    (run, *_) = sorted((repository / "results" / "runs").glob("*_feed-mds-512px"))
    error = refusal_of("scaling", "fit", run)
    assert (error.value, error.flag) == (f"{run}: feed", "TABLE")


@pytest.mark.parametrize("micro_batch", ["-4", "0", "3.5", "true"])
def test_a_micro_batch_that_is_none_is_refused(table, micro_batch):
    rows = [f"H100,{num_gpus},{micro_batch},64,{10 * num_gpus}" for num_gpus in (1, 2, 4)]
    error = refusal_of("scaling", "fit", table(*rows))
    assert (error.value, error.flag[:13]) == (micro_batch, "--micro_batch")


def test_half_a_gpu_is_refused(table):
    path = table("H100,8.5,4,64,10", "H100,2,4,64,20", "H100,4,4,64,40")
    assert "'8.5' as num_gpus" in str(refusal_of("scaling", "fit", path))


def test_a_row_that_stands_twice_is_refused(table):
    rows = [f"H100,{num_gpus},4,64,{10 * num_gpus}" for num_gpus in (1, 2, 4)]
    path = table(*rows, rows[1])
    error = refusal_of("scaling", "fit", path)
    assert error.value == "20 images/s of 2 GPUs, without a source"
    path = table(*rows)
    assert refusal_of("scaling", "predict", path, path, "--num_gpus", "8").flag == "TABLE"


def test_figures_that_do_not_follow_the_law_are_warned_of_and_predict_nothing(table, capsys):
    path = table("H100,1,4,64,80", "H100,2,4,64,10", "H100,4,4,64,80", "H100,8,4,64,10")
    assert main(["scaling", "fit", str(path)]) == 0
    assert "warning: these figures do not follow the law" in capsys.readouterr().out
    error = refusal_of("scaling", "predict", path, "--num_gpus", "16")
    assert error.value.startswith("a mean error of ")


def test_steps_without_time_are_refused(table):
    path = table(*(f"H100,{num_gpus},4,64,{num_gpus}e30" for num_gpus in (1, 2, 4, 8)))
    assert refusal_of("scaling", "fit", path).value == "8e-30 s"


def test_communication_as_long_as_the_step_is_refused(table):
    rows = [f"H100,{num_gpus},4,64,{10 * num_gpus},6.4" for num_gpus in (1, 2, 4)]
    path = table(*rows, header=WITH_COMMUNICATION)
    error = refusal_of("scaling", "fit", path)
    assert (error.value, error.flag) == ("6.4", "the column gradient_communication_s")
