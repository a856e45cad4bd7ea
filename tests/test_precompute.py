"""python -m sdbench precompute through its front door: content, records, ranks and kills."""

from __future__ import annotations

import itertools
import json
import os
import signal
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import benchmark
from data import main as feed_main
from sdbench import data
from sdbench.base.errors import ConfigError
from sdbench.data.batches.tokenizer import CaptionTokenizer
from sdbench.data.convert.convert import main as convert
from sdbench.data.convert.writers import Output
from sdbench.data.source import SourceConfig
from sdbench.encoding import precompute
from sdbench.encoding.encoder import Encoder, Step
from sdbench.models.architecture import DRAWING, resolve_architecture
from sdbench.models.diffusion import make_encoder
from tests.data.datasets import read_files, read_mds
from tests.forked import exit_codes, forked_ranks
from tests.refusals import PLACE_FLAGS, printed_refusal, refused
from tests.runs import only_record, run_and_load
from tests.schemas import validate
from tests.train.smallest_model import write_model
from tests.train.written import read_losses

NUM_PICTURES = 10  # of the fixture picture_folder
TINY = ("--model_name", "nano", "--encoder_dtype", "fp32", "--device_batch_size", "2")


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
    options = ("--model_name", "nano", "--encoder_dtype", "fp32", "--batch_size", "2")
    options += ("--precision", "fp32", "--no_shuffle", "--num_workers", "0")
    options += ("--no_measure_peak", "--engine", "torch")
    window = ("--warmup_batches", "1", "--measure_batches", "7", "--profile_batches", "0")
    record, exit_code = run_and_load(benchmark.main, results, *options, *window, *argv)
    assert exit_code == 0
    return record, [float(loss) for loss in read_losses(results / record["run_id"])]


@pytest.mark.slow
def test_training_on_latents_gives_the_losses_of_training_on_the_images(
    run, tmp_path, picture_folder
):
    generator = np.random.default_rng(0)
    for path in picture_folder.glob("*.png"):
        pixels = generator.integers(0, 256, (70, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    exit_code, _ = run("latents", "--samples_per_shard", "4")
    assert exit_code == 0
    # Half of the captions are dropped here and there, and they are the same ones.
    dropped = ("--caption_drop_probability", "0.5")
    on_images, online = train(tmp_path / "online", "--remote", str(picture_folder), *dropped)
    latents = ("--remote", str(tmp_path / "latents"), "--latents", "precomputed")
    on_latents, precomputed = train(tmp_path / "precomputed", *latents, *dropped)
    # Eight steps, an epoch has five. Storing as float16 changes a loss by about 1e-5 of it here;
    # images that are mirrored, or captions that are dropped, by 1e-2.
    assert len(set(online)) == 8
    assert precomputed == pytest.approx(online, rel=5e-5)
    flops = [record["workload"]["flops_per_image"] for record in (on_latents, on_images)]
    assert 0 < flops[0] < flops[1]
    assert any("compare with other precomputed runs only" in note for note in on_latents["notes"])


def test_without_the_encoded_empty_caption_of_this_model_none_can_be_dropped(run, tmp_path):
    run("latents", "--model_name", "tiny-flux")
    place = tmp_path / "latents"
    flags = ["--latents", "precomputed", "--folder", str(tmp_path / "copy")]
    assert convert([str(place), *flags, "--out_format", "webdataset"]) == 0
    dropped = {"latents": "precomputed", "image_size": 64, "caption_drop_probability": 0.5}

    def check(folder: Path, name: str) -> None:
        inputs = resolve_architecture(name).inputs
        source = {"data_format": data.detect_format(str(folder)), "remote": str(folder)}
        data.check(SourceConfig(**source, **dropped, inputs=inputs, device_batch_size=2, seed=1))

    check(tmp_path / "copy", "tiny-flux")
    file = place / ".empty_caption.npz"
    other = {"text_embedding": np.zeros((77, 8), np.float16)}
    for content in (b"", b"PK", b"\x93NUMPY", None, other):
        file.unlink(missing_ok=True)
        if isinstance(content, dict):
            np.savez(file, **content)
        elif content is not None:
            file.write_bytes(content)
        with refused("--caption_drop_probability", value=0.5) as caught:
            check(place, "tiny-flux")
        assert str(place) in caught.value.what


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


@pytest.mark.slow
def test_two_ranks_write_what_one_writes(run, run_two, tmp_path):
    run("alone", "--samples_per_shard", "3", "--num_workers", "1")
    assert run_two("together", "--samples_per_shard", "3") == [0, 0]
    assert read_files(tmp_path / "together") == read_files(tmp_path / "alone")
    record = only_record(tmp_path / "runs-of-two")
    validate(record)
    assert record["ranks"]["world_size"] == 2
    assert record["summary"]["num_images"] == NUM_PICTURES


@pytest.mark.slow
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


@pytest.mark.slow
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


def read_note(folder: Path) -> dict:
    """What a data set says of how it was made."""
    return json.loads((folder / ".made_by.json").read_text())


def test_latents_of_stable_diffusion_say_their_family_and_their_random_weights(run, tmp_path):
    run("latents", "--seed", "5")
    note = read_note(tmp_path / "latents")
    assert note["family"] == "sd"
    drawn = f"random, seed 5, drawing {DRAWING}"
    assert note["weights"] == {"vae": drawn, "text_encoder": drawn}
    assert "encoded" not in note


def make_encoders(name: str, parts: Sequence[str]) -> list:
    architecture = resolve_architecture(name)
    options = {"seed": 17, "dtype": torch.float32}
    return [make_encoder(part, architecture, **options) for part in parts]


@torch.no_grad()
def encode_for_sdxl(captions: Sequence[str]) -> dict[str, np.ndarray]:
    """As the pipeline of SDXL: the states before the last layer of each encoder side by side."""
    first, second = make_encoders("tiny-sdxl", ("text_encoder", "text_encoder_2"))
    ids = [torch.from_numpy(CaptionTokenizer(pad_token_id=pad)(captions)) for pad in (49407, 0)]
    one = first(ids[0], output_hidden_states=True)
    other = second(ids[1], output_hidden_states=True)
    states = torch.cat([one.hidden_states[-2], other.hidden_states[-2]], dim=2)
    return {"text_embedding": states.numpy(), "pooled_embedding": other.text_embeds.numpy()}


@torch.no_grad()
def encode_for_flux(captions: Sequence[str]) -> dict[str, np.ndarray]:
    """As the pipeline of Flux: T5's last states, of bytes, and CLIP's pooled text."""
    clip, t5 = make_encoders("tiny-flux", ("text_encoder", "text_encoder_2"))
    ids = torch.from_numpy(CaptionTokenizer(pad_token_id=49407)(captions))
    rows = [[*(ord(letter) + 3 for letter in text), 1] for text in captions]
    padded = torch.tensor([row + [0] * (32 - len(row)) for row in rows])
    return {
        "text_embedding": t5(padded).last_hidden_state.numpy(),
        "pooled_embedding": clip(ids).pooler_output.numpy(),
    }


# Of the pictures 0, 1, 2 and 9, of 90 x 100, 97 x 99, 104 x 98 and 153 x 91 pixels, at 64 px. The
# squares in the middle begin at row 5, row 1, column 3 and column 31.
SIZES = {
    0: [100, 90, 4, 0, 64, 64],
    1: [99, 97, 1, 0, 64, 64],
    2: [98, 104, 0, 2, 64, 64],
    9: [91, 153, 0, 22, 64, 64],
}


@pytest.mark.parametrize(
    ("name", "encode", "encodings"),
    [
        (
            "tiny-sdxl",
            encode_for_sdxl,
            {
                "latent_moments_64": "ndarray:float16:8,8,8",
                "text_embedding": "ndarray:float16:77,64",
                "pooled_embedding": "ndarray:float16:32",
                "sizes_64": "ndarray:float32:6",
                "caption": "str",
            },
        ),
        (
            "tiny-flux",
            encode_for_flux,
            {
                "latent_moments_64": "ndarray:float16:32,8,8",
                "text_embedding": "ndarray:float32:32,32",
                "pooled_embedding": "ndarray:float16:32",
                "caption": "str",
            },
        ),
    ],
)
def test_other_families_store_all_conditions_and_sizes(run, tmp_path, name, encode, encodings):
    exit_code, _ = run("latents", "--model_name", name, "--samples_per_shard", "10")
    assert exit_code == 0
    (shard,) = json.loads((tmp_path / "latents" / "index.json").read_text())["shards"]
    assert dict(zip(shard["column_names"], shard["column_encodings"], strict=True)) == encodings
    rows = read_mds(tmp_path / "latents")
    assert len(rows) == NUM_PICTURES
    expected = encode([row["caption"] for row in rows])
    for column, values in expected.items():
        found = np.stack([row[column] for row in rows])
        np.testing.assert_allclose(found, values, atol=2e-3, rtol=1e-3)
    assert len({row["pooled_embedding"].tobytes() for row in rows}) == NUM_PICTURES
    if "sizes_64" in encodings:
        numbers = {row["caption"]: row["sizes_64"].tolist() for row in rows}
        assert {n: numbers[f"picture number {n}"] for n in SIZES} == SIZES
    note = read_note(tmp_path / "latents")
    assert note["family"] == name.removeprefix("tiny-")
    assert set(note["weights"]) == {"vae", "text_encoder", "text_encoder_2"}


@pytest.mark.slow
def test_states_of_t5_that_are_encoded_in_bf16_are_stored_so(run, tmp_path):
    exit_code, _ = run("latents", "--model_name", "tiny-flux", "--encoder_dtype", "bf16")
    assert exit_code == 0
    rows = read_mds(tmp_path / "latents")
    expected = encode_for_flux([row["caption"] for row in rows])["text_embedding"]
    bits = np.stack([row["text_embedding_bf16"] for row in rows])
    found = (bits.astype(np.uint32) << 16).view(np.float32)
    assert expected.std() > 0.5
    np.testing.assert_allclose(found, expected, atol=0.1)
    stored = read_note(tmp_path / "latents")["encoded"]["conditions"][0]
    assert (stored["name"], stored["dtype"]) == ("text_embedding", "bfloat16")
    reading = ("--remote", str(tmp_path / "latents"), "--latents", "precomputed")
    reading += ("--image_size", "64", "--batch_size", "2", "--num_batches", "4")
    record, exit_code = run_and_load(feed_main, tmp_path / "feeds", *reading)
    assert (exit_code, record["summary"]["num_images"]) == (0, 8)


@pytest.mark.slow
def test_training_of_another_family_on_latents_is_that_on_the_images(run, tmp_path, picture_folder):
    """Wrong corners of crops change a loss by 1e-3 of it, wrong pooled text by 9e-3."""
    sdxl = ("--model_name", "tiny-sdxl")
    run("latents", *sdxl)
    _, online = train(tmp_path / "online", *sdxl, "--remote", str(picture_folder))
    latents = ("--remote", str(tmp_path / "latents"), "--latents", "precomputed")
    _, precomputed = train(tmp_path / "precomputed", *sdxl, *latents)
    assert len(set(online)) == 8
    assert precomputed == pytest.approx(online, rel=5e-5)


@pytest.mark.slow
def test_latents_of_another_family_or_vae_are_refused_before_anything_is_built(
    run, tmp_path, capsys
):
    """Weights are compared if they are known of both; without a note nothing is refused."""
    model = tmp_path / "mine"
    write_model(model)
    run("latents", "--model_name", str(model))
    place = tmp_path / "latents"
    note = read_note(place)
    vae = note["vae_tensors"]
    (file,) = (model / "vae").glob("*.safetensors")
    known = [file.stat().st_size, f"crc32 {zlib.crc32(file.read_bytes()):08x}"]
    assert note["weights"][f"vae/{file.name}"] == known

    def train_dry(name: object, **changes: object) -> ConfigError | None:
        (place / ".made_by.json").write_text(json.dumps({**note, **changes}))
        options = ["--model_name", str(name), "--remote", str(place), "--latents", "precomputed"]
        options += ["--dry_run", "--batch_size", "2", "--results_dir", str(tmp_path / "none")]
        exit_code = benchmark.main(options)
        printed = capsys.readouterr().err
        assert exit_code in (0, 2), printed
        return printed_refusal(printed) if exit_code else None

    assert train_dry(model) is None
    assert train_dry("nano") is None  # random weights
    assert train_dry(model, vae_tensors=None) is None
    other = train_dry(model, vae_tensors="00000000")
    assert (other.flag, other.value) == ("--model_name", vae)
    assert "00000000" in other.allowed
    # The same tensors in another file, as after an export.
    save_file(load_file(file), file, metadata={"saved": "again"})
    assert zlib.crc32(file.read_bytes()) != int(known[1].removeprefix("crc32 "), 16)
    assert train_dry(model) is None
    other = train_dry("nano", family="flux")
    assert (other.flag, other.value) == ("--model_name", "sd")
    other = train_dry("tiny-flux")
    assert (other.flag, other.value) == ("--model_name", "flux")
    note.clear()
    assert train_dry(model) is None


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
    assert precompute.main(["--model_name", "nano", *places, *argv]) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == (flag, value)
    assert list(tmp_path.iterdir()) == []
