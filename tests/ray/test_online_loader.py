"""Does Ray Data give a rank what the loader in its own process gives, as latents?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from sdbench import data
from sdbench.base.conditions import Condition, ModelInputs
from sdbench.base.errors import RunError
from sdbench.data.samples import SampleType
from sdbench.data.source import SourceConfig
from sdbench.encoding import ray_stream
from sdbench.measuring.ray_feed import read_stages
from sdbench.models.architecture import resolve_architecture
from sdbench.plan.resolve import resolve
from sdbench.ranks import ray_cluster
from sdbench.ranks.distributed import ALONE
from sdbench.settings.config import BenchmarkConfig, parse_request
from tests.data import datasets
from tests.data.s3_server import BUCKET
from tests.machines import make_cpu_machine, make_machine
from tests.refusals import refused

TINY = resolve_architecture("nano", revision=None, random_weights=False)
BATCH_SIZE, ENCODER_BATCH_SIZE = 8, 4
NUM_BATCHES = datasets.NUM_SAMPLES // BATCH_SIZE  # of an epoch: 6
ENCODER = "EncodeStage"
WIDTH_32 = ModelInputs(conditions=(Condition(shape=(77, 32)),))


@pytest.fixture(scope="module")
def cluster(address_here):
    ray_cluster.connect(address_here)
    import ray

    yield
    # A thread of Ray Data that waits for a block when its process leaves the cluster may crash it.
    for thread in threading.enumerate():
        if thread.name == "iter_threaded":
            thread.join(60)
            assert not thread.is_alive()
    ray.shutdown()


@pytest.fixture(scope="module")
def encoder():
    from sdbench.encoding.encoder import Encoder

    return Encoder(TINY, encoder_dtype="fp32", seed=3, device="cpu")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Parquet files of pictures in which a crop or a flip is seen."""
    monkeypatch.setattr(datasets, "make_png", datasets.make_ramp_png)
    datasets.write_parquet(tmp_path / "data")
    return tmp_path / "data"


def source_of(place: Path | str | None, data_format: str = "parquet", **changes) -> SourceConfig:
    of_tiny = {"device_batch_size": BATCH_SIZE, "inputs": WIDTH_32}
    return datasets.make_source(data_format, place, **of_tiny, **changes)


def open_loader(
    source: SourceConfig, *, num_batches: int = 2 * NUM_BATCHES, architecture=TINY, **settings
):
    from sdbench.encoding.online import OnlineLoader

    options = {
        "model_name": "nano",
        "online_preprocessing": True,
        "online_encoder_batch_size": ENCODER_BATCH_SIZE,
        "encoder_resources": {"CPU": 1.0},
        "encoder_dtype": "fp32",
    }
    return OnlineLoader(
        source,
        BenchmarkConfig(**{**options, **settings}),
        architecture=architecture,
        weights_seed=3,
        ranks=ALONE,
        num_batches=num_batches,
    )


def encode_here(encoder, source: SourceConfig, *, num_epochs: int) -> list[dict]:
    """The batches of the loader in this process, encoded in the parts that an actor takes."""
    loader = data.build(source)
    encoded = []
    for batch in (batch for _ in range(num_epochs) for batch in loader):
        images, input_ids = (
            batch[name].split(ENCODER_BATCH_SIZE) for name in ("image", "input_ids")
        )
        moments = [encoder.encode_images(part) for part in images]
        mean, logvar = torch.from_numpy(np.concatenate(moments)).chunk(2, dim=1)
        texts = [encoder.encode_captions({"input_ids": part}) for part in input_ids]
        texts = torch.from_numpy(np.concatenate([part["text_embedding"] for part in texts]))
        encoded.append({"latent_mean": mean, "latent_logvar": logvar, "text_embedding": texts})
    return encoded


def same(left: list[dict], right: list[dict]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )


def read(loader, *, num_epochs: int) -> list[dict]:
    batches = [batch for _ in range(num_epochs) for batch in loader]
    loader.close()
    return batches


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_two_epochs_and_a_resume_within_the_first(
    is_streamed, place, tmp_path, encoder, stream_here
):
    changes = {"crop": "random", "horizontal_flip_probability": 0.5}
    source = source_of(place, **changes)
    if is_streamed:
        datasets.write_tars(tmp_path / "tars")
        sizes = tmp_path / "sizes.json"
        sizes.write_text(json.dumps(datasets.TAR_SIZES))
        place = f"pipe:cat {tmp_path}/tars/{{00000..00002}}.tar"
        changes |= {"remote_files": "stream", "tar_sizes": str(sizes)}
        source = source_of(place, data_format="webdataset", **changes)
    as_workers = dataclasses.replace(source, num_workers=2)
    expected = encode_here(encoder, as_workers, num_epochs=2)
    loader = open_loader(source, num_decoders=2)
    batches, states = [], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
    assert same(batches, expected)
    assert loader.num_images_delivered == 2 * NUM_BATCHES * BATCH_SIZE
    # What a stream gives behind the number of batches it was planned with, and behind a resume.
    resumed = open_loader(source, num_batches=5, num_decoders=2)
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
def test_every_format(tmp_path, encoder, data_format, changes, stream_here):
    place = None
    if data_format != "synthetic":
        place = tmp_path / "data"
        datasets.WRITERS[data_format](place)
    source = source_of(place, data_format=data_format, **changes)
    assert same(read(open_loader(source), num_epochs=1), encode_here(encoder, source, num_epochs=1))


@pytest.mark.parametrize("name", ["tiny-sdxl", "tiny-flux"])
def test_models_of_other_families_get_all_conditions_and_sizes(name, place, stream_here):
    from sdbench.encoding.encoder import Encoder

    architecture = resolve_architecture(name, revision=None, random_weights=False)
    source = dataclasses.replace(
        source_of(place, crop="random", horizontal_flip_probability=0.5),
        inputs=architecture.inputs,
    )
    batches = read(open_loader(source, architecture=architecture, model_name=name), num_epochs=1)
    encoder = Encoder(architecture, encoder_dtype="fp32", seed=3, device="cpu")
    images = list(data.build(source))
    described = SampleType.MOMENTS.batch_tensors(source)
    for batch, loaded in zip(batches, images, strict=True):
        found = {
            part: (tuple(values.shape[1:]), str(values.dtype).removeprefix("torch."))
            for part, values in batch.items()
        }
        assert found == described
        for first in range(0, BATCH_SIZE, ENCODER_BATCH_SIZE):
            part = slice(first, first + ENCODER_BATCH_SIZE)
            encoded = encoder.encode_captions({key: one[part] for key, one in loaded.items()})
            assert all(np.array_equal(batch[key][part], encoded[key]) for key in encoded)
        assert ("sizes" in batch) == (name == "tiny-sdxl")
        assert "sizes" not in batch or torch.equal(batch["sizes"], loaded["sizes"])


def test_bad_samples_are_counted_and_replaced_as_in_the_training_process(
    tmp_path, monkeypatch, encoder, stream_here
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


def test_a_damaged_file_is_an_error_unless_allowed(place, encoder, stream_here):
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


def find_encoders() -> list[int]:
    found = []
    for worker in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            if f"({ENCODER})" in "".join(worker.cmdline()):
                found.append(worker.pid)
    return found


@pytest.mark.ray
def test_decoders_stream_each_file_once_and_a_killed_encoder_changes_nothing(
    cluster, s3, place, encoder
):
    num_stored = sum(path.stat().st_size for path in place.iterdir())
    s3.upload(place, place.parent.name)
    # As from a web server: the cluster's processes have no credentials.
    for path in place.iterdir():
        key = f"{place.parent.name}/{path.name}"
        s3.client().put_object_acl(Bucket=BUCKET, Key=key, ACL="public-read")
    url = f"{s3.url}/{BUCKET}/{place.parent.name}/{{0..1}}.parquet"
    source = source_of(url, remote_files="stream")
    expected = encode_here(encoder, dataclasses.replace(source, num_workers=2), num_epochs=2)
    cache = Path(os.environ["XDG_CACHE_HOME"])
    copies = set(cache.rglob("*"))
    loader = open_loader(source, num_decoders=2)
    s3.behave()
    batches = []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            if len(batches) == 2:
                (pid,) = find_encoders()
                os.kill(pid, signal.SIGKILL)
    # Of both decoders, each of which is a stage to Ray Data.
    assert read_stages(loader.describe_stream())["DecodeStage"].num_rows == 2 * NUM_BATCHES
    loader.close()
    assert find_encoders() != [pid]
    assert same(batches, expected)
    assert loader.stats.num_failed_blocks == 0
    # In each of two epochs once, and once more where a cut between the lanes goes through a file.
    assert 0 < s3.num_bytes < 3 * num_stored
    assert set(cache.rglob("*")) == copies


@pytest.mark.ray
def test_the_stages_wait_for_the_trainer_and_the_trainer_not_for_a_stuck_one(cluster, monkeypatch):
    source = source_of(None, data_format="synthetic", num_images=1000 * BATCH_SIZE)
    loader = open_loader(source, num_batches=1000)
    batches = iter(loader)
    next(batches)

    def num_encoded() -> int:
        return read_stages(loader.describe_stream())[ENCODER].num_rows

    found = [num_encoded()]
    while len(found) < 2 or found[-1] != found[-2]:
        time.sleep(5)
        found.append(num_encoded())
    # What waits is bounded by memory; Ray Data lets every stage have a few batches more.
    assert found[-1] < 50
    loader._end._timeout_s = 3.0
    (pid,) = find_encoders()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RunError, match="gave no batch for 3 s"):
            list(batches)
    finally:
        os.kill(pid, signal.SIGKILL)
    # Another encoder takes its place, so that the stream gives a row and can be ended. On a busy
    # machine its start takes longer than a run would wait, and a stream that goes on would keep the
    # thread that `cluster` waits for.
    monkeypatch.setattr(ray_stream, "PATIENCE_S", 60.0)
    loader.close()


@pytest.mark.ray
def test_a_cluster_that_is_too_small_is_told(cluster):
    source = source_of(None, data_format="synthetic", num_images=BATCH_SIZE)
    settings = {"encoder_resources": {"encoder": 1.0}, "encoder_accelerator_type": "A10G"}
    with pytest.raises(RunError, match="accelerator_type:A10G"):
        read(open_loader(source, **settings), num_epochs=1)


ON_RAY = ("--online_preprocessing", "--engine", "ray")


def plan(*argv: str, machine=None):
    words = ["--model_name", "nano", "--use_synth_data", *argv]
    request = parse_request(words, description="", epilog="")
    return resolve(request, machine=machine or make_cpu_machine(), ranks=ALONE)


@pytest.mark.parametrize(
    ("flag", "argv"),
    [
        ("--latents or --online_preprocessing", (*ON_RAY, "--latents", "precomputed")),
        ("--num_workers or --online_preprocessing", (*ON_RAY, "--num_workers", "2")),
        ("--compile", (*ON_RAY, "--compile", "encoders")),
    ],
)
def test_what_the_encoders_cannot_do_is_refused(flag, argv):
    with refused(flag):
        plan(*argv)


@pytest.mark.slow
def test_a_step_has_no_encoders():
    argv = ("--device_train_microbatch_size", "1", "--batch_size", "2")
    beside, within = (
        plan(*argv, *more, machine=make_machine()) for more in (ON_RAY, ("--engine", "ray"))
    )
    assert beside.memory.total_gib < within.memory.total_gib
    assert (beside.config.num_workers, within.config.num_workers) == (0, 8)
