"""Is a data set told from others, and known again, by what a record says of it?"""

from __future__ import annotations

import json
import shutil

import pytest

from sdbench import data
from sdbench.data.source import SourceConfig
from tests.data import datasets


def describe(place, data_format: str = "folder") -> dict:
    options = {"image_size": 8, "device_batch_size": 1, "seed": 0}
    return data.describe_data(SourceConfig(data_format=data_format, remote=str(place), **options))


@pytest.fixture
def folder(tmp_path):
    """Two pictures, each with a caption beside it."""
    path = tmp_path / "pictures"
    path.mkdir()
    for index, name in enumerate("ab"):
        (path / f"{name}.png").write_bytes(datasets.make_png(index))
        (path / f"{name}.txt").write_text("a caption")
    return path


def test_a_copy_of_a_folder_is_known_again(folder, tmp_path):
    before = describe(folder)
    assert before["num_files"] == 4
    assert before["num_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert describe(tmp_path / "elsewhere" / "copy") == before


def test_other_captions_are_another_data_set(folder):
    (folder / "other.html").write_text("no part of it")
    found = [describe(folder)["sha256"]]
    (folder / "b.txt").write_text("another caption")
    found.append(describe(folder)["sha256"])
    for caption in ("a table", "another table"):
        (folder / "captions.csv").write_text(f"file,caption\na.png,{caption}\nb.png,b\n")
        found.append(describe(folder)["sha256"])
    assert len(set(found)) == 4


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


def test_a_note_of_how_it_was_made_is_taken_over(folder):
    assert describe(folder)["made_by"] == [None]
    (folder / ".made_by.json").write_text('{"command": "shapes"}')
    assert describe(folder)["made_by"] == [{"command": "shapes"}]


def test_a_pattern_may_be_longer_than_a_file_name(tmp_path):
    numbers = [f"{number:05d}" for number in range(60)]
    for number in numbers:
        (tmp_path / f"{number}.tar").write_bytes(b"")
    described = describe(f"{tmp_path}/{{{','.join(numbers)}}}.tar", "webdataset")
    assert (described["num_files"], described["made_by"]) == (60, [None])
