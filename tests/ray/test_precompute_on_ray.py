"""precompute --engine ray: the files of precompute, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdbench.encoding import precompute
from sdbench.ranks import ray_cluster
from sdbench.record.store import load_record
from tests.data.datasets import read_files
from tests.ray.conftest import run_alone
from tests.schemas import validate

OPTIONS = ("--model_name", "nano", "--encoder_dtype", "fp32", "--image_size", "64")
SHARDS = ("--device_batch_size", "2", "--samples_per_shard", "4")
RAY = ("--engine", "ray", "--num_decoders", "2")


def make_argv(pictures: Path, out: Path) -> list[str]:
    places = ["--remote", str(pictures), "--folder", str(out), "--results_dir", str(out) + "-runs"]
    return [*OPTIONS, *SHARDS, *places]


def run(pictures: Path, out: Path, *argv: str) -> int:
    return precompute.main([*make_argv(pictures, out), *argv])


def records(out: Path) -> list[dict]:
    return [load_record(file) for file in sorted(Path(f"{out}-runs").glob("*/record.json"))]


@pytest.mark.ray
def test_the_files_are_those_of_precompute_without_ray(tmp_path, picture_folder, on_cluster):
    argv = ("--out_format", "parquet")
    assert run(picture_folder, tmp_path / "here", *argv) == 0
    out = tmp_path / "on-ray"
    run_alone("-m", "sdbench", "precompute", *make_argv(picture_folder, out), *RAY, *argv)
    assert read_files(out) == read_files(tmp_path / "here")
    (record,) = records(out)
    validate(record)
    assert (record["status"], record["config"]["num_decoders"]) == ("ok", 2)
    assert record["summary"]["num_images_written"] == 10


def test_a_run_that_failed_goes_on_with_the_shards_that_are_missing(
    tmp_path, picture_folder, stream_here, monkeypatch
):
    monkeypatch.setattr(ray_cluster, "connect", lambda _: None)
    argv = (*RAY, "--encoder_resources", '{"CPU": 1}')
    out = tmp_path / "on-ray"
    broken = picture_folder / "9.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    assert run(picture_folder, out, *argv) == 1
    assert not out.exists()
    broken.write_bytes(whole)
    assert run(picture_folder, out, *argv, "--changed_inputs", "accept") == 0
    failed, record = records(out)
    assert "9.png: the image cannot be decoded" in failed["reason"]
    # Of 10 pictures in shards of 4 the last shard was missing.
    assert (record["summary"]["num_images"], record["summary"]["num_images_written"]) == (2, 10)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--num_encoders", "2"), "--num_encoders has no effect"),
        ((*RAY, "--num_workers", "2"), "--num_workers or --engine"),
    ],
)
def test_settings_of_the_other_engine_are_refused(tmp_path, picture_folder, capsys, argv, told):
    assert run(picture_folder, tmp_path / "out", *argv) == 2
    assert told in capsys.readouterr().err
