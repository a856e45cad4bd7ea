"""Does verify-data find what is broken, and name it?"""

from __future__ import annotations

import numpy as np
import pytest

from sdbench.data.convert.verify import main as verify_data
from tests.data import datasets
from tests.refusals import refused


def main(*arguments: object) -> int:
    """Verify in this process."""
    return verify_data(["--num_workers", "0", *map(str, arguments)])


@pytest.mark.parametrize("kind", datasets.WRITERS)
def test_sound_data(tmp_path, capsys, kind):
    datasets.WRITERS[kind](tmp_path / "data")
    assert main(tmp_path / "data", "--text_embedding_dim", 8) == 0
    checked = "49 samples are listed, and no caption is missing (--deep opens the pictures)"
    if kind.endswith("latents"):
        checked = "49 samples are listed (--deep opens them)"
    if kind.startswith("mds"):
        num_shards = len(list((tmp_path / "data").glob("*.mds")))
        checked = f"{num_shards} shards are what index.json says (only --deep looks at samples)"
    assert capsys.readouterr().out == f"All is well: {checked}.\n"
    assert main(tmp_path / "data", "--deep", "--text_embedding_dim", 8) == 0
    assert capsys.readouterr().out == "All is well: each of the 49 samples can be used.\n"
    if kind == "parquet latents":  # of a model with another width than the default
        with refused("--text_embedding_dim"):
            main(tmp_path / "data")


def test_every_broken_shard_is_named(mds_folder, capsys):
    (mds_folder / "shard.00000.mds").unlink()
    datasets.flip_a_bit(mds_folder / "shard.00001.mds", position=500_000)
    with (mds_folder / "shard.00003.mds").open("r+b") as file:
        file.truncate(1000)
    assert main(mds_folder, "--deep") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"broken: {mds_folder}/shard.00000.mds: missing.",
        f"broken: {mds_folder}/shard.00001.mds: its xxh64 is not the one in index.json.",
    ]
    assert lines[2].startswith(f"broken: {mds_folder}/shard.00003.mds: it has 1000 bytes, ")
    assert lines[3:] == ["3 broken things were found."]


def test_every_hash_is_compared(tmp_path, capsys):
    datasets.write_mds(tmp_path, hashes=("sha1", "xxh64"))
    assert main(tmp_path) == 0

    def edit(shards):
        shards[2]["raw_data"]["hashes"]["sha1"] = "0" * 40
        shards[3]["raw_data"]["hashes"]["crc7"] = "0"

    datasets.edit_index(tmp_path, edit)
    assert main(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "shard.00002.mds: its sha1 is not the one in index.json" in printed
    assert "shard.00003.mds: its hash in index.json, crc7, is not known" in printed
    assert "2 broken things were found" in printed


def test_copies_of_another_folder(tmp_path, mds_folder, capsys):
    cache = tmp_path / "cache"
    assert main(mds_folder, "--local", cache, "--deep") == 0
    assert len(list(cache.glob("*.mds"))) == 4
    (mds_folder / "shard.00000.mds").unlink()
    (cache / "shard.00000.mds").unlink()
    datasets.flip_a_bit(cache / "shard.00002.mds", position=500_000)
    assert main(mds_folder, "--local", cache) == 1
    printed = capsys.readouterr()
    assert f"broken: {mds_folder}/shard.00000.mds: cannot be had" in printed.out
    assert "1 broken thing was found" in printed.out
    # A damaged copy says nothing about the data set.
    assert f"{mds_folder}/shard.00002.mds: its xxh64 is not the one in index.json. " in printed.err
    copied = (cache / "shard.00002.mds").read_bytes()
    assert copied == (mds_folder / "shard.00002.mds").read_bytes()


def test_every_bad_image_is_named(tmp_path, capsys):
    rows = [(datasets.make_png(1), "one"), (b"", "two"), (datasets.make_png(3)[:60], "three")]
    rows.append((datasets.make_png(4), " "))
    datasets.write_shards(tmp_path, {"jpg": "bytes", "caption": "str"}, rows)
    assert main(tmp_path) == 0
    capsys.readouterr()
    assert main(tmp_path, "--deep", "--empty_captions", "bad") == 1
    lines = capsys.readouterr().out.splitlines()
    place = f"broken: {tmp_path}/shard.00000.mds, sample"
    assert lines[0] == f"{place} 1: the image has 0 bytes."
    assert lines[1].startswith(f"{place} 2: the image cannot be ")
    assert lines[2] == f"{place} 3: the caption is empty."
    assert lines[3:] == ["3 broken things were found."]
    assert main(tmp_path, "--deep") == 1
    assert capsys.readouterr().out.splitlines()[2:] == ["2 broken things were found."]


def test_every_bad_latent_is_named(tmp_path, capsys):
    columns = {"latents_32": "ndarray:float16", "text_embedding": "ndarray:float16:77,8"}
    arrays = [datasets.make_arrays(number) for number in range(4)]
    rows = [[one["latent"], one["text_embedding"]] for one in arrays]
    rows[1][0] = rows[1][0][:3]
    rows[2][1][5, 3] = np.nan
    datasets.write_shards(tmp_path, columns, rows)
    assert main(tmp_path, "--deep", "--text_embedding_dim", 8) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"broken: {tmp_path}/shard.00000.mds, sample 1, latents_32: shape (3, 4, 4), (4, 4, 4) is "
        "needed.",
        f"broken: {tmp_path}/shard.00000.mds, sample 2, text_embedding: a value is NaN, infinite, "
        "or beyond float16's 65504.",
        "2 broken things were found.",
    ]


def test_broken_data_of_other_formats(tmp_path, capsys):
    datasets.write_folder(tmp_path / "folder")
    (tmp_path / "folder" / "007.png").write_bytes(datasets.make_png(7)[:60])
    (tmp_path / "folder" / "011.txt").unlink()
    assert main(tmp_path / "folder", "--deep") == 1
    printed = capsys.readouterr().out
    assert "folder/007.png: the image cannot be" in printed
    assert "folder/011.png: no caption." in printed
    assert "2 broken things" in printed
    datasets.write_tars(tmp_path / "tars")
    tar = tmp_path / "tars" / "00001.tar"
    tar.write_bytes(tar.read_bytes()[:20_000])
    assert main(tmp_path / "tars") == 1
    assert f"broken: {tar} is damaged" in capsys.readouterr().out


def write_folder_of_bad_captions(place):
    datasets.write_folder(place)
    (place / "011.txt").unlink()
    (place / "012.txt").write_text(" \n")
    return place / "011.png", place / "012.png"


def write_tar_of_bad_captions(place):
    members = [("a.png", datasets.make_png(1)), ("b.png", b"no picture"), ("b.txt", b"")]
    tar = datasets.write_tar(place / "0.tar", members)
    return f"{tar}: a", f"{tar}: b"


def write_parquet_of_bad_captions(place):
    columns = {"jpg": [b"no picture"] * 3, "caption": ["one", None, ""]}
    file = datasets.write_table(place / "0.parquet", columns, row_group_size=2)
    return f"{file}, row 1 of row group 0", f"{file}, row 0 of row group 1"


@pytest.mark.parametrize(
    "write",
    [
        write_folder_of_bad_captions,
        write_tar_of_bad_captions,
        write_parquet_of_bad_captions,
    ],
)
def test_captions_are_looked_for_without_opening_a_picture(tmp_path, capsys, write):
    missing, empty = write(tmp_path / "data")
    named = [f"broken: {missing}: no caption.", f"broken: {empty}: the caption is empty."]
    assert main(tmp_path / "data") == 1
    assert capsys.readouterr().out.splitlines()[:-1] == named[:1]
    assert main(tmp_path / "data", "--empty_captions", "bad") == 1
    assert capsys.readouterr().out.splitlines()[:-1] == named
