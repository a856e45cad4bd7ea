"""Does Ray Data give a rank what the loader in its own process gives, as latents?"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.samples import SampleType
from sdbench.data.source import SourceConfig
from sdbench.models.architecture import resolve_architecture
from sdbench.ranks import ray_cluster
from sdbench.ranks.distributed import Ranks
from sdbench.settings.online import OnlineSettings
from tests.data import datasets
from tests.ray.processes import find_workers

pytestmark = pytest.mark.ray

BATCH_SIZE, ENCODER_BATCH_SIZE = 8, 4
NUM_BATCHES = datasets.NUM_SAMPLES // BATCH_SIZE  # of an epoch: 6
ENCODER = "EncodeStage"


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A Ray cluster of this machine."""
    ray_cluster.connect(None)
    import ray

    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def encoder():
    """The encoders of the tests, in this process."""
    from sdbench.tasks.encode.encoder import Encoder

    return Encoder(
        tiny(), sample_type=SampleType.MOMENTS, encoder_dtype="fp32", seed=3, device="cpu"
    )


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Parquet files of pictures in which a crop or a flip is seen."""
    monkeypatch.setattr(datasets, "make_png", datasets.make_ramp_png)
    datasets.write_parquet(tmp_path / "data")
    return tmp_path / "data"


def tiny():
    return resolve_architecture("tiny", revision=None, random_weights=False)


def source_of(place: Path | None, **changes) -> SourceConfig:
    options = {
        "data_format": "parquet",
        "remote": None if place is None else str(place),
        "image_size": datasets.IMAGE_SIZE,
        "device_batch_size": BATCH_SIZE,
        "text_embedding_dim": 32,
        "seed": 3,
    }
    return SourceConfig(**{**options, **changes})


def open_loader(source: SourceConfig, *, num_batches: int = 2 * NUM_BATCHES, **settings):
    from sdbench.tasks.encode import online

    return online.build(
        source,
        OnlineSettings(
            online_preprocessing=True, online_encoder_batch_size=ENCODER_BATCH_SIZE, **settings
        ),
        architecture=tiny(),
        encoder_dtype="fp32",
        weights_seed=3,
        ranks=Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1),
        num_batches=num_batches,
    )


def encode_here(encoder, source: SourceConfig, *, num_epochs: int) -> list[dict]:
    """The batches of the loader in this process, encoded in the parts that an actor takes."""
    loader = data.build(source)
    encoded = []
    for batch in (batch for _ in range(num_epochs) for batch in loader):
        parts = [
            (
                encoder.encode_images(images, indices=range(len(images))),
                encoder.encode_captions(input_ids),
            )
            for images, input_ids in zip(
                batch["image"].split(ENCODER_BATCH_SIZE),
                batch["input_ids"].split(ENCODER_BATCH_SIZE),
                strict=True,
            )
        ]
        moments, texts = (
            torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True)
        )
        encoded.append(
            {
                "latent_mean": moments[:, :4],
                "latent_logvar": moments[:, 4:],
                "text_embedding": texts,
            }
        )
    return encoded


def same(left: list[dict], right: list[dict]) -> bool:
    assert len(left) == len(right)
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )


def read(loader, *, num_epochs: int) -> list[dict]:
    batches = [batch for _ in range(num_epochs) for batch in loader]
    loader.close()
    return batches


def test_two_epochs_and_a_resume_within_the_first(place, encoder):
    source = source_of(place, crop="random", horizontal_flip_probability=0.5)
    expected = encode_here(encoder, source, num_epochs=2)
    loader = open_loader(source, num_decoders=2)
    batches, states = [], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
    loader.close()
    assert same(batches, expected)
    assert loader.num_images_delivered == 2 * NUM_BATCHES * BATCH_SIZE
    # What a stream gives behind the number of batches it was planned with, and behind a resume.
    resumed = open_loader(source, num_batches=5)
    resumed.load_state_dict(states[3])
    assert same(read(resumed, num_epochs=2), expected[4:])
    assert resumed.state_dict() == states[-1]


@pytest.mark.parametrize(
    ("data_format", "changes"),
    [
        ("synthetic", {"num_images": datasets.NUM_SAMPLES}),
        ("webdataset", {}),
        ("folder", {}),
        ("mds", {"shuffle": False}),
    ],
)
def test_every_format(tmp_path, encoder, data_format, changes):
    place = None
    if data_format != "synthetic":
        place = tmp_path / "data"
        datasets.WRITERS[data_format](place)
    source = source_of(place, data_format=data_format, **changes)
    assert same(read(open_loader(source), num_epochs=1), encode_here(encoder, source, num_epochs=1))


def test_an_encoder_that_is_killed_changes_nothing(place, encoder):
    source = source_of(place)
    loader = open_loader(source)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 2:
            (pid,) = find_workers(ENCODER)
            os.kill(pid, signal.SIGKILL)
    loader.close()
    assert find_workers(ENCODER) != [pid]
    assert same(batches, encode_here(encoder, source, num_epochs=1))
    assert loader.stats.num_failed_blocks == 0


def test_the_stages_wait_for_the_trainer():
    source = source_of(None, data_format="synthetic", num_images=1000 * BATCH_SIZE)
    loader = open_loader(source, num_batches=1000)
    batches = iter(loader)
    next(batches)

    def num_encoded() -> int:
        stage = loader.describe_stream().partition(f"MapBatches({ENCODER})")[2]
        return int(re.search(r"Total output num rows: (\d+) rows", stage)[1])

    found = [num_encoded()]
    while len(found) < 2 or found[-1] != found[-2]:
        time.sleep(5)
        found.append(num_encoded())
    loader.close()
    # What waits is bounded by memory; Ray Data lets every stage have a few batches more.
    assert found[-1] < 50


def test_an_encoder_that_is_stuck_ends_the_run(place):
    loader = open_loader(source_of(place, data_timeout_s=120.0), num_batches=100)
    batches = iter(loader)
    next(batches)
    loader._config = dataclasses.replace(loader._config, data_timeout_s=3.0)
    (pid,) = find_workers(ENCODER)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RunError, match="gave no batch for 3 s"):
            list(batches)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_bad_samples_are_counted_and_replaced_as_in_the_training_process(
    tmp_path, monkeypatch, encoder
):
    def make(index: int) -> bytes:
        return b"no picture" if index in (7, 20) else datasets.make_ramp_png(index)

    monkeypatch.setattr(datasets, "make_png", make)
    datasets.write_parquet(tmp_path / "data")
    source = source_of(tmp_path / "data", on_bad_sample="skip", max_bad_fraction=0.05)
    loader = open_loader(source)
    assert same(read(loader, num_epochs=1), encode_here(encoder, source, num_epochs=1))
    assert loader.stats.num_bad_samples == 2
    with pytest.raises(RunError, match="cannot be decoded.*--max_failed_blocks allows 0"):
        read(open_loader(dataclasses.replace(source, on_bad_sample="error")), num_epochs=1)


def test_a_damaged_file_is_an_error_unless_allowed(place, encoder):
    source = source_of(place, shuffle=False)
    expected = encode_here(encoder, source, num_epochs=1)
    _, file = sorted(place.iterdir())  # samples 30 to 48, in batches 3 to 5
    content = file.read_bytes()
    footer = 8 + int.from_bytes(content[-8:-4], "little")
    file.write_bytes(content[:4] + b"\0" * (len(content) - 4 - footer) + content[-footer:])
    with pytest.raises(RunError, match=f"{file.name} is damaged.*--max_failed_blocks allows 2"):
        read(open_loader(source, max_failed_blocks=2), num_epochs=1)
    loader = open_loader(source, max_failed_blocks=3)
    batches = read(loader, num_epochs=1)
    assert same(batches, [*expected[:3], *[expected[2]] * 3])
    assert loader.stats.num_failed_blocks == 3
    assert loader.num_images_delivered == NUM_BATCHES * BATCH_SIZE


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_encoders": 1000}, "take CPU 1001"),
        ({"encoder_resources": {"encoder": 1.0}}, "CPU 1, encoder 1"),
        ({"encoder_accelerator_type": "A10G"}, "accelerator_type:A10G"),
    ],
)
def test_a_cluster_that_is_too_small_is_told(place, settings, told):
    with pytest.raises(RunError, match=told):
        read(open_loader(source_of(place), **settings), num_epochs=1)
