"""The step law against tables of other people, against planted constants, and its predictions."""

from __future__ import annotations

import csv
import math

import pytest

from sdbench.base.errors import ConfigError
from sdbench.cli import main
from sdbench.scaling.points import TableFlags, make_points, parse_counts, read_rows
from sdbench.statistics.law import (
    COMMUNICATION,
    IMAGE,
    MICRO_BATCH,
    OVERHEAD,
    OVERHEAD_WITH_COMMUNICATION,
    Point,
    Setup,
    fit_law,
)
from tests.refusals import refusal_of

COLUMNS = ("source", "gpu", "num_gpus", "micro_batch", "global_batch", "images_per_second")
NO_SIZE = "no --micro_batch"
GPUS = "A100-SXM4-80GB (p4de.24xlarge) and H100-SXM5-80GB (p5.48xlarge)"


@pytest.fixture
def predict(rows_of):
    return lambda table, *arguments: rows_of("predict", table, *arguments)


def fit_table(*paths, where=()):
    return fit_law(make_points(read_rows(TableFlags(tables=paths, where=where))))


def test_a_run_in_two_tables_counts_once(tmp_path):
    begin = "source,kind,started_utc,gpu,num_gpus,micro_batch,global_batch,images_per_second\n"
    row = "run-{0},measured,2026-11-21T05:48:24+00:00,H100,{0},4,64,{1}\n"
    runs = [row.format(num_gpus, 10 * num_gpus) for num_gpus in (1, 2, 4)]
    one, two, other = (tmp_path / f"{name}.csv" for name in ("one", "two", "other"))
    one.write_text(begin + "".join(runs))
    two.write_text(begin + "".join(runs[1:]) + row.format(8, 80))
    assert len(fit_table(one, two).points) == 4
    other.write_text(begin + row.format(2, 21))
    assert refusal_of("scaling", "fit", one, other).value == "run-2: 20 and 21"


# Tables of others.


def test_the_chart_of_aws_is_fitted_to_three_percent(capsys, quoted):
    # An independent fit of the same 12 points gave 0.160 s and 0.192 s, with a mean error of 2.6 %.
    law = fit_table(quoted / "aws_p5_scaling.csv")
    assert law.terms == (MICRO_BATCH, OVERHEAD_WITH_COMMUNICATION)
    assert law.constant(MICRO_BATCH)[0] == pytest.approx(0.160, abs=0.0015)
    assert law.constant(OVERHEAD_WITH_COMMUNICATION)[0] == pytest.approx(0.192, abs=0.002)
    assert law.mean_error == pytest.approx(0.0258, abs=0.0001)
    assert any(COMMUNICATION in note for note in law.notes)
    # Of 2048, 96 GPUs take 21 each: 2016; 192 take 10, 320 take 6 and 384 take 5: 1920; 448 take 4.
    images = {point.setup.num_gpus: point.setup.images_per_step for point in law.points}
    uneven = {96: 2016, 192: 1920, 320: 1920, 384: 1920, 448: 1792}
    assert images == dict.fromkeys((8, 16, 32, 64, 128, 256, 512), 2048) | uneven
    assert main(["scaling", "fit", str(quoted / "aws_p5_scaling.csv")]) == 0
    output = capsys.readouterr().out
    assert "figures: 12, gpu H100-SXM5-80GB (p5.48xlarge), image_size 512" in output
    assert "error of 12 figures: mean 2.58%, max 5.98%" in output
    assert "6 of 4, the last of 1" in output


def test_mosaicmls_tables_are_fitted_to_one_percent(quoted):
    # An independent fit gave 0.2437 s and 0.2999 s for the benchmark.
    law = fit_table(quoted / "mosaicml_diffusion_benchmark_a100.csv")
    assert law.constant(MICRO_BATCH)[0] == pytest.approx(0.2437, abs=5e-5)
    assert law.constant(OVERHEAD_WITH_COMMUNICATION)[0] == pytest.approx(0.2999, abs=5e-5)
    assert law.mean_error == pytest.approx(0.0045, abs=0.0001)
    precomputed = fit_table(quoted / "mosaicml_diffusion_a100.csv", where=["image_size=512"])
    assert precomputed.mean_error < 0.01


def test_several_micro_batches_tell_the_time_of_an_image(quoted):
    # An independent fit of seed 003's P4de table gave 77 ms for each micro-batch and 35.5 ms for
    # each image, to 0.5 %.
    law = fit_table(quoted / "aws_p4de_p5_single_node.csv", where=["gpu=A100", "ema=true"])
    assert law.terms == (MICRO_BATCH, IMAGE)
    assert law.constant(MICRO_BATCH)[0] == pytest.approx(0.077, abs=0.0005)
    assert law.constant(IMAGE)[0] == pytest.approx(0.0366, abs=0.0002)
    assert max(map(abs, law.errors())) < 0.006
    # All of its points have 256 images on a GPU, so the overhead is part of the time of an image.
    assert any(note.startswith(OVERHEAD) for note in law.notes)


# Planted constants.


def planted(setups, *, micro_batch_s=0.0, image_s=0.0, overhead_s=0.0, communication_s=0.0):
    points = []
    for setup in setups:
        num_nodes = math.ceil(setup.num_gpus / 8)
        step_s = (
            micro_batch_s * setup.num_micro_batches
            + image_s * setup.device_batch
            + overhead_s
            + communication_s * (num_nodes - 1) / num_nodes
        )
        points.append(Point(setup, setup.images_per_step / step_s))
    return points


def test_all_four_constants_come_back():
    setups = [
        Setup(num_gpus, device_batch, micro_batch)
        for num_gpus in (8, 16, 64, 256)
        for device_batch in (16, 32, 64)
        for micro_batch in (4, 8)
    ]
    law = fit_law(
        planted(setups, micro_batch_s=0.08, image_s=0.02, overhead_s=0.2, communication_s=0.1)
    )
    assert law.terms == (MICRO_BATCH, IMAGE, OVERHEAD, COMMUNICATION)
    assert law.seconds == pytest.approx((0.08, 0.02, 0.2, 0.1))
    # 512 GPUs, 32 images each: 4 x 0.08 + 32 x 0.02 + 0.2 + 0.1 x 63/64 = 1.2584375 s.
    prediction = law.predict(Setup(512, 32, 8))
    assert prediction.step_time_s == pytest.approx(1.2584375)
    assert prediction.images_per_second == pytest.approx(512 * 32 / 1.2584375)
    assert prediction.is_extrapolated
    assert not law.predict(Setup(128, 32, 6)).is_extrapolated


def test_an_interval_by_hand():
    # Two points of each of two setups, +-1 % around 1.1 s and 2.1 s: t = 1 s and o = 0.1 s but for
    # 0.01 %, and four residuals of 1 % on 2 degrees of freedom: sqrt(4 x 1e-4 / 2) = 0.01414.
    points = [
        Point(Setup(8, device_batch, 4), 8 * device_batch / (step_s * factor))
        for device_batch, step_s in ((4, 1.1), (8, 2.1))
        for factor in (0.99, 1.01)
    ]
    law = fit_law(points)
    assert law.relative_error == pytest.approx(math.sqrt(2) / 100, rel=0.01)
    assert law.degrees_of_freedom == 2
    # At a fitted setup, the law's own doubt is that of a mean of two: 0.01414^2 / 2. A figure there
    # adds its own: 0.01414 x sqrt(1.5) x t(0.975, 2) = 0.01732 x 4.302653 = 0.07452.
    prediction = law.predict(Setup(8, 4, 4))
    assert prediction.images_per_second == pytest.approx(32 / 1.1, rel=0.001)
    ratio = prediction.images_per_second / prediction.images_per_second_low
    assert ratio == pytest.approx(1.07452, abs=0.001)


@pytest.mark.parametrize(
    "setups",
    [
        [Setup(num_gpus, 8, 4) for num_gpus in (1, 2, 4, 8)],  # weak scaling tells no overhead
        [Setup(8, size, 4) for size in (4, 8, 16, 32)],  # the overhead takes no time
    ],
)
def test_a_term_that_is_not_told_or_takes_no_time_is_left_out(setups):
    law = fit_law(planted(setups, micro_batch_s=0.5))
    assert law.terms == (MICRO_BATCH,)
    assert law.seconds == pytest.approx((0.5,))


def test_two_figures_are_too_few():
    with pytest.raises(ConfigError) as caught:
        fit_law(planted([Setup(8, 4, 4), Setup(8, 8, 4)], micro_batch_s=0.1, overhead_s=0.1))
    assert caught.value.value == 2


# Predictions.


def test_the_plateau_of_the_chart_is_predicted(capsys, quoted, predict):
    rows = predict(quoted / "aws_p5_scaling.csv", "--num_gpus", "256,320,384")
    assert capsys.readouterr().out.count("1920 of 2048 images in a step") == 2
    # 8 images on a GPU are 4 + 4, 6 are 4 + 2 and 5 are 4 + 1: the same time for 2048, 1920, 1920.
    assert [row["num_micro_batches"] for row in rows] == [2, 2, 2]
    assert [row["last_micro_batch"] for row in rows] == [4, 2, 1]
    assert [row["images_per_step"] for row in rows] == [2048, 1920, 1920]
    rates = [row["images_per_second"] for row in rows]
    assert rates[1] == rates[2] == pytest.approx(rates[0] * 1920 / 2048)
    assert rates[0] == pytest.approx(4003.5, abs=0.1)  # the chart says 4076, 3939 and 3992
    for row, chart in zip(rows, (4076, 3939, 3992), strict=True):
        assert row["images_per_second_low"] < chart < row["images_per_second_high"]


def test_strong_scaling_to_more_gpus_than_measured(capsys, quoted, predict):
    table = quoted / "mosaicml_diffusion_benchmark_a100.csv"
    rows = predict(table, "--num_gpus", "8,16,...,512")
    assert [row["num_gpus"] for row in rows] == [8, 16, 32, 64, 128, 256, 512]
    # One micro-batch: 2048 / (0.2437 + 0.2999) = 3767; on 8 GPUs, 2048 / (64 x 0.2437 + 0.2999) =
    # 128.83: 29.2 times as fast, on 64 times as many.
    assert rows[-1]["images_per_second"] == pytest.approx(3767, rel=0.001)
    assert rows[-1]["speed_up"] == pytest.approx(29.2, rel=0.002)
    assert rows[-1]["efficiency_percent"] == pytest.approx(45.7, rel=0.002)
    assert [row["extrapolated"] for row in rows] == [False] * 6 + [True]
    assert {row["kind"] for row in rows} == {"modelled"}
    assert rows[0]["source"].startswith("step law fitted to mosaicml_diffusion_benchmark_a100.csv")
    assert "extrapolated" in capsys.readouterr().out


def test_weak_scaling_keeps_the_time_of_a_step(quoted, predict):
    arguments = ("--num_gpus", "8,512", "--device_batch", "32")
    rows = predict(quoted / "aws_p5_scaling.csv", *arguments)
    assert [row["global_batch"] for row in rows] == [256, 16384]
    assert [row["images_per_step"] for row in rows] == [256, 16384]
    assert rows[1]["images_per_second"] == pytest.approx(64 * rows[0]["images_per_second"])
    assert rows[1]["efficiency_percent"] == pytest.approx(100)


def test_predictions_are_no_evidence_for_another_fit(quoted, predict, tmp_path):
    predict(quoted / "aws_p5_scaling.csv", "--num_gpus", "8,16,...,512")
    assert refusal_of("scaling", "fit", tmp_path / "out.csv").value == 0


def test_hostile_names_survive(capsys, tmp_path, predict):
    name = "=cmd|' /C calc'!A0\n<b>\x1b[2J"
    table = tmp_path / "table.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([[name, name, gpus, 4, 64, 10 * gpus] for gpus in (1, 2, 4)])
    rows = predict(table, "--num_gpus", "1,8")
    assert rows[0]["gpu"] == f"'{name}"
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "=cmd|' /C calc'!A0 <b>?[2J" in output


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "flag", "value"),
    [
        # Figures of several kinds of work.
        ("fit {single}", "--where gpu=...", GPUS),
        ("fit {single} --where gpu=H100", "--where ema=...", "true and false"),
        ("fit {single} --where ema=true", "--where gpu=...", GPUS),
        ("fit {latents}", "--where image_size=...", "256 and 512"),
        (
            "fit {latents} {online} --where image_size=512",
            "--where latents=...",
            "precomputed and online",
        ),
        # Other figures.
        ("fit", "TABLE", ""),
        ("fit {mlperf} --where gpu=H200", "--micro_batch, for the rows that do not tell it", ""),
        ("fit {cost}", "the path given", "{cost}"),
        ("predict {single} --num_gpus 8 --where gpu=H100 ema=true", "--micro_batch", NO_SIZE),
        # Flags.
        ("predict {scaling} --num_gpus 8and16", "--num_gpus", "8and16"),
        ("predict {scaling} --num_gpus 8,...,64", "--num_gpus", "8,...,64"),
        ("predict {scaling} --num_gpus 0", "--num_gpus", "0"),
        (
            "predict {scaling} --num_gpus 4096",
            "--num_gpus and --global_batch",
            "4096 GPUs for a global batch of 2048",
        ),
        ("predict {scaling} --num_gpus 8 --micro_batch 8", "--micro_batch", 8),
        (
            "predict {scaling} --num_gpus=8 --device_batch=8 --global_batch=8",
            "--global_batch or --device_batch",
            "--global_batch 8 --device_batch 8",
        ),
        ("predict {scaling} --num_gpus 8 --out no/such/folder", "--out", "no/such/folder"),
    ],
)
def test_what_cannot_be_fitted_or_predicted_is_refused(quoted, arguments, flag, value):
    tables = {
        "scaling": "aws_p5_scaling",
        "single": "aws_p4de_p5_single_node",
        "latents": "mosaicml_diffusion_a100",
        "online": "mosaicml_diffusion_benchmark_a100",
        "mlperf": "mlperf_training_sd2",
        "cost": "mosaicml_diffusion_a100_cost",
    }
    paths = {name: str(quoted / f"{file}.csv") for name, file in tables.items()}
    error = refusal_of("scaling", *(word.format(**paths) for word in arguments.split()))
    assert (error.flag, error.value) == (flag, paths["cost"] if value == "{cost}" else value)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8", [8]),
        ("8,16,64", [8, 16, 64]),
        ("8,16,...,100", [8, 16, 32, 64]),
        ("64,96,...,160", [64, 96, 128, 160]),
        ("1,8,16,...,64", [1, 8, 16, 32, 64]),
    ],
)
def test_gpu_counts(text, counts):
    assert parse_counts(text) == tuple(counts)
