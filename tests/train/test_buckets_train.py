"""Training on pictures of several shapes: the same losses whoever trains, stops or has encoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import benchmark
import data
from sdbench.base.shape import Shape
from sdbench.cli import main as sdbench
from sdbench.encoding import precompute
from sdbench.measure.summary import Measurements, summarize
from sdbench.measure.timer import Step, Timings
from sdbench.plan.resolve import resolve
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import parse_request
from tests.data.datasets import read_mds
from tests.machines import make_cpu_machine
from tests.refusals import printed_refusal
from tests.runs import run_and_load
from tests.train.written import exported, read_events, read_losses, trained

# 80x48, 48x80 and 64x64 px: with tiny-flux all in buckets of their own size.
SIZES = ((80, 48), (48, 80), (64, 64))
NUM_EACH = 4
MODEL = ("--model_name", "tiny-flux", "--image_size", "64", "--num_threads", "1")
RECIPE = (*MODEL, "--batch_size", "2", "--precision", "fp32", "--encoder_dtype", "fp32")
RECIPE += ("--engine", "torch", "--lr", "0.01", "--log_every_batches", "1", "--buckets")


def write_pictures(folder: Path, *, seed: int = 0, is_mixed: bool = False) -> Path:
    folder.mkdir()
    random = np.random.default_rng(seed)
    for number in range(NUM_EACH * len(SIZES)):
        width, height = SIZES[number % len(SIZES) if is_mixed else number // NUM_EACH]
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"picture {number}")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "train")


@pytest.fixture(scope="module")
def whole(pictures, tmp_path_factory) -> Path:
    """Two epochs of six steps, with a look at other pictures, and samples of two shapes."""
    place = tmp_path_factory.mktemp("runs")
    held_out = write_pictures(place / "held-out", seed=1)
    looks = ("--validate_every_batches", "6", "--validation_remote", held_out)
    looks += ("--sample_every_batches", "6", "--sample_prompts", "a cat", "--sample_steps", "1")
    looks += ("--sample_shapes", "80x48")
    return trained("whole", 12, "--remote", pictures, *RECIPE, *looks, results=place)


@pytest.mark.slow
def test_it_is_validated_and_draws_in_other_shapes(whole):
    validations = read_events(whole, "validation")
    assert [event["num_samples"] for event in validations] == [12, 12]
    (first, *_) = sorted(whole.glob("samples/*.png"))
    # 80 x 48, but as wide as a caption, with its margins: a square would be 64 high, and 88 in all.
    with Image.open(first) as grid:
        assert grid.height == 72
    assert exported(whole).is_dir()


@pytest.mark.slow
def test_a_run_stopped_in_an_epoch_goes_on_with_the_losses_of_the_whole(
    whole, pictures, tmp_path, capsys
):
    argv = ("--remote", pictures, *RECIPE, "--save_every_batches", "4", "--resume", "auto")
    trained("parts", 4, *argv, results=tmp_path)
    parts = trained("parts", 12, *argv, "--num_workers", "2", results=tmp_path)
    assert read_losses(parts) == read_losses(whole)
    trained("parts", 14, *argv, "--max_aspect_ratio", "1.2", results=tmp_path, code=2)
    assert printed_refusal(capsys.readouterr().err).flag == "--max_aspect_ratio"


@pytest.mark.slow
def test_composer_gives_the_losses_of_our_own_loop(whole, pictures, tmp_path):
    engine = ("--engine", "composer")
    run = trained("composer", 6, "--remote", pictures, *RECIPE, *engine, results=tmp_path)
    ours, theirs = ([float(loss) for loss in read_losses(one)] for one in (whole, run))
    assert theirs == pytest.approx(ours[:6], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("out_format", ["mds", "webdataset", "parquet"])
def test_encoded_pictures_give_the_losses_of_the_pictures(out_format, pictures, tmp_path):
    encode = ("--remote", pictures, "--folder", tmp_path / "latents", "--out_format", out_format)
    encode += ("--model_name", "tiny-flux", "--image_size", "64", "--encoder_dtype", "fp32")
    encode += ("--buckets", "auto", "--samples_per_shard", "4", "--results_dir", tmp_path)
    assert precompute.main([str(word) for word in encode]) == 0
    assert sdbench(["verify-data", str(tmp_path / "latents"), "--deep"]) == 0
    window = ("--warmup_batches", "3", "--measure_batches", "3", "--profile_batches", "0")
    window += ("--no_measure_peak", "--no_shuffle", "--num_workers", "0", "--buckets")
    losses, shapes = [], []
    for name, place in (
        ("online", ("--remote", pictures)),
        ("encoded", ("--remote", tmp_path / "latents", "--latents", "precomputed")),
    ):
        argv = [str(word) for word in (*MODEL, "--batch_size", "2", *place, *window)]
        argv += ["--precision", "fp32", "--encoder_dtype", "fp32", "--engine", "torch"]
        record, code = run_and_load(benchmark.main, tmp_path / name, *argv)
        assert code == 0
        shapes.append(record["workload"]["buckets"]["num_samples"])
        losses.append([float(loss) for loss in read_losses(tmp_path / name / record["run_id"])])
    assert shapes[0] == shapes[1] == {"80x48": 4, "48x80": 4, "64x64": 4}
    assert losses[1] == pytest.approx(losses[0], rel=5e-5)


def test_pictures_of_all_shapes_in_a_shard_are_encoded_each_in_its_own(tmp_path):
    folder = write_pictures(tmp_path / "pictures", is_mixed=True)
    argv = ("--remote", folder, "--folder", tmp_path / "latents", "--samples_per_shard", "5")
    argv += ("--model_name", "tiny-flux", "--image_size", "64", "--buckets", "auto")
    assert precompute.main([str(word) for word in (*argv, "--results_dir", tmp_path)]) == 0
    rows = read_mds(tmp_path / "latents")
    assert len({row["caption"] for row in rows}) == 12
    for row in rows:
        width, height = SIZES[int(row["caption"].split()[1]) % 3]
        assert row["latent_moments_64_buckets"].shape[1:] == (height // 8, width // 8)


@pytest.mark.slow
def test_a_record_tells_shapes_their_steps_and_the_rate_of_an_epoch(pictures, tmp_path):
    argv = (
        *MODEL,
        "--batch_size",
        "2",
        "--remote",
        str(pictures),
        "--buckets",
        "--no_measure_peak",
    )
    record, code = run_and_load(benchmark.main, tmp_path, *argv, "--measure_batches", "12")
    assert code == 0
    summary = record["summary"]
    by_shape = {row["shape"]: row for row in summary["shapes"]}
    assert by_shape.keys() == {"80x48", "48x80", "64x64"}
    assert {row["share"] for row in by_shape.values()} == {1 / 3}
    assert sum(row["num_steps"] for row in by_shape.values()) == 12
    assert record["config"]["warmup_batches"] == 4 + 3
    mean_s = sum(row["step_time_s"] for row in by_shape.values()) / 3
    assert summary["images_per_second_of_epoch"] == pytest.approx(2 / mean_s)
    pixels = {shape: int(np.prod([int(side) for side in shape.split("x")])) for shape in by_shape}
    of_window = sum(2 * row["num_steps"] * pixels[name] for name, row in by_shape.items())
    total_s = sum(row["num_steps"] * row["step_time_s"] for row in by_shape.values())
    assert summary["megapixels_per_second"] == pytest.approx(of_window / 1e6 / total_s)
    flops = record["workload"]["flops_per_image"]
    squares = (*MODEL, "--batch_size", "2", "--remote", str(pictures), "--no_measure_peak")
    square, _ = run_and_load(benchmark.main, tmp_path, *squares, "--measure_batches", "1")
    # 3840 of 4096 pixels in two thirds of the pictures.
    assert 0.94 < flops / square["workload"]["flops_per_image"] < 1


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        (("--buckets", "70x40"), "--buckets"),
        (("--buckets", "64x64", "--image_size", "128"), "--image_size or --buckets"),
        (("--buckets", "64x64", "--bucket_step", "16"), "--bucket_step or --buckets"),
        (("--warmup_batches", "2"), "--warmup_batches, --max_duration or --buckets"),
        (("--bucket_step", "24"), "--bucket_step"),
    ],
)
def test_what_the_model_or_the_window_cannot_take_is_bad_input(
    changes, flag, pictures, tmp_path, capsys
):
    argv = ("--model_name", "tiny-flux", "--batch_size", "2", "--remote", str(pictures))
    argv += ("--buckets", "--results_dir", str(tmp_path))
    assert benchmark.main([*argv, *changes]) == 2
    assert printed_refusal(capsys.readouterr().err).flag == flag


def test_data_py_measures_buckets_without_a_model(pictures, tmp_path, capsys):
    argv = ("--remote", str(pictures), "--image_size", "64", "--bucket_step", "16", "--buckets")
    window = ("--batch_size", "2", "--num_batches", "12", "--num_workers", "0")
    record, code = run_and_load(data.main, tmp_path, *argv, *window)
    assert code == 0
    assert record["summary"]["images_per_second"] > 0
    assert "Pictures of 3 shapes" in capsys.readouterr().out


@pytest.mark.slow
def test_the_memory_estimate_is_that_of_the_largest_shape(pictures):
    def estimate(*argv: str) -> float:
        request = parse_request(["--model_name", "nano", *argv], description="", epilog="")
        ranks = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
        return resolve(request, machine=make_cpu_machine(), ranks=ranks).memory.activations

    mixed = estimate("--use_synth_data", "--buckets", "64x64,128x128,64x128")
    assert mixed == estimate("--use_synth_data", "--image_size", "128")
    assert mixed > 2 * estimate("--use_synth_data", "--image_size", "64")


def test_scatter_within_shapes_alone_makes_an_interval_and_an_alarm():
    """Steps of 1 s and of 4 s in turn, each always the same: nothing is uncertain or noisy."""
    shapes = Shape(64, 64), Shape(128, 128)
    steps = tuple(
        Step(n, "measured", (1.0, 4.0)[n % 2], 0.0, 1.0, shapes[n % 2]) for n in range(40)
    )
    samples_by_shape = {"64x64": 3, "128x128": 1}
    config = {"batch_size": 2, "profile_batches": 0}
    measured = Measurements(Timings(steps, window_s=100.0), 80, 1.0)
    summary = summarize(
        measured,
        config=config,
        num_devices=1,
        flops_per_image=1e12,
        peak_tflops=None,
        samples_by_shape=samples_by_shape,
    )
    assert summary["images_per_second"] == pytest.approx(0.8)
    assert summary["images_per_second_interval"]["low"] == pytest.approx(0.8)
    assert summary["flags"] == [] and summary["num_outliers"] == 0
    # Three of four samples are small: steps of 1.75 s.
    assert summary["images_per_second_of_epoch"] == pytest.approx(2 / 1.75)
    # With 10^12 FLOPs a sample of the data.
    assert summary["achieved_tflops_per_device"] == pytest.approx(2 / 1.75)
    missing = summarize(
        Measurements(Timings(steps[::2], window_s=20.0), 40, 1.0),
        config=config,
        num_devices=1,
        flops_per_image=1e12,
        peak_tflops=None,
        samples_by_shape=samples_by_shape,
    )
    assert missing["flags"] == ["shapes"] and missing["images_per_second_of_epoch"] is None
