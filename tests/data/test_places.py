"""What of a folder or URL is read: all of one format, and what is left is told or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdbench import data
from sdbench.data import checks, detect_format
from sdbench.data.convert import verify
from sdbench.data.formats.mds_entries import INDEX_NAME
from tests.data.datasets import NUM_SAMPLES, WRITERS, make_png, make_source, write_folder
from tests.refusals import refused


@pytest.fixture(autouse=True)
def told_anew():
    checks.tell_once.cache_clear()


def verified(place, capsys):
    """What verify-data says of a place that it finds well."""
    assert verify.main([str(place)]) == 0
    printed = capsys.readouterr()
    return printed.out + printed.err


@pytest.mark.parametrize(
    ("data_format", "ending", "other"),
    [("webdataset", ".tar", ".TAR"), ("parquet", ".parquet", ".parq")],
)
def test_files_of_folders_below_and_of_other_endings_are_not_lost(
    tmp_path, data_format, ending, other, capsys
):
    WRITERS[data_format](tmp_path / "data")
    first, second, *_ = sorted(Path("data").glob(f"*{ending}"))
    (tmp_path / "data" / "more").mkdir()
    first.rename(tmp_path / "data" / "more" / first.name)
    second.rename(second.with_suffix(other))
    (tmp_path / "data" / "notes.md").write_text("read me")
    told = verified(tmp_path / "data", capsys)
    assert f"{NUM_SAMPLES} samples" in told
    assert "no other files: 1 .md" in told


@pytest.mark.parametrize("stray", ["stray.tar", "below/stray.parquet"])
def test_a_stray_file_of_another_format_does_not_hide_the_pictures(tmp_path, stray, capsys):
    write_folder(tmp_path / "data")
    (tmp_path / "data" / stray).parent.mkdir(exist_ok=True)
    (tmp_path / "data" / stray).write_bytes(b"")
    with refused("--data_format"):
        detect_format(str(tmp_path / "data"))
    assert verify.main([str(tmp_path / "data"), "--data_format", "folder"]) == 0
    told = "".join(capsys.readouterr())
    assert f"{NUM_SAMPLES} images are read" in told and f"1 {Path(stray).suffix}" in told


def test_the_tables_that_img2dataset_writes_beside_its_tars_are_no_data_of_their_own(tmp_path):
    WRITERS["webdataset"](tmp_path / "data")
    for tar in (tmp_path / "data").glob("*.tar"):
        tar.with_suffix(".parquet").touch()
        tar.with_name(f"{tar.stem}_stats.json").touch()
    assert detect_format(str(tmp_path / "data")) == "webdataset"


def test_pictures_of_other_names_are_read_or_counted(tmp_path, capsys):
    write_folder(tmp_path / "data")
    for number, ending in enumerate((".jfif", ".jpe", ".bmp", ".bmp", ".gif", ".heic")):
        picture = tmp_path / "data" / f"more{number}{ending}"
        picture.write_bytes(make_png(number))
        picture.with_suffix(".txt").write_text("a caption")
    told = verified(tmp_path / "data", capsys)
    assert f"{NUM_SAMPLES + 2} samples" in told
    # The captions of the four pictures are left with them.
    assert "4 .txt, 2 .bmp, 1 .gif, 1 .heic" in told


def test_two_tables_of_captions_are_refused(tmp_path):
    write_folder(tmp_path / "data")
    for name in ("captions.csv", "metadata.csv"):
        (tmp_path / "data" / name).write_text("file,caption\n000.png,a cat\n")
    with refused("PLACE"):
        verify.main([str(tmp_path / "data")])


@pytest.mark.parametrize(
    ("data_format", "place", "named", "told"),
    [
        ("folder", "mixed", "mixed", "The data folder holds no images, but 2 .tiff, 1 .csv"),
        ("parquet", "mixed", "mixed", "The folder holds no parquet file, but 2 .tiff, 1 .csv"),
        ("webdataset", "empty", "empty", "The folder holds no tar file, but no files"),
        ("webdataset", "{a,b}.tar", "a.tar", "No such tar file"),
        ("webdataset", "{a,b.tar", "{a,b.tar", "The braces are not closed"),
        ("mds", "none", "none", "No such data folder"),
        ("mds", "empty", "empty", f"The data folder holds no {INDEX_NAME}"),
    ],
)
def test_a_place_without_samples_is_named_and_what_is_there_instead(
    data_format, place, named, told, tmp_path
):
    (tmp_path / "mixed" / "sub").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("a.tiff", "sub/b.TIFF", "c.csv"):
        (tmp_path / "mixed" / name).touch()
    with refused(value=str(tmp_path / named)) as caught:
        data.check(make_source(data_format, tmp_path / place))
    assert caught.value.what == told


@pytest.mark.parametrize("data_format", ["mds", "folder"])
def test_folders_of_data_beside_a_place_that_is_not_there_are_named(data_format, tmp_path):
    write_folder(tmp_path / "pictures")
    (tmp_path / "notes").mkdir()
    place = tmp_path / "picturs" / "train"
    with refused(value=str(place)) as caught:
        data.check(make_source(data_format, place))
    assert caught.value.allowed.endswith(f"{tmp_path}, with data in {tmp_path}/pictures")


@pytest.mark.parametrize("place", ["./.hidden/data", ".hidden//data/"])
def test_a_place_loses_no_files_by_how_it_is_written(tmp_path, monkeypatch, place, capsys):
    monkeypatch.chdir(tmp_path)
    WRITERS["webdataset"](Path(".hidden", "data"))
    assert f"{NUM_SAMPLES} samples" in verified(place, capsys)
