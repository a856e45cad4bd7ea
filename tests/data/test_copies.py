"""Is a damaged copy thrown away, and is its source named in place of it?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdbench import data
from sdbench.base.errors import ConfigError, RunError
from sdbench.data.places.place_files import StoredFile, read_whole
from tests.data import datasets
from tests.data.datasets import copies, indices

FILES = {"webdataset": "00001.tar", "parquet": "0.parquet"}
# Those of the first tar have other numbers.
EXPECTED = {"webdataset": list(range(5, 33)), "parquet": list(range(28))}


@pytest.fixture(params=FILES)
def kind(request, tmp_path, temporary_folder) -> str:
    """A data format, whose samples lie in data/."""
    datasets.WRITERS[request.param](tmp_path / "data")
    return request.param


@pytest.fixture
def place(kind, tmp_path) -> str:
    """A command that may fail before its | and prints a file with 30 samples."""
    return f"pipe:cat {tmp_path}/data/{FILES[kind]} | cat"


def read(kind: str, place: str, local: Path) -> list[int]:
    config = datasets.make_source(kind, place, local=str(local), shuffle=False)
    return indices(list(data.build(config)))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, 5000)


@pytest.mark.parametrize("damage", [os.unlink, empty, cut])
def test_what_a_failed_command_gave_is_not_kept(damage, kind, place, tmp_path):
    file, cache = tmp_path / "data" / FILES[kind], tmp_path / "cache"
    whole = file.read_bytes()
    damage(file)
    with pytest.raises((RunError, ConfigError)) as caught:
        read(kind, place, cache)
    assert repr(place) in str(caught.value)
    assert str(cache) not in str(caught.value)
    assert copies(cache) == []
    file.write_bytes(whole)
    assert read(kind, place, cache) == EXPECTED[kind]


@pytest.mark.parametrize("damage", [empty, cut])
def test_a_copy_that_was_damaged_is_made_again(damage, kind, place, tmp_path, capsys):
    cache = tmp_path / "cache"
    assert read(kind, place, cache) == EXPECTED[kind]
    (copy,) = copies(cache)
    damage(copy)
    assert read(kind, place, cache) == EXPECTED[kind]
    assert copy.read_bytes() == (tmp_path / "data" / FILES[kind]).read_bytes()
    told = capsys.readouterr().err
    assert "pipe:cat" in told and "Its copy is thrown away, and made again." in told
    (line,) = [line for line in told.splitlines() if "thrown away" in line]
    assert str(cache) not in line


def test_an_empty_tar_that_a_command_gave_is_not_kept(tmp_path, temporary_folder):
    datasets.write_folder(tmp_path / "data")
    names = sorted(path.name for path in (tmp_path / "data").iterdir())
    (tmp_path / "names").touch()
    place = f"pipe:tar -c -C {tmp_path}/data -T {tmp_path}/names"
    with pytest.raises(RunError, match="it is a tar without members"):
        read("webdataset", place, tmp_path / "cache")
    (tmp_path / "names").write_text("\n".join(names))
    assert read("webdataset", place, tmp_path / "cache") == list(range(48))


def test_a_bad_sample_of_a_copy_is_named_by_its_source(tmp_path, temporary_folder):
    datasets.write_tars(tmp_path / "data")
    path = tmp_path / "data" / "00000.tar"
    path.write_bytes(path.read_bytes().replace(b"IHDR", b"none"))
    place = f"pipe:cat {path}"
    with pytest.raises(RunError, match=f"'{place}': 000000: the image cannot be decoded"):
        read("webdataset", place, tmp_path / "cache")


def test_a_copy_that_another_process_throws_away_is_refused_for_its_damage(tmp_path):
    path = tmp_path / "shard.mds"
    path.write_text("damaged")
    made = []

    def load(file):
        if len(made) in (1, 2):  # the other process has been here between the copy and this
            path.unlink()
        raise RunError(f"{path.read_text()} {len(made)}")

    def copy_again(file):
        made.append(file)
        path.write_text("damaged")

    with pytest.raises(RunError, match="damaged 3"):
        read_whole(StoredFile(path, source="s3://bucket/shard.mds"), load, copy_again=copy_again)
    assert len(made) == 3
    assert not path.exists()
