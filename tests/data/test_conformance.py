"""Does every source keep the contract of `data.build`?"""

from __future__ import annotations

import itertools
import pickle
import tempfile
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.batches.tokenizer import CaptionTokenizer
from sdbench.data.source import SourceConfig
from tests.data import datasets
from tests.data.datasets import NUM_SAMPLES, indices
from tests.forked import run_in_group
from tests.refusals import PLACE_FLAGS, TOO_FEW_FLAG, refused

STORED = tuple(datasets.WRITERS)
KINDS = ("synthetic", "synthetic latents", *STORED)
# Streaming learns its rank from the environment, so those need a process for each rank.
MDS = ("mds", "mds latents")
IN_ONE_PROCESS = tuple(kind for kind in STORED if kind not in MDS)

MakeConfig = Callable[..., SourceConfig]


@pytest.fixture(scope="module")
def make_config(tmp_path_factory) -> MakeConfig:
    """A function from a kind of data, and what differs, to the config of its source."""
    root = tmp_path_factory.mktemp("data")
    for kind, write in datasets.WRITERS.items():
        write(root / kind)

    def make(kind: str, **changes) -> SourceConfig:
        if kind in STORED:
            return datasets.make_source(kind, root / kind, **changes)
        return datasets.make_source(kind, None, num_images=NUM_SAMPLES, **changes)

    return make


def same(left: list[dict], right: list[dict]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [*((kind, 0) for kind in KINDS), ("synthetic", 2), ("mds", 2), ("folder", 2)],
)
def test_two_epochs_have_whole_batches_of_the_contract(kind, num_workers, make_config):
    loader = data.build(make_config(kind, num_workers=num_workers))
    assert len(loader) == 12  # 49 // 4
    first, second = list(loader), list(loader)
    assert loader.stats.num_images_delivered == 2 * 48
    assert loader.stats.num_bad_samples == 0
    for batch in first + second:
        check_batch(batch, kind=kind)
    if kind in STORED:
        assert loader.stats.bytes_read > 0
        for epoch in (first, second):
            assert len(set(indices(epoch))) == 48
            for batch in epoch:
                check_captions(batch)
        assert indices(first) != indices(second)


def check_batch(batch: dict[str, torch.Tensor], *, kind: str) -> None:
    described = {name: (tuple(values.shape), values.dtype) for name, values in batch.items()}
    latent = ((4, *datasets.LATENT_SHAPE), torch.float16)
    embedding = ((4, *datasets.EMBEDDING_SHAPE), torch.float16)
    if kind == "parquet latents":
        expected = {"latent": latent, "text_embedding": embedding}
    elif kind.endswith("latents"):
        expected = {"latent_mean": latent, "latent_logvar": latent, "text_embedding": embedding}
    else:
        image = ((4, 3, 32, 32), torch.uint8)
        expected = {"image": image, "input_ids": ((4, 77), torch.int64)}
        assert (batch["input_ids"][:, 0] == 49406).all()
        assert (batch["input_ids"] == 49407).any(dim=1).all()
    assert described == expected
    assert all(torch.isfinite(values.float()).all() for values in batch.values())


def check_captions(batch: dict[str, torch.Tensor]) -> None:
    """Each sample has its own caption, and its own latents."""
    numbers = indices([batch])
    if "image" in batch:
        captions = [datasets.make_caption(number) for number in numbers]
        expected = torch.from_numpy(CaptionTokenizer(pad_token_id=0)(captions))
        assert torch.equal(batch["input_ids"], expected)
    else:
        assert batch["text_embedding"][:, 0, 0].tolist() == [number / 16 for number in numbers]
    if "latent_logvar" in batch:
        expected = [-number / 8 for number in numbers]
        assert batch["latent_logvar"][:, 0, 0, 0].tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_seed_decides_samples_and_order_whatever_the_workers(kind, make_config):
    first = list(data.build(make_config(kind)))
    assert same(first, list(data.build(make_config(kind, num_workers=2))))
    assert not same(first, list(data.build(make_config(kind, seed=4))))


@pytest.mark.parametrize("kind", STORED)
def test_without_shuffling_the_order_is_the_stored_one(kind, make_config):
    loader = data.build(make_config(kind, shuffle=False))
    assert indices(loader) == indices(loader) == list(range(48))


SEED, WIDTH, HEIGHT = 3, 60, 40


def expected_square(index: int, *, epoch: int) -> np.ndarray:
    """The square of a sample as PIL cuts and mirrors it, (3, HEIGHT, HEIGHT)."""
    x, _, flip, _ = np.random.default_rng([SEED, epoch, index]).random(4)
    left = round(x * (WIDTH - HEIGHT))
    picture = Image.fromarray(datasets.make_ramp(index)).crop((left, 0, left + HEIGHT, HEIGHT))
    square = ImageOps.mirror(picture) if flip < 0.5 else picture
    return np.asarray(square).transpose(2, 0, 1)


@pytest.mark.parametrize("kind", ["webdataset", "mds"])
def test_crops_and_flips_follow_from_seed_epoch_and_sample(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "make_png", datasets.make_ramp_png)
    datasets.WRITERS[kind](tmp_path / "data")
    options = {"num_workers": 2, "crop": "random", "horizontal_flip_probability": 0.5}
    config = datasets.make_source(kind, tmp_path / "data", image_size=HEIGHT, seed=SEED, **options)
    loader = data.build(config)
    for epoch, batches in enumerate([list(loader), list(loader)]):
        # The colours of a pixel lie side by side.
        channels_last = torch.channels_last
        assert all(one["image"].is_contiguous(memory_format=channels_last) for one in batches)
        for square in torch.cat([batch["image"] for batch in batches]).numpy():
            assert np.array_equal(square, expected_square(int(square[0, 0, 0]), epoch=epoch))


# Inside an epoch, at its last batch, and when the loader has found it to be over.
STOPS = (5, 12, None)


@pytest.mark.parametrize(
    ("kind", "num_workers", "num_batches"),
    [
        *((kind, 0, 5) for kind in STORED),
        *itertools.product(("folder", "mds"), (2,), STOPS),
        ("webdataset", 2, 12),
        ("parquet", 2, None),
    ],
)
def test_a_resumed_loader_gives_exactly_what_remains(kind, num_workers, num_batches, make_config):
    whole = data.build(make_config(kind))
    epochs = [list(whole), list(whole), list(whole)]
    del whole

    stopped = data.build(make_config(kind, num_workers=num_workers))
    list(stopped)
    batches = iter(stopped)
    seen = list(itertools.islice(batches, num_batches))
    state = pickle.loads(pickle.dumps(stopped.state_dict()))
    del stopped, batches
    assert state["num_samples"] == NUM_SAMPLES

    resumed = data.build(make_config(kind, num_workers=num_workers))
    resumed.load_state_dict(state)
    remaining = itertools.islice(itertools.chain(resumed, resumed), 24 - len(seen))
    assert same(seen + list(remaining), epochs[1] + epochs[2])


@pytest.mark.parametrize(
    ("kind", "num_workers"), [*((kind, 0) for kind in STORED), ("webdataset", 2)]
)
def test_the_samples_of_past_batches_are_named(kind, num_workers, make_config):
    config = make_config(kind, num_workers=num_workers)
    samples = data.open_samples(config)
    number_of = {samples.read(index).name: index for index in range(NUM_SAMPLES)}
    assert len(number_of) == NUM_SAMPLES

    def named(loader, *, num_back: int) -> list[int]:
        names = loader.names_before(loader.state_dict(), num_back=num_back)
        return [number_of[name] for name in names]

    loader = data.build(config)
    seen = [*loader, *itertools.islice(loader, 5)]
    for back in range(len(seen)):  # to the first batch of the epoch before
        assert named(loader, num_back=back) == indices([seen[-1 - back]])
    state = loader.state_dict()
    del loader
    resumed = data.build(config)
    resumed.load_state_dict(state)
    (batch,) = itertools.islice(resumed, 1)
    assert named(resumed, num_back=0) == indices([batch])


@pytest.mark.parametrize("kind", ["synthetic", "folder"])
def test_float32_images_are_the_same_pixels_in_minus_one_to_one(kind, make_config):
    pixels = next(iter(data.build(make_config(kind))))["image"]
    floats = next(iter(data.build(make_config(kind, image_dtype="float32"))))["image"]
    assert floats.dtype == torch.float32
    assert floats.min() >= -1
    assert floats.max() <= 1
    assert torch.equal(((floats + 1) * 127.5).round().to(torch.uint8), pixels)


@pytest.mark.parametrize("kind", IN_ONE_PROCESS)
def test_two_ranks_share_the_batches_of_one(kind, make_config):
    alone = data.build(make_config(kind, device_batch_size=6))
    ranks = [
        data.build(make_config(kind, device_batch_size=3, rank=rank, world_size=2))
        for rank in range(2)
    ]
    parts = [list(loader) for loader in ranks]
    assert [len(part) for part in parts] == [8, 8]  # 49 // 6
    for batch, *shares in zip(alone, *parts, strict=True):
        assert indices([batch]) == indices(shares)


def test_two_ranks_of_streaming_get_different_samples(make_config, tmp_path):
    def read_as(rank: int) -> None:
        read = []
        for kind in MDS:
            config = make_config(kind, rank=rank, world_size=2)
            loader = data.build(config)
            read.append(indices(list(loader)))
            samples = data.open_samples(config)
            number_of = {samples.read(index).name: index for index in range(len(samples))}
            state = loader.state_dict()
            names = [loader.names_before(state, num_back=back) for back in range(len(loader))]
            assert [number_of[name] for batch in names[::-1] for name in batch] == read[-1]
        (tmp_path / f"read{rank}").write_bytes(pickle.dumps(read))

    run_in_group(read_as, tmp_path)
    read = [pickle.loads((tmp_path / f"read{rank}").read_bytes()) for rank in range(2)]
    for first, second in zip(*read, strict=True):
        assert len(first) == len(second) == 24  # 49 // (2 x 4) x 4
        assert len(set(first + second)) == 48


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_samples_than_a_batch(kind, make_config):
    assert data.check(make_config(kind, device_batch_size=24, world_size=2)) == NUM_SAMPLES
    with refused(TOO_FEW_FLAG, value=50, allowed="at most 48"):
        data.check(make_config(kind, device_batch_size=25, world_size=2))
    with refused(TOO_FEW_FLAG, value=50, allowed="at most 49 ranks"):
        data.check(make_config(kind, device_batch_size=1, world_size=50))


@pytest.mark.parametrize("kind", [kind for kind in STORED if "latents" not in kind])
def test_images_are_not_latents(kind, make_config):
    has_columns = kind != "folder"
    with refused(PLACE_FLAGS if has_columns else "--latents"):
        data.check(make_config(kind, latents="precomputed"))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["folder", "mds latents"])
def test_silence_is_an_error(kind, num_workers, make_config, monkeypatch):
    loader = data.build(make_config(kind, num_workers=num_workers, data_timeout_s=1))

    # Longer than the time-out; at its end a worker is waited for.
    monkeypatch.setattr(loader.collate_fn.samples, "read", lambda index: time.sleep(2.5))
    with pytest.raises(RunError, match=r"no batch for 1 s, after 0 images.*--data_timeout_s"):
        next(iter(loader))


def test_a_short_epoch_is_an_error(make_config, monkeypatch):
    loader = data.build(make_config("folder"))
    monkeypatch.setattr(type(loader), "__len__", lambda self: 13)
    with pytest.raises(RunError, match="has 52 images, and 48 were delivered") as caught:
        list(loader)
    assert caught.value.status == "invalid"


def test_a_folder_that_workers_cannot_open_sockets_in_is_refused(monkeypatch, make_config):
    # 107 bytes less /pymp-12345678/listener-12345678.
    longest = "/tmp/" + 70 * "x"
    for folder, num_workers in ((longest, 2), (longest + "x", 0)):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        data.build(make_config("synthetic", num_workers=num_workers))
    with refused("TMPDIR", value=longest + "x", allowed="at most 75 bytes, or --num_workers 0"):
        data.build(make_config("synthetic", num_workers=2))
