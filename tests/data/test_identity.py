"""Is a data set told from others, and known again, also where it is held out of training?"""

from __future__ import annotations

import json
import shutil

import pytest

from sdbench import data
from sdbench.data.identity import describe_change, find_overlap, identify_data
from sdbench.data.source import SourceConfig
from tests.data import datasets

# Files that stand for a data set: pictures, tars, parquet files, or the index of the shards.
NUM_FILES = {"folder": 49, "webdataset": 3, "parquet": 2, "mds": 1}


def source(place, data_format: str = "folder") -> SourceConfig:
    return datasets.make_source(data_format, place)


def describe(place, data_format: str = "folder") -> dict:
    return data.describe_data(source(place, data_format))


@pytest.fixture
def folder(tmp_path):
    """Two pictures, each with a caption beside it."""
    path = tmp_path / "pictures"
    path.mkdir()
    for index, name in enumerate("ab"):
        (path / f"{name}.png").write_bytes(datasets.make_png(index))
        (path / f"{name}.txt").write_text("a caption")
    return path


def test_a_copy_of_a_folder_is_known_again_and_other_captions_are_another_data_set(
    folder, tmp_path
):
    before = describe(folder)
    assert before["num_files"] == 4
    assert before["num_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    (folder / "other.html").write_text("no part of it")
    assert describe(tmp_path / "elsewhere" / "copy") == describe(folder) == before
    found = [before["sha256"]]
    (folder / "b.txt").write_text("another caption")
    found.append(describe(folder)["sha256"])
    (folder / "captions.csv").write_text("file,caption\na.png,a table\nb.png,b\n")
    assert len({*found, describe(folder)["sha256"]}) == 3


def test_files_that_were_added_taken_away_or_written_again_are_named(folder):
    (folder / "c\udcff.png").write_bytes(datasets.make_png(2))  # no UTF-8
    before = identify_data([source(folder)])
    path = folder / "a.png"
    assert before["files"]["a.png"] == [path.stat().st_size, path.stat().st_mtime_ns]
    assert list(before["files"]) == ["a.png", "a.txt", "b.png", "b.txt", "c\\udcff.png"]
    assert describe_change(before, identify_data([source(folder)])) is None
    (folder / "b.txt").write_text("another")
    for name in "edfg":
        (folder / f"{name}.png").write_bytes(datasets.make_png(3))
    (folder / "c\udcff.png").unlink()
    assert describe_change(before, identify_data([source(folder)])) == (
        "4 files were added: d.png, e.png, f.png, ..., 1 file was taken away: c\\udcff.png, "
        "1 file was written again: b.txt"
    )
    # Of many files none is named.
    del before["files"]
    assert describe_change(before, identify_data([source(folder)])).startswith("the data set has 8")


def test_pictures_that_are_missing_have_no_size(folder):
    whole = describe(folder)
    (folder / "b.png").unlink()
    (folder / "b.png").symlink_to("nowhere.png")
    missing = describe(folder)
    assert (missing["num_files"], missing["num_bytes"]) == (4, None)
    rows = [{"file_name": name, "text": "a"} for name in ("a.png", "c.png", "\0", "n" * 300)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = describe(folder)
    assert (named["num_files"], named["num_bytes"]) == (5, None)
    assert len({one["sha256"] for one in (whole, missing, named)}) == 3


def test_urls_and_commands_are_told_apart_but_not_by_their_signatures():
    # Longer than a name of a file can be.
    ends = ("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")
    signed = [f"https://h/b/{name}.tar?X-Amz-Signature={end * 300}" for name, end in ends]
    first, again, *others = (describe(place, "webdataset") for place in signed)
    assert first == again and others[0] == others[1] and first != others[0]
    assert (first["num_files"], first["num_bytes"], first["made_by"]) == (1, None, [None])
    first, other = (describe(f"pipe:cat {name}.tar {'|cat' * 99}", "webdataset") for name in "ab")
    assert first["sha256"] != other["sha256"] and first["made_by"] == [None]


@pytest.mark.parametrize(("data_format", "num_files"), NUM_FILES.items())
def test_a_copy_is_found_and_a_link_to_it_and_not_what_was_renamed(
    tmp_path, data_format, num_files
):
    trained, copied, linked = (tmp_path / name for name in ("trained", "copied", "linked"))
    datasets.WRITERS[data_format](trained)
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


def test_folders_within_one_another_overlap_and_files_of_another_size_do_not(tmp_path):
    datasets.write_folder(tmp_path / "data" / "more")
    held_out = tmp_path / "data" / "held-out"
    held_out.mkdir()
    (held_out / "linked.png").symlink_to(tmp_path / "data" / "more" / "007.png")
    (held_out / "linked.txt").write_text("a caption")
    changed = held_out / "008.png"
    changed.write_bytes((tmp_path / "data" / "more" / "008.png").read_bytes() + b"\0")
    found = find_overlap(source(tmp_path / "data" / "more"), source(held_out))
    assert found == [str(held_out / "linked.png")]
    trained, held_out = (
        source(f"https://store/{braces}.tar", "webdataset") for braces in ("{0..3}", "{2..5}")
    )
    assert find_overlap(trained, held_out) == ["https://store/2.tar", "https://store/3.tar"]
