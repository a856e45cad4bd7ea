"""Is a data set told from others, and known again, also where it is held out of training?"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil

import pytest

from sdbench import data
from sdbench.data.formats import identity
from sdbench.data.formats.identity import (
    describe_change,
    describe_changes,
    find_overlap,
    identify,
    identify_data,
)
from sdbench.data.source import SourceConfig
from sdbench.settings.config import parse_request
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


def test_a_record_describes_the_pictures_of_a_subject_and_of_its_class(tmp_path):
    for index, name in enumerate(("subject", "class")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(datasets.make_png(index))  # without a caption

    def describe_subject(*flags):
        given = [
            "--task",
            "dreambooth",
            "--instance_prompt",
            "dog",
            "--data_format",
            "folder",
            "--image_size",
            "64",
        ]
        place = ("--remote", str(tmp_path / "subject"))
        request = parse_request((*given, *place, *flags), description="", epilog="")
        return data.describe_data(request.config)

    alone = describe_subject()
    both = describe_subject("--class_remote", str(tmp_path / "class"), "--class_prompt", "a dog")
    assert (alone["num_files"], alone["made_by"]) == (1, [None])
    assert (both["num_files"], both["made_by"]) == (2, [None, None])


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
    before = identify_data(source(folder))
    path = folder / "a.png"
    assert before["files"]["a.png"] == [path.stat().st_size, path.stat().st_mtime_ns]
    assert list(before["files"]) == ["a.png", "a.txt", "b.png", "b.txt", "c\\udcff.png"]
    assert describe_change(before, identify_data(source(folder))) is None
    (folder / "b.txt").write_text("another")
    for name in "edfg":
        (folder / f"{name}.png").write_bytes(datasets.make_png(3))
    (folder / "c\udcff.png").unlink()
    told = describe_change(before, identify_data(source(folder)))
    assert re.sub(r"20\S+ \S+", "TIME", told) == (
        "4 files were added: d.png, e.png, f.png, ..., 1 file was taken away: c\\udcff.png, "
        "1 file was written again: b.txt (9 bytes of TIME before, 7 bytes of TIME now)"
    )
    # Of many files none is named.
    del before["files"]
    assert describe_change(before, identify_data(source(folder))).startswith("the data set has 8")


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


def changes_of(config: SourceConfig, change) -> list[str]:
    """What `describe_changes` says of a data set before and after a change of it."""
    before = identify({"data": config})
    assert json.loads(json.dumps(before)) == before
    assert identify({"data": config}) == before
    change()
    return [*describe_changes(before, identify({"data": config})).values()]


@pytest.mark.parametrize(
    ("options", "changes", "is_told"),
    [
        ({}, {}, False),  # the run itself compares the hashes
        ({}, {"validate_hash": "none"}, True),
        ({"hashes": ()}, {}, True),
        ({"hashes": (), "compression": "zstd"}, {}, True),
    ],
)
def test_a_shard_without_a_checked_hash_is_known_by_its_size_and_time(
    tmp_path, options, changes, is_told
):
    datasets.write_mds(tmp_path, **options)
    shard = sorted(tmp_path.glob("shard.00001.mds*"))[-1]
    config = datasets.make_source("mds", tmp_path, **changes)
    told = changes_of(config, lambda: os.utime(shard, (0, 0)))
    if is_told:
        (sentence,) = told
        assert sentence.startswith(f"data: 1 file was written again: {shard.name} (")
        assert sentence.endswith(
            f" before, {shard.stat().st_size} bytes of 1970-01-01 00:00:00 now)"
        )
    else:
        assert told == []
    index = tmp_path / "index.json"
    (told,) = changes_of(config, lambda: index.write_text(index.read_text() + "\n"))
    assert told.startswith("data: 1 file was written again: index.json (")


def test_streams_are_told_apart(tmp_path):
    for name in "ab":
        datasets.write_mds(tmp_path / name, hashes=())
    config = datasets.make_source("mds", None, streams=f"{tmp_path}/a=0.5,{tmp_path}/b=0.5")
    (told,) = changes_of(config, lambda: os.utime(tmp_path / "b" / "shard.00002.mds", (0, 0)))
    assert "1 file was written again: stream 2: shard.00002.mds (" in told


def test_what_lies_beside_samples_and_what_settings_name_is_a_part_of_them(tmp_path):
    datasets.write_mds_latents(tmp_path / "latents")
    config = source(tmp_path / "latents", "mds latents")
    for name in (".empty_caption.npz", ".made_by.json"):
        path = tmp_path / "latents" / name
        write = functools.partial(path.write_text, '{"a": 1}')
        (told,) = changes_of(config, write)
        assert told.startswith(f"what belongs to the data: 1 file was written again: {name} (none")
        assert changes_of(config, write) == []
        (told,) = changes_of(config, functools.partial(path.write_text, "{}"))
        assert f"{name} (8 bytes, " in told and " before, 2 bytes, " in told
    datasets.write_tars(tmp_path / "tars")
    prompts = tmp_path / "classes.json"
    prompts.write_text('["a cat"]')
    config = datasets.make_source("webdataset", tmp_path / "tars", class_prompts=str(prompts))
    (told,) = changes_of(config, lambda: prompts.write_text('["a dog"]'))
    assert "--class_prompts (9 bytes, crc32 " in told


def test_names_sizes_and_other_facts_of_many_files_are_told_in_numbers(folder, monkeypatch):
    monkeypatch.setattr(identity, "MAX_NAMED", 3)
    told = changes_of(source(folder), lambda: os.utime(folder / "a.txt", (0, 0)))
    assert told == [
        "data: files of the data set have been written again, under the same names and sizes"
    ]
    told = changes_of(source(folder), (folder / "a.txt").unlink)
    assert told[0].startswith("data: the data set has 3 files, ")
