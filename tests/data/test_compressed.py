"""Is an MDS data set of compressed shards read like its twin, and its folder left as it is?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from streaming.base.compression import compress
from streaming.base.hashing import get_hash

from data import main as data_main
from sdbench import data
from sdbench.cli import main as sdbench_main
from tests.data import datasets
from tests.data.datasets import read_files


@pytest.fixture(params=["zstd"])
def packed(request, tmp_path, temporary_folder) -> Path:
    """The samples of `mds_folder`, compressed; what is unpacked is the test's own."""
    datasets.write_mds(tmp_path / "packed", compression=request.param)
    return tmp_path / "packed"


def tensors(folder: Path, **changes) -> dict[str, torch.Tensor]:
    batches = list(data.build(datasets.make_source("mds", folder, **changes)))
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize(
    ("packed", "shuffle", "num_workers"),
    [("zstd", True, 2), ("zstd", False, 2), ("gz", True, 0), ("br", False, 0)],
    indirect=["packed"],
)
def test_training_sees_the_samples_of_the_twin(packed, mds_folder, shuffle, num_workers, capsys):
    before = read_files(packed)
    found = tensors(packed, shuffle=shuffle, num_workers=num_workers)
    expected = tensors(mds_folder, shuffle=shuffle, num_workers=num_workers)
    assert found.keys() == expected.keys() == {"image", "input_ids"}
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert len(found["image"]) == 48
    assert sdbench_main(["verify-data", str(packed), "--deep", "--num_workers", "0"]) == 0
    told = capsys.readouterr()
    assert "each of the 49 samples can be used" in told.out
    assert f"The packed files of {packed} are unpacked to " in told.err
    assert read_files(packed) == before


def pack_zeros(shards: list[dict]) -> None:
    data = compress("zstd", bytes(shards[2]["raw_data"]["bytes"]))
    Path("packed/shard.00002.mds.zstd").write_bytes(data)
    shards[2]["zip_data"].update(bytes=len(data), hashes={"xxh64": get_hash("xxh64", data)})


@pytest.mark.parametrize("edit", [pack_zeros, lambda shards: shards[2].update(samples=12)])
def test_data_that_was_packed_wrongly_is_named(edit, packed, capsys):
    """The compressed form is what the index says, and what it holds is not, or is more."""
    datasets.edit_index(packed, edit)
    check_both_name(packed, "shard.00002.mds", capsys)


@pytest.mark.slow
def test_a_damaged_compressed_form_is_named_until_it_is_repaired(packed, capsys):
    path = packed / "shard.00001.mds.zstd"
    sound = path.read_bytes()
    for position in (len(sound) // 2, len(sound) - 1):
        path.write_bytes(sound)
        datasets.flip_a_bit(path, position=position)
        printed = check_both_name(packed, path.name, capsys)
        assert f"{path.name}: its xxh64 is not the one in index.json" in printed
    path.write_bytes(sound)
    assert sdbench_main(["verify-data", str(packed), "--deep"]) == 0
    assert len(tensors(packed)["image"]) == 48


def check_both_name(folder: Path, name: str, capsys) -> str:
    before = read_files(folder)
    for shuffle in ("--shuffle", "--no_shuffle"):
        flags = ["--image_size", "32", "--batch_size", "4", "--num_workers", "2", shuffle]
        flags += ["--results_dir", f"{folder}-results"]
        assert data_main(["--remote", str(folder), *flags]) == 1
        assert name in capsys.readouterr().err
    assert sdbench_main(["verify-data", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert name in printed
    assert "1 broken thing was found" in printed
    assert read_files(folder) == before
    return printed
