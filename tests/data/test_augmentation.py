"""Which crops and flips there are, by an independent crop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from sdbench import data
from sdbench.data.source import SourceConfig
from tests.data import datasets

SEED, WIDTH, HEIGHT = 3, 60, 40


@pytest.fixture(params=["webdataset", "mds"])
def config(request, tmp_path, monkeypatch) -> SourceConfig:
    """Pictures whose pixels tell their number, column and row; squares of them are not resized."""
    monkeypatch.setattr(datasets, "make_png", datasets.make_ramp_png)
    datasets.WRITERS[request.param](tmp_path / "data")
    options = {"num_workers": 2, "crop": "random", "horizontal_flip_probability": 0.5}
    return datasets.make_source(
        request.param, tmp_path / "data", image_size=HEIGHT, seed=SEED, **options
    )


def expected_square(index: int, *, epoch: int) -> np.ndarray:
    """The square of a sample as PIL cuts and mirrors it, (3, HEIGHT, HEIGHT)."""
    x, _, flip, _ = np.random.default_rng([SEED, epoch, index]).random(4)
    left = round(x * (WIDTH - HEIGHT))
    picture = Image.fromarray(datasets.make_ramp(index)).crop((left, 0, left + HEIGHT, HEIGHT))
    square = ImageOps.mirror(picture) if flip < 0.5 else picture
    return np.asarray(square).transpose(2, 0, 1)


def test_they_follow_from_seed_epoch_and_sample(config):
    loader = data.build(config)
    for epoch, batches in enumerate([list(loader), list(loader)]):
        # The colours of a pixel lie side by side.
        channels_last = torch.channels_last
        assert all(one["image"].is_contiguous(memory_format=channels_last) for one in batches)
        for square in torch.cat([batch["image"] for batch in batches]).numpy():
            assert np.array_equal(square, expected_square(int(square[0, 0, 0]), epoch=epoch))
