"""The reference data set and ours read the same pictures and captions; both comparisons run."""

from __future__ import annotations

import json

import torch

from sdbench import data
from sdbench.data.source import SourceConfig
from tests.data import datasets
from tests.reference.diffusion_benchmark_dataset import ReferenceDataset, load_slow_tokenizer
from tools import compare_datasets, compare_transport


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


def test_the_comparison_ends_with_a_ratio(tmp_path):
    datasets.write_mds(tmp_path / "data")
    output = tmp_path / "comparison.json"
    argv = [str(tmp_path / "data"), "--image_size", "16", "--repeats", "2"]
    assert compare_datasets.main([*argv, "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert len(result["images_per_second"]["ours"]) == 2
    assert result["ratio"] > 0


def test_the_cost_of_crossing_ends_with_a_ratio(tmp_path):
    datasets.write_mds_latents(tmp_path / "data")
    output = tmp_path / "comparison.json"
    sizes = ["--image_size", "32", "--text_embedding_dim", "8", "--batch_size", "8"]
    argv = [str(tmp_path / "data"), *sizes, "--num_workers", "1", "--repeats", "2"]
    assert compare_transport.main([*argv, "--output", str(output)]) == 0
    assert set(json.loads(output.read_text())["median_samples_per_second"]) == {
        "no workers",
        "new memory",
        "slots",
    }
