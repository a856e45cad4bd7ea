"""Held-out data that is trained on as well, found by places and files."""

from __future__ import annotations

import shutil

import pytest

from sdbench.data.overlap import find_overlap
from sdbench.data.source import SourceConfig
from tests.data.datasets import IMAGE_SIZE, WRITERS, write_folder

# Files that stand for a data set: pictures, tars, parquet files, or the index of the shards.
NUM_FILES = {"folder": 49, "webdataset": 3, "parquet": 2, "mds": 1}


def source(place, data_format) -> SourceConfig:
    """A data set as a run reads it."""
    return SourceConfig(
        remote=str(place),
        data_format=data_format,
        image_size=IMAGE_SIZE,
        device_batch_size=1,
        seed=0,
    )


@pytest.mark.parametrize(("data_format", "num_files"), NUM_FILES.items())
def test_a_copy_is_found_and_a_link_to_it_and_not_what_was_renamed(
    tmp_path, data_format, num_files
):
    trained, copied, linked = (tmp_path / name for name in ("trained", "copied", "linked"))
    WRITERS[data_format](trained)
    shutil.copytree(trained, copied)
    linked.symlink_to(trained)
    for other in (copied, linked):
        found = find_overlap(source(trained, data_format), source(other, data_format))
        assert len(set(found)) == num_files
    for path in [path for path in copied.iterdir() if path.name != "index.json"]:
        path.rename(path.with_name(f"other-{path.name}"))
    if data_format == "mds":
        (copied / "index.json").write_text((copied / "index.json").read_text() + "\n")
    assert find_overlap(source(trained, data_format), source(copied, data_format)) == []


def test_folders_within_one_another_overlap(tmp_path):
    write_folder(tmp_path / "data" / "more")
    write_folder(tmp_path / "data" / "held-out")
    for path in (tmp_path / "data" / "more").iterdir():
        path.rename(path.with_name(f"more-{path.name}"))
    whole, part = source(tmp_path / "data", "folder"), source(tmp_path / "data/held-out", "folder")
    expected = [str(tmp_path / "data" / "held-out" / f"{index:03d}.png") for index in range(49)]
    assert find_overlap(whole, part) == expected
    assert find_overlap(part, whole) == expected


def test_a_link_of_another_name_is_found_and_another_size_is_not(tmp_path):
    write_folder(tmp_path / "trained")
    held_out = tmp_path / "held-out"
    held_out.mkdir()
    (held_out / "linked.png").symlink_to(tmp_path / "trained" / "007.png")
    (held_out / "linked.txt").write_text("a caption")
    (held_out / "008.png").write_bytes((tmp_path / "trained" / "008.png").read_bytes() + b"\0")
    found = find_overlap(source(tmp_path / "trained", "folder"), source(held_out, "folder"))
    assert found == [str(held_out / "linked.png")]


def test_urls_overlap_by_name():
    trained, held_out = (
        source(f"https://store/{braces}.tar", "webdataset") for braces in ("{0..3}", "{2..5}")
    )
    assert find_overlap(trained, held_out) == ["https://store/2.tar", "https://store/3.tar"]
