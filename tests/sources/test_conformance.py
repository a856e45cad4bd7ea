"""Does every source keep the contract of `sources.build`?"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys

import pytest
import torch

from sdbench import sources
from sdbench.errors import RunError
from sdbench.sources.loader import CheckedLoader

SOURCE_NAMES = sorted(sources.SOURCES)

READ_AS_RANK = """
import pickle, sys
from sdbench import sources
with open(sys.argv[1], "rb") as file:
    config = pickle.load(file)
batches = [batch["image"] for batch in sources.build(config)]
with open(sys.argv[2], "wb") as file:
    pickle.dump([image.numpy().tobytes() for batch in batches for image in batch], file)
"""


def read_all(config) -> list[dict]:
    return list(sources.build(config))


def same(left: list[dict], right: list[dict]) -> bool:
    return all(
        torch.equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SOURCE_NAMES)
def test_two_epochs_have_whole_batches_of_the_contract(name, num_workers, make_config):
    loader = sources.build(make_config(name, num_workers=num_workers))
    assert len(loader) == 12  # 49 // 4
    first, second = list(loader), list(loader)
    assert loader.num_images_delivered == 2 * 48
    for batch in first + second:
        assert set(batch) == {"image", "input_ids"}
        assert batch["image"].shape == (4, 3, 32, 32)
        assert batch["image"].dtype == torch.uint8
        assert batch["input_ids"].shape == (4, 77)
        assert batch["input_ids"].dtype == torch.int64
        assert (batch["input_ids"][:, 0] == 49406).all()
        assert (batch["input_ids"] == 49407).any(dim=1).all()


@pytest.mark.parametrize("name", SOURCE_NAMES)
def test_seed_decides_samples_and_order_whatever_the_workers(name, make_config):
    first = read_all(make_config(name))
    assert same(first, read_all(make_config(name, num_workers=2)))
    assert not same(first, read_all(make_config(name, seed=4)))


@pytest.mark.parametrize("name", SOURCE_NAMES)
def test_float32_images_are_the_same_pixels_in_minus_one_to_one(name, make_config):
    pixels = read_all(make_config(name))[0]["image"]
    floats = read_all(make_config(name, image_dtype="float32"))[0]["image"]
    assert floats.dtype == torch.float32
    assert floats.min() >= -1
    assert floats.max() <= 1
    assert torch.equal(((floats + 1) * 127.5).round().to(torch.uint8), pixels)


@pytest.mark.parametrize("name", SOURCE_NAMES)
def test_two_ranks_get_different_samples(name, make_config, tmp_path):
    """Each rank is a process: Streaming reads its rank from the environment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        config = make_config(name, rank=rank, world_size=2)
        (tmp_path / f"config{rank}").write_bytes(pickle.dumps(config))
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        place = {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        files = [str(tmp_path / f"config{rank}"), str(tmp_path / f"images{rank}")]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", READ_AS_RANK, *files],
                env=os.environ | {key: str(value) for key, value in place.items()},
            )
        )
    assert [process.wait(timeout=100) for process in processes] == [0, 0]
    images = [pickle.loads((tmp_path / f"images{rank}").read_bytes()) for rank in range(2)]
    assert [len(rank) for rank in images] == [24, 24]  # 49 // (2 x 4) batches of 4
    assert not set(images[0]) & set(images[1])
    assert len(set(images[0])) > 1


def test_synthetic_samples_are_many_and_use_the_whole_vocabulary(make_config):
    batches = read_all(make_config("synthetic", num_images=6400))
    images = {image.numpy().tobytes() for batch in batches for image in batch["image"]}
    assert len(images) == 64
    ids = torch.cat([batch["input_ids"] for batch in batches])[:, 1:-1]
    # 64 x 75 = 4,800 draws from 49,408: the chance that none is in the lowest or the highest
    # thousand is (1 - 1000 / 49408) ^ 4800 < 1e-42.
    assert ids.min() < 1000
    assert ids.max() > 48_408


def test_synthetic_latents_have_the_shapes_of_the_contract(make_config):
    config = make_config("synthetic", latents="precomputed", text_embedding_dim=24)
    batch = read_all(config)[0]
    assert {name: tuple(values.shape) for name, values in batch.items()} == {
        "latent_mean": (4, 4, 4, 4),
        "latent_logvar": (4, 4, 4, 4),
        "text_embedding": (4, 77, 24),
    }
    assert {values.dtype for values in batch.values()} == {torch.float16}


class Short(torch.utils.data.IterableDataset):
    """Promises 12 samples and gives 8."""

    def __len__(self):
        return 12

    def __iter__(self):
        yield from ({"image": torch.zeros(1)} for _ in range(8))


class Stuck(Short):
    def __iter__(self):
        torch.multiprocessing.Event().wait()


def test_a_short_epoch_is_an_error_with_both_counts(make_config):
    loader = CheckedLoader(Short(), config=make_config("synthetic"))
    with pytest.raises(RunError, match=r"has 12 images, and 8 were delivered"):
        list(loader)
    assert loader.num_images_delivered == 8


def test_a_stuck_worker_is_an_error(make_config):
    loader = CheckedLoader(Stuck(), config=make_config("synthetic", num_workers=1), timeout_s=1)
    with pytest.raises(RunError, match=r"failed after 0 images .*timed out after 1 seconds"):
        list(loader)
