"""The step law against tables of other people, against planted constants, and its predictions."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from sdbench.base.errors import ConfigError
from sdbench.cli import main
from sdbench.measure.phases import PHASES
from sdbench.scaling.points import TableFlags, make_points, read_rows
from sdbench.statistics.law import (
    COMMUNICATION,
    IMAGE,
    LATENCY,
    MICRO_BATCH,
    NODE,
    OVERHEAD,
    OVERHEAD_WITH_COMMUNICATION,
    Point,
    Setup,
    fit_law,
)
from tests.refusals import refusal_of
from tests.report.results_folder import make_gpu_record, write_run

HEADER = "gpu,num_gpus,micro_batch,global_batch,images_per_second"
WITH_COMMUNICATION = f"{HEADER},gradient_communication_s"


@pytest.fixture
def predict(rows_of):
    return lambda table, *arguments: rows_of("predict", table, *arguments)


@pytest.fixture
def table(write_table):
    return functools.partial(write_table, header=HEADER)


def points_of(*paths, where=()):
    return make_points(read_rows(TableFlags(tables=paths, where=where)))


def fit_table(*paths, where=()):
    return fit_law(points_of(*paths, where=where))


def work_s(setup, micro_batch_s, overhead_s=0.0):
    return setup.num_micro_batches * micro_batch_s + overhead_s


def step_s(setup, micro_batch_s, overhead_s=0.0, communication_s=0.0, cover_s=0.0, latency_s=0.0):
    """Seconds of a step whose communication hides behind so much of the last micro-batch."""
    num_nodes = math.ceil(setup.num_gpus / 8)
    exposed_s = max(0.0, communication_s * (1 - 1 / num_nodes) - cover_s)
    waited_s = exposed_s + latency_s * (setup.num_gpus - 1)
    return work_s(setup, micro_batch_s, overhead_s) + waited_s


def point_of(setup, seconds):
    return Point(setup, setup.images_per_step / seconds)


def strong(num_gpus):
    return Setup(num_gpus, 2048 // num_gpus, 4)


def weak(num_gpus):
    return Setup(num_gpus, 32, 4)


def ends_of(prediction):
    _, low, high = prediction.images_per_second
    return np.nan_to_num(low, nan=0.0), np.nan_to_num(high, nan=math.inf)


def holds(prediction, rate) -> bool:
    low, high = ends_of(prediction)
    return low <= rate <= high


def width_of(prediction) -> float:
    low, high = ends_of(prediction)
    return (high - low) / prediction.images_per_second[0]


# Tables of others.


def test_a_run_in_two_tables_counts_once(table):
    begin = f"source,kind,started_utc,{HEADER}"
    row = "run-{0},measured,2026-11-21T05:48:24+00:00,H100,{0},4,64,{1}"
    runs = [row.format(num_gpus, 10 * num_gpus) for num_gpus in (1, 2, 4)]
    one = table(*runs, header=begin, name="one")
    two = table(*runs[1:], row.format(8, 80), header=begin, name="two")
    assert len(fit_table(one, two).points) == 4
    other = table(row.format(2, 21), header=begin, name="other")
    assert refusal_of("scaling", "fit", one, other).value == "run-2: 20 and 21"


def test_the_chart_of_aws_is_fitted_to_three_percent(capsys, quoted):
    # An independent fit of the same 12 points gave 0.160 s and 0.192 s, with a mean error of 2.6 %.
    law = fit_table(quoted / "aws_p5_scaling.csv")
    assert law.terms == (MICRO_BATCH, OVERHEAD_WITH_COMMUNICATION)
    assert law.constant(MICRO_BATCH)[0] == pytest.approx(0.160, abs=0.0015)
    assert law.constant(OVERHEAD_WITH_COMMUNICATION)[0] == pytest.approx(0.192, abs=0.002)
    # Of 2048, 96 GPUs take 21 each: 2016; 192 take 10, 320 take 6 and 384 take 5: 1920; 448 take 4.
    images = {point.setup.num_gpus: point.setup.images_per_step for point in law.points}
    uneven = {96: 2016, 192: 1920, 320: 1920, 384: 1920, 448: 1792}
    assert images == dict.fromkeys((8, 16, 32, 64, 128, 256, 512), 2048) | uneven
    assert main(["scaling", "fit", str(quoted / "aws_p5_scaling.csv")]) == 0
    output = capsys.readouterr().out
    assert "figures: 12, gpu H100-SXM5-80GB (p5.48xlarge), image_size 512" in output
    assert "error of 12 figures: mean 2.58%, max 5.98%" in output
    assert "communication: not told apart" in output
    assert "6 of 4, the last of 1" in output


# Planted constants.


def test_all_four_constants_come_back():
    setups = [
        Setup(num_gpus, device_batch, micro_batch)
        for num_gpus in (8, 16, 64, 256)
        for device_batch in (16, 32, 64)
        for micro_batch in (4, 8)
    ]
    steps = [step_s(setup, 0.08, 0.2 + 0.02 * setup.device_batch, 0.1) for setup in setups]
    law = fit_law(list(map(point_of, setups, steps)))
    assert law.terms == (MICRO_BATCH, IMAGE, OVERHEAD, COMMUNICATION)
    assert law.seconds == pytest.approx((0.08, 0.02, 0.2, 0.1))
    # 512 GPUs, 32 images each: 4 x 0.08 + 32 x 0.02 + 0.2 + 0.1 x 63/64 = 1.2584375 s.
    prediction = law.predict(Setup(512, 32, 8))
    assert prediction.step_time_s == pytest.approx(1.2584375)
    assert prediction.images_per_second[0] == pytest.approx(512 * 32 / 1.2584375)
    assert prediction.is_extrapolated
    assert not law.predict(Setup(128, 32, 6)).is_extrapolated


def test_an_interval_by_hand():
    # Two points of each of two setups, +-1 % around 1.1 s and 2.1 s: t = 1 s and o = 0.1 s but for
    # 0.01 %, and four residuals of 1 % on 2 degrees of freedom: sqrt(4 x 1e-4 / 2) = 0.01414.
    points = [
        point_of(Setup(8, device_batch, 4), seconds * factor)
        for device_batch, seconds in ((4, 1.1), (8, 2.1))
        for factor in (0.99, 1.01)
    ]
    law = fit_law(points)
    assert law.relative_error == pytest.approx(math.sqrt(2) / 100, rel=0.01)
    assert law.degrees_of_freedom == 2
    # At a fitted setup, the law's own doubt is that of a mean of two: 0.01414^2 / 2. A figure there
    # adds its own: 0.01414 x sqrt(1.5) x t(0.975, 2) = 0.01732 x 4.302653 = 0.07452.
    prediction = law.predict(Setup(8, 4, 4))
    rate, low, _ = prediction.images_per_second
    assert rate == pytest.approx(32 / 1.1, rel=0.001)
    assert rate / low == pytest.approx(1.07452, abs=0.001)


def test_a_term_that_is_not_told_or_takes_no_time_is_left_out():
    told_by_none = [weak(num_gpus) for num_gpus in (1, 2, 4, 8)]
    without_time = [Setup(8, size, 4) for size in (4, 8, 16, 32)]
    for setups in (told_by_none, without_time):
        law = fit_law([point_of(setup, step_s(setup, 0.5)) for setup in setups])
        assert law.terms == (MICRO_BATCH,)
        assert law.seconds == pytest.approx((0.5,))
    with pytest.raises(ConfigError) as caught:
        fit_law([point_of(Setup(8, size, 4), 1.0) for size in (4, 8)])
    assert caught.value.value == 2


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
    assert ends_of(prediction) == pytest.approx((256 / 2.25, 256 / 1.6375), rel=1e-3)
    assert prediction.is_extrapolated
    assert not any(one_batch.predict(point.setup).is_extrapolated for point in one_batch.points)
    # 2 micro-batches of 4 and 1: as much as two of 4, or a quarter of it less for the last.
    prediction = one_batch.predict(Setup(256, 5, 4))
    assert prediction.step_time_s == pytest.approx(2 * 0.19375 + 0.7)
    assert prediction.images_per_second[2] >= 256 * 5 / (1.25 * 0.19375 + 0.7) * 0.999
    assert prediction.is_extrapolated


def test_one_node_says_nothing_of_several():
    setups = [Setup(num_gpus, 32 // num_gpus, 4) for num_gpus in (1, 2, 4, 8)]
    law = fit_law([point_of(setup, step_s(setup, 0.2, 0.3)) for setup in setups])
    assert OVERHEAD in law.terms
    prediction = law.predict(Setup(64, 4, 4))
    assert prediction.is_extrapolated
    assert math.isnan(prediction.images_per_second[1])


# Intervals.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup_of", "cover", "latency_s"),
    [
        pytest.param(strong, 0.0, 0.0, id="strong"),
        pytest.param(weak, 0.0, 0.0, id="weak"),
        pytest.param(strong, 1.0, 0.0, id="hidden communication"),
        pytest.param(strong, 0.0, 1e-3, id="latency of ranks"),
    ],
)
def test_intervals_hold_the_truth_of_four_kinds_of_steps(setup_of, cover, latency_s):
    random = np.random.default_rng(20)
    held, widths = [], []
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
        for num_gpus in (64, 48, 256, 512):
            prediction = law.predict(setup_of(num_gpus))
            held.append(holds(prediction, figure(num_gpus).images_per_second))
            assert prediction.is_extrapolated == (num_gpus > 128)
        widths.append(width_of(law.predict(setup_of(64))))
    assert np.mean(held) >= 0.93
    # A figure of 1 % cannot be known better than to 4 %; an interval without an end is no use.
    assert 0.04 < np.median(widths) < 0.2


def test_the_chart_of_aws_holds_the_machines_beyond_those_that_were_fitted(quoted):
    points = points_of(quoted / "aws_p5_scaling.csv")
    law = fit_law([point for point in points if point.setup.num_gpus <= 128])
    # The table of results/scaling.md.
    printed = {
        192: (2721, 2416, 2930),
        256: (3732, 2960, 4119),
        320: (3499, 2545, 3972),
        384: (3499, 2353, 4087),
        448: (4573, 2516, 5449),
        512: (5226, 2649, 6268),
    }
    beyond = {point.setup.num_gpus: point for point in points if point.setup.num_gpus > 128}
    assert list(beyond) == list(printed)
    for num_gpus, point in beyond.items():
        prediction = law.predict(point.setup)
        assert prediction.is_extrapolated
        assert holds(prediction, point.images_per_second)
        found = (prediction.images_per_second[0], *ends_of(prediction))
        assert found == pytest.approx(printed[num_gpus], rel=1e-3)


# Communication by itself.


def test_seconds_of_communication_tell_what_hides_and_what_grows_with_ranks(table, predict, capsys):
    # 0.15 of 0.3 s hide: nothing is to be seen on 2 nodes, and 0.3 x (63 / 64 - 0.5) on 64.
    rows = []
    for num_gpus in (8, 16, 32, 64, 128):
        seconds = step_s(strong(num_gpus), 0.2, 0.3, 0.3, 0.15, 1e-4)
        waited_s = seconds - work_s(strong(num_gpus), 0.2, 0.3)
        rows.append(f"H100,{num_gpus},4,2048,{2048 / seconds!r},{waited_s!r}")
    path = table(*rows, header=WITH_COMMUNICATION)
    law = fit_table(path)
    assert law.terms == (MICRO_BATCH, OVERHEAD, COMMUNICATION, LATENCY)
    assert law.seconds == pytest.approx((0.2, 0.3, 0.3, 1e-4), rel=1e-4)
    assert law.hidden_share == 0.5
    (row,) = predict(path, "--num_gpus", "512")
    # 0.2 + 0.3 + 0.3 x (63 / 64 - 0.5) + 511e-4
    assert row["step_time_s"] == pytest.approx(0.6964125, rel=1e-4)
    assert "about 50 % of the communication hides" in capsys.readouterr().out


def test_communication_within_a_node_has_a_constant_of_its_own():
    points = []
    for num_gpus in (1, 2, 4, 8):
        for device_batch in (16, 32):
            setup, waited_s = Setup(num_gpus, device_batch, 4), 0.4 * (1 - 1 / num_gpus)
            seconds = work_s(setup, 0.2, 0.3) + waited_s
            points.append(Point(setup, setup.images_per_step / seconds, waited_s))
    law = fit_law(points)
    assert law.terms == (MICRO_BATCH, OVERHEAD, NODE)
    assert law.seconds == pytest.approx((0.2, 0.3, 0.4))


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
        folders.append(write_run(tmp_path / str(number), record))
    points = points_of(*folders)
    assert [point.setup.num_gpus for point in points] == [8, 16, 32, 64]
    assert [point.communication_s for point in points] == pytest.approx([0.1, 0.3, 0.4, 0.45])


# Predictions.


def test_the_plateau_of_the_chart_is_predicted(capsys, quoted, predict, tmp_path):
    rows = predict(quoted / "aws_p5_scaling.csv", "--num_gpus", "256,320,...,384")
    assert capsys.readouterr().out.count("1920 of 2048 images in a step") == 2
    # 8 images on a GPU are 4 + 4, 6 are 4 + 2 and 5 are 4 + 1: the same time for 2048, 1920, 1920.
    names = ("num_micro_batches", "last_micro_batch", "images_per_step")
    found = [[row[name] for name in names] for row in rows]
    assert found == [[2, 4, 2048], [2, 2, 1920], [2, 1, 1920]]
    rates = [row["images_per_second"] for row in rows]
    assert rates[1] == rates[2] == pytest.approx(rates[0] * 1920 / 2048)
    assert rates[0] == pytest.approx(4003.5, abs=0.1)  # the chart says 4076, 3939 and 3992
    # The law at 8 GPUs gives 197.58, which the first row asked for does not hide: 4003.5 / 197.58.
    assert rows[0]["speed_up"] == pytest.approx(20.26, abs=0.01)
    assert rows[0]["efficiency_percent"] == pytest.approx(100 * 20.26 / 32, abs=0.1)
    for row, chart in zip(rows, (4076, 3939, 3992), strict=True):
        assert row["images_per_second_low"] < chart < row["images_per_second_high"]
    # Predictions are no evidence for another fit.
    assert refusal_of("scaling", "fit", tmp_path / "out.csv").value == 0


def test_weak_scaling_keeps_the_time_of_a_step(quoted, predict):
    flags = ("--num_gpus", "8,16,...,512", "--device_batch", "32")
    rows = predict(quoted / "aws_p5_scaling.csv", *flags)
    assert [row["num_gpus"] for row in rows] == [8, 16, 32, 64, 128, 256, 512]
    assert all(
        row["global_batch"] == row["images_per_step"] == 32 * row["num_gpus"] for row in rows
    )
    # 32 images on a GPU were measured on 64 GPUs alone.
    assert [row["extrapolated"] for row in rows] == [row["num_gpus"] != 64 for row in rows]
    first, *_, last = rows
    assert last["images_per_second"] == pytest.approx(64 * first["images_per_second"])
    assert (last["speed_up"], last["efficiency_percent"]) == pytest.approx((64, 100))
    assert last["kind"] == "modelled"
    assert last["source"].startswith("step law fitted to aws_p5_scaling.csv (AWS")


# What is refused, or warned of.


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("fit {aws_p4de_p5_single_node} --where gpu=H100", "--where ema=..."),
        ("fit {mosaicml_diffusion_a100}", "--where image_size=..."),
        ("fit", "TABLE and --where"),
        ("fit {mlperf_training_sd2} --where gpu=H200", "--micro_batch, for rows without one"),
        ("fit {mosaicml_diffusion_a100_cost}", "the path given"),
        (
            "predict {aws_p4de_p5_single_node} --num_gpus 8 --where gpu=H100 ema=true",
            "--micro_batch",
        ),
        ("predict {aws_p5_scaling} --num_gpus 8,...,64", "--num_gpus"),
        ("predict {aws_p5_scaling} --num_gpus 16,8,...,64", "--num_gpus"),
        ("predict {aws_p5_scaling} --num_gpus 1,2,3,...,2000000000", "--num_gpus"),
        ("predict {aws_p5_scaling} --num_gpus 0", "--num_gpus"),
        ("predict {aws_p5_scaling} --num_gpus 4096", "--num_gpus and --global_batch"),
        ("predict {aws_p5_scaling} --num_gpus 8 --micro_batch 8", "--micro_batch"),
        (
            "predict {aws_p5_scaling} --num_gpus=8 --device_batch=8 --global_batch=8",
            "--global_batch or --device_batch",
        ),
        ("predict {aws_p5_scaling} --num_gpus 8 --out no/such/folder", "--out"),
    ],
)
def test_what_cannot_be_fitted_or_predicted_is_refused(quoted, arguments, flag):
    paths = {path.stem: path for path in quoted.glob("*.csv")}
    error = refusal_of("scaling", *(word.format(**paths) for word in arguments.split()))
    assert error.flag.startswith(flag)


@pytest.mark.parametrize(
    ("rows", "flag", "value"),
    [
        (["1,-4,64,10", "2,4,64,20"], "--micro_batch", "-4"),
        (["1,true,64,10", "2,4,64,20"], "--micro_batch", "true"),
        (["1,4,,10", "2,4,64,20"], "the column global_batch", ""),
        (["2,4,64,20", "2,4,64,20"], "TABLE", "2 rows, 1 of them different"),
        (["1,4,64,1e30", "2,4,64,2e30", "4,4,64,4e30", "8,4,64,8e30"], "the columns", "8e-30 s"),
        (["1,4,64,10,6.4", "2,4,64,20,1"], "the column gradient_communication_s", "6.4"),
        (["1,4,64,10,-1", "2,4,64,20,1"], "the column gradient_communication_s", "-1"),
        (["2,4,66,20", "4,4,66,40"], "the column images_per_step", "images_per_step 66 on 4 GPUs"),
    ],
)
def test_figures_that_no_step_has_are_refused(table, rows, flag, value):
    header = WITH_COMMUNICATION if rows[0].count(",") == 4 else HEADER
    if "images_per_step" in flag:
        header = header.replace("global_batch", "images_per_step")
    error = refusal_of("scaling", "fit", table(*(f"H100,{row}" for row in rows), header=header))
    assert error.flag.startswith(flag)
    assert error.value == value


def test_half_a_gpu_and_a_run_that_trains_nothing_are_refused(table, repository):
    path = table("H100,8.5,4,64,10", "H100,2,4,64,20", "H100,4,4,64,40")
    assert "'8.5' as num_gpus" in str(refusal_of("scaling", "fit", path))
    (run, *_) = sorted((repository / "results" / "runs").glob("*_feed-mds-512px"))
    error = refusal_of("scaling", "fit", run)
    assert (error.value, error.flag) == (f"{run}: feed", "TABLE")


def test_figures_that_do_not_follow_the_law_are_warned_of_and_predict_nothing(table, capsys):
    path = table("H100,1,4,64,80", "H100,2,4,64,10", "H100,4,4,64,80", "H100,8,4,64,10")
    assert main(["scaling", "fit", str(path)]) == 0
    assert "warning: these figures do not follow the law" in capsys.readouterr().out
    error = refusal_of("scaling", "predict", path, "--num_gpus", "16")
    assert error.value.startswith("a mean error of ")
