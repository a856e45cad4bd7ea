"""python -m sdbench precompute through its front door: content, records, ranks and kills."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import benchmark
from sdbench.data.prepare.writers import Output
from sdbench.tasks.encode import precompute
from sdbench.tasks.encode.encoder import Encoder, Step
from tests.data.datasets import read_files, read_mds
from tests.forked import exit_codes, forked_ranks
from tests.refusals import PLACE_FLAGS, printed_refusal
from tests.runs import only_record, run_and_load
from tests.schemas import validate
from tests.train.written import read_losses

NUM_PICTURES = 10  # of the fixture picture_folder
TINY = ("--model_name", "tiny", "--encoder_dtype", "fp32", "--device_batch_size", "2")


@pytest.fixture
def run(tmp_path, picture_folder):
    """A function that precomputes in this process: to its exit code and its record."""

    def run_once(out: str, *argv: str) -> tuple[int, dict | None]:
        places = ("--folder", str(tmp_path / out), "--remote", str(picture_folder))
        record, code = run_and_load(precompute.main, tmp_path / "runs", *places, *TINY, *argv)
        return code, record

    return run_once


def train(results: Path, *argv: str) -> tuple[dict, list[float]]:
    """The record of a run of benchmark.py, and its losses."""
    options = ("--model_name", "tiny", "--encoder_dtype", "fp32", "--batch_size", "2")
    options += ("--precision", "fp32", "--no_shuffle", "--num_workers", "0")
    options += ("--no_measure_peak", "--engine", "torch")
    window = ("--warmup_batches", "1", "--measure_batches", "7", "--profile_batches", "0")
    record, exit_code = run_and_load(benchmark.main, results, *options, *window, *argv)
    assert exit_code == 0
    return record, [float(loss) for loss in read_losses(results / record["run_id"])]


def test_training_on_latents_gives_the_losses_of_training_on_the_images(
    run, tmp_path, picture_folder
):
    generator = np.random.default_rng(0)
    for path in picture_folder.glob("*.png"):
        pixels = generator.integers(0, 256, (70, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    exit_code, _ = run("latents", "--samples_per_shard", "4")
    assert exit_code == 0
    on_images, online = train(tmp_path / "online", "--remote", str(picture_folder))
    on_latents, precomputed = train(
        tmp_path / "precomputed", "--remote", str(tmp_path / "latents"), "--latents", "precomputed"
    )
    # Eight steps, an epoch has five. Storing as float16 changes a loss by about 1e-5 of it here;
    # images that are mirrored, or captions that are dropped, by 1e-2.
    assert len(set(online)) == 8
    assert precomputed == pytest.approx(online, rel=5e-5)
    flops = [record["workload"]["flops_per_image"] for record in (on_latents, on_images)]
    assert 0 < flops[0] < flops[1]
    assert any("compare with other precomputed runs only" in note for note in on_latents["notes"])


def test_the_record_tells_how_fast_and_where_the_time_went(run):
    _, record = run("latents", "--device_batch_size", "1", "--samples_per_shard", "4")
    validate(record)
    assert (record["kind"], record["status"]) == ("precompute", "ok")
    assert record["workload"]["num_shards"] == 3
    summary = record["summary"]
    assert (summary["num_images"], summary["num_images_written"]) == (NUM_PICTURES, NUM_PICTURES)
    assert summary["num_measured_steps"] == 8
    assert summary["images_per_second"] == pytest.approx(8 / summary["window_s"])
    split_ms = sum(summary["step_ms_per_image"].values())
    assert split_ms == pytest.approx(1000 * summary["window_s"] / 8)
    assert summary["ms_per_image"]["decode"] > 0


def make_steps(*seconds: float, num_images: int = 2) -> list[Step]:
    steps = []
    for number in seconds:
        step = Step(num_images=num_images, bytes_read=1_000_000)
        step.seconds |= {"data_wait": number / 4, "vae": number / 2, "write": number / 4}
        steps.append(step)
    return steps


def test_the_slowest_rank_decides_the_rate():
    fast, slow = make_steps(9.0, *[1.0] * 12), make_steps(5.0, *[2.0] * 10)
    summary = precompute.summarize([fast, slow, []], num_warmup_steps=1)
    assert summary["num_measured_steps"] == 10
    assert summary["window_s"] == pytest.approx(20.0)
    assert summary["images_per_second"] == pytest.approx(2.0)  # 2 ranks x 10 x 2 images
    assert summary["images_per_second_per_device"] == pytest.approx(1.0)
    assert summary["images_per_second_interval"]["low"] == pytest.approx(2.0)
    assert summary["megabytes_per_second"] == pytest.approx(1.0)
    assert summary["step_ms_per_image"]["vae"] == pytest.approx(1000 * 15 / 40)
    assert summary["num_images"] == 2 * (13 + 11)
    short = precompute.summarize([make_steps(1.0, 1.0)], num_warmup_steps=2)
    assert short["images_per_second"] is None
    assert (short["num_measured_steps"], short["num_images"]) == (0, 4)


@pytest.fixture
def run_two(tmp_path, picture_folder):
    """A function that precomputes in two ranks: to their exit codes."""

    def run_once(out: str, *argv: str) -> list[int | None]:
        places = ["--remote", str(picture_folder), "--results_dir", str(tmp_path / "runs-of-two")]
        arguments = [*TINY, *argv, *places, "--folder", str(tmp_path / out)]
        with forked_ranks(lambda: precompute.main(arguments), tmp_path) as ranks:
            return exit_codes(ranks)

    return run_once


def test_two_ranks_write_what_one_writes(run, run_two, tmp_path):
    run("alone", "--samples_per_shard", "3", "--num_workers", "1")
    assert run_two("together", "--samples_per_shard", "3") == [0, 0]
    assert read_files(tmp_path / "together") == read_files(tmp_path / "alone")
    record = only_record(tmp_path / "runs-of-two")
    validate(record)
    assert record["ranks"]["world_size"] == 2
    assert record["summary"]["num_images"] == NUM_PICTURES


def test_a_killed_run_goes_on_with_another_number_of_ranks(run, run_two, tmp_path, monkeypatch):
    options = ["--samples_per_shard", "1"]
    run("whole", *options)
    write_chunk = Output.write_chunk

    def write_and_die(output, number, rows, *, bad):
        """The sixth shard's rank is killed when it has the rows and not yet a file."""

        def rows_and_death():
            yield from rows
            os.kill(os.getpid(), signal.SIGKILL)

        write_chunk(output, number, rows_and_death() if number == 5 else rows, bad=bad)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "write_chunk", write_and_die)
        codes = run_two("latents", *options)
    assert codes == [1, -signal.SIGKILL]
    assert not (tmp_path / "latents").exists()
    num_kept = len(list((tmp_path / "latents.partial" / "chunks").iterdir()))
    assert 2 <= num_kept < NUM_PICTURES  # rank 1 had finished two

    exit_code, record = run("latents", *options)
    assert exit_code == 0
    assert record["summary"]["num_images"] == NUM_PICTURES - num_kept
    assert record["summary"]["num_images_written"] == NUM_PICTURES
    assert read_files(tmp_path / "latents") == read_files(tmp_path / "whole")
    assert not (tmp_path / "latents.partial").exists()


def test_a_bad_sample_stops_a_run_and_a_resume_may_not_change_what_is_written(
    run, tmp_path, picture_folder, capsys
):
    run("whole", "--seed", "1")
    (picture_folder / "3.png").write_bytes(b"no image")
    options = ["--samples_per_shard", "2", "--seed", "1", "--num_workers", "2"]
    exit_code, record = run("latents", *options)
    validate(record)
    assert (exit_code, record["status"]) == (1, "failed")
    assert "3.png" in record["reason"] and "--on_bad_sample skip" in record["reason"]
    assert "Traceback" not in record["reason"] and not (tmp_path / "latents").exists()
    exit_code, record = run("latents", "--samples_per_shard", "2", "--seed", "2")
    assert (exit_code, record) == (2, None)
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == ("--folder", 2)
    skip = [*options, "--on_bad_sample", "skip", "--max_bad_fraction"]
    exit_code, record = run("latents", *skip, "0.05")
    assert exit_code == 1 and "1 of 10 samples are bad" in record["reason"]
    exit_code, record = run("latents", *skip, "0.1")
    assert exit_code == 0
    assert record["summary"]["num_images_written"] == 9
    assert record["summary"]["num_bad_samples"] == 1
    assert "left out: " in capsys.readouterr().out
    whole, good = read_mds(tmp_path / "whole"), read_mds(tmp_path / "latents")
    for one, other in zip(whole[:3] + whole[4:], good, strict=True):
        assert one["caption"] == other["caption"]
        np.testing.assert_allclose(one["latent_moments_64"], other["latent_moments_64"], atol=2e-3)


def test_dropped_captions_are_stored_as_they_are_encoded(run, tmp_path):
    import pyarrow.parquet

    run("latents", "--out_format", "parquet", "--caption_drop_probability", "1")
    table = pyarrow.parquet.read_table(tmp_path / "latents")
    assert table["caption"].to_pylist() == [""] * NUM_PICTURES
    assert len(set(table["text_embedding"].to_pylist())) == 1


def test_an_encoder_that_overflows_is_no_silent_nan(run, monkeypatch):
    encode, numbers = Encoder.encode_images, itertools.cycle(range(NUM_PICTURES))

    def overflow(self, images):
        values = encode(self, images)
        values[[next(numbers) == 4 for _ in images], 0, 0, 0] = np.inf
        return values

    monkeypatch.setattr(Encoder, "encode_images", overflow)
    exit_code, record = run("latents")
    assert exit_code == 1
    assert "4.png, latent_moments_64: a value is NaN, infinite" in record["reason"]
    exit_code, record = run("latents", "--on_bad_sample", "skip", "--max_bad_fraction", "0.1")
    assert (exit_code, record["summary"]["num_bad_samples"]) == (0, 1)
    assert record["summary"]["num_images_written"] == NUM_PICTURES - 1


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        ([], PLACE_FLAGS, None),
        (["--use_synth_data", "--encoder_dtype", "fp16"], "--encoder_dtype", "fp16"),
        (["--use_synth_data", "--image_size", "100"], "--image_size", 100),
    ],
)
def test_what_cannot_be_done_is_refused_before_there_is_a_record(
    tmp_path, capsys, argv, flag, value
):
    places = ["--folder", str(tmp_path / "latents"), "--results_dir", str(tmp_path / "runs")]
    assert precompute.main(["--model_name", "tiny", *places, *argv]) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == (flag, value)
    assert list(tmp_path.iterdir()) == []
