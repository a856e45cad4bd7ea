"""The reference data set and ours read the same pictures and captions."""

from __future__ import annotations

import torch

from sdbench import data
from sdbench.data.source import SourceConfig
from tests.data import datasets
from tests.reference.diffusion_benchmark_dataset import ReferenceDataset, load_slow_tokenizer


def test_both_read_the_same_square_pictures_and_captions(tmp_path):
    datasets.write_mds(tmp_path / "data")
    reference = ReferenceDataset(
        tmp_path / "data", image_size=16, tokenizer=load_slow_tokenizer(tmp_path)
    )
    expected = [reference[index] for index in range(8)]
    del reference
    config = SourceConfig(
        data_format="mds",
        remote=str(tmp_path / "data"),
        image_size=16,
        device_batch_size=8,
        seed=0,
        shuffle=False,
    )
    batch = next(iter(data.build(config)))
    pixels = torch.stack([sample["image"] for sample in expected]) * 255
    assert torch.equal(pixels.round().to(torch.uint8), batch["image"])
    assert torch.equal(torch.stack([sample["caption"] for sample in expected]), batch["input_ids"])
