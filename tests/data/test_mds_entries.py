"""Is an index.json of another hand refused where it cannot be true, by every command?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from streaming.base.compression import decompress

import data as program
from sdbench.cli import main
from tests.data import datasets
from tests.data.datasets import edit_index, flip_a_bit, read_epoch, read_files
from tests.refusals import printed_refusal, refused

Edit = Callable[[list[dict]], None]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mds") / "pairs"
    datasets.write_mds(folder)
    return folder


@pytest.fixture
def mds_folder(written, tmp_path) -> Path:
    """The data set of the other tests, written once for all of these."""
    return Path(shutil.copytree(written, tmp_path / "pairs"))


def put(value: object, key: str) -> Edit:
    """An edit of shard 2."""
    return lambda shards: shards[2].update({key: value})


def repeat(name: str) -> Edit:
    """An edit that names the first shard once more."""
    return lambda shards: shards.append(
        {**shards[0], "raw_data": {**shards[0]["raw_data"], "basename": name}}
    )


# What cannot be true, with what is said of it.
FALSE = {
    "a float": (put(16.0, "samples"), "$.shards[2].samples: 16.0 is not of type 'integer'"),
    "no bytes": (
        lambda shards: shards[2]["raw_data"].pop("bytes"),
        "$.shards[2].raw_data: 'bytes' is a required",
    ),
    "a negative column": (put([-4, 4], "column_sizes"), "$.shards[2].column_sizes[0]: -4 is less"),
    "columns": (put([4], "column_sizes"), "shard 2: column_names, column_encodings and column_s"),
    "unknown": (put(1, "offset"), "$.shards[2]: Additional properties are not allowed ('offset'"),
    "no shards": (list.clear, "$.shards: []"),
    "other shards": (put("csv", "format"), "$.shards[2].format: 'csv' is not one of ['mds']"),
    "a list": (lambda shards: shards.insert(2, []), "$.shards[2]: [] is not of type 'object'"),
    "twice": (repeat("./shard.00000.mds"), "shard 4: shard.00000.mds is named twice"),
    "above": (repeat("a/../../x.mds"), "shard 4: a/../../x.mds lies outside the folder"),
    "elsewhere": (repeat("/tmp/x.mds"), "shard 4: /tmp/x.mds lies outside the folder"),
    "the index": (repeat("index.json"), "shard 4: index.json is named twice"),
    # Of these the index alone could be true: the shard's own header is another.
    "too few": (put(12, "samples"), "its header says 16 samples, index.json says 12"),
    "sizes": (
        put([9, None], "column_sizes"),
        "its header says column_sizes [None, None], index.json says [9, None]",
    ),
    "too many": (put(10**30, "samples"), "its header says 16 samples, index.json says 1"),
    # As text: Python's json takes other encodings of bytes, and Streaming does not.
    "nested": (b'{"shards": ' + b"[" * 100_000, "nested too deeply"),
    "UTF-16": ("{}".encode("utf-16"), "codec can't decode"),
}


@pytest.mark.parametrize("kind", FALSE)
def test_an_index_that_cannot_be_true_is_refused(kind, mds_folder, tmp_path, capsys):
    edit, told = FALSE[kind]
    if isinstance(edit, bytes):
        (mds_folder / "index.json").write_bytes(edit)
    else:
        edit_index(mds_folder, edit)
    check_refused(mds_folder, told, tmp_path, capsys)


def check_refused(folder: Path, told: str, tmp_path: Path, capsys) -> None:
    place = ["--remote", str(folder), "--image_size", "16", "--batch_size", "4"]
    assert program.main([*place, "--results_dir", str(tmp_path / "runs")]) == 2
    assert told in printed_refusal(capsys.readouterr().err).what
    out = ["--folder", str(tmp_path / "out"), "--num_workers", "0"]
    assert main(["convert", str(folder), *out]) == 2
    assert told in printed_refusal(capsys.readouterr().err).what
    assert not (tmp_path / "out").exists()
    assert main(["verify-data", str(folder), "--num_workers", "0"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"broken: {folder}/")
    assert told in printed
    assert "1 broken thing was found" in printed


@pytest.mark.parametrize("position", [4, 20, 4 + 4 * 16])
def test_a_header_that_leads_out_of_its_shard_is_named(position, tmp_path, capsys):
    """Without a hash nothing else tells."""
    folder = tmp_path / "pairs"
    datasets.write_mds(folder, hashes=())
    flip_a_bit(folder / "shard.00002.mds", position=position + 3, bit=7)
    check_refused(folder, "samples lie outside of it or overlap, by its header", tmp_path, capsys)


def test_nothing_is_written_outside_of_the_folder_for_copies(written, tmp_path):
    """A shard lies beside the folder of the data set."""
    folder = Path(shutil.copytree(written, tmp_path / "data" / "pairs"))
    (folder / "shard.00003.mds").rename(tmp_path / "data" / "x.mds")
    edit_index(folder, lambda shards: shards[3]["raw_data"].update(basename="../x.mds"))
    remote, local = str(folder), str(tmp_path / "copies" / "cache")
    flags = ["--image_size", "16", "--batch_size", "4", "--results_dir", str(tmp_path / "runs")]
    assert program.main(["--remote", remote, "--local", local, *flags]) == 2
    assert main(["verify-data", remote, "--local", local, "--num_workers", "0"]) == 1
    with refused(value=f"{remote}/index.json"):
        program.StreamingLAIONDataset(remote, local, None, False, image_size=16)
    assert set(read_files(tmp_path / "copies")) <= {"cache/index.json"}


def test_shards_in_folders_of_their_own_are_read(mds_folder, tmp_path):
    """As Streaming's `merge_index` names them."""

    def move(shards: list[dict]) -> None:
        for number, shard in enumerate(shards):
            name = shard["raw_data"]["basename"]
            shard["raw_data"]["basename"] = moved = f"{number}/{name}"
            (mds_folder / f"{number}").mkdir()
            (mds_folder / name).rename(mds_folder / moved)

    edit_index(mds_folder, move)
    for local in (None, str(tmp_path / "cache")):
        config = datasets.make_source("mds", mds_folder, local=local, device_batch_size=7)
        assert sorted(read_epoch(config)) == list(range(49))


def test_shards_that_were_unpacked_by_hand_stay(tmp_path):
    """Streaming would delete them, as it has the compressed forms for the originals."""
    folder = tmp_path / "pairs"
    datasets.write_mds(folder, compression="zstd")
    for path in sorted(folder.glob("*.zstd")):
        path.with_suffix("").write_bytes(decompress("zstd", path.read_bytes()))
        path.unlink()
    before = read_files(folder)
    assert len(before) == 5
    config = datasets.make_source("mds", folder, device_batch_size=7)
    assert sorted(read_epoch(config)) == list(range(49))
    assert read_files(folder) == before
