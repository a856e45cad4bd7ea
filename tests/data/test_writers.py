"""Is each chunk whole or absent, whatever happens, and the data set what was written?"""

from __future__ import annotations

import errno
import json
import os
import tarfile
from pathlib import Path

import pytest
from streaming.base.hashing import get_hash

from sdbench.base.errors import RunError
from sdbench.data import open_samples
from sdbench.data.convert.chunk_formats import FORMATS
from sdbench.data.convert.rows import describe_source
from sdbench.data.convert.writers import Output, open_output
from tests.data.datasets import read_files
from tests.refusals import refused

COLUMNS = {"jpg": "bytes", "caption": "str", "width": "int", "height": "int"}
IMAGES = (b"\x89PNG\r\n\x1a\n 0", b"\xff\xd8\xff 1", b"RIFF....WEBP 2")


def make_rows(number: int) -> list[dict]:
    """Rows of a chunk: as many as its number, so that chunk 0 has none."""
    return [
        {"jpg": IMAGES[row], "caption": f"{number}, {row} \u00e9", "width": row, "height": 7}
        for row in range(number)
    ]


def begin(out: Path, *, data_format: str = "mds", **changes) -> Output:
    options = {"columns": COLUMNS, "num_chunks": 4, "job": {"source": "x"}, "inputs": {}, **changes}
    return open_output(out, data_format=data_format, **options)


def write_all(output: Output) -> Output:
    for number in output.missing_chunks():
        output.write_chunk(number, make_rows(number), bad=["a: bad."] if number == 1 else [])
    return output


@pytest.mark.parametrize("data_format", FORMATS)
def test_what_is_written_is_read_back_in_order(tmp_path, data_format):
    (tmp_path / "out").mkdir()  # an empty folder is used
    totals = write_all(begin(tmp_path / "out", data_format=data_format)).finish()
    assert (totals.num_written, totals.bad) == (6, ["a: bad."])
    expected = [row for number in range(4) for row in make_rows(number)]
    samples = open_samples(describe_source(str(tmp_path / "out"), data_format=data_format))
    found = [samples.read(index) for index in range(len(samples))]
    assert [(sample.image, sample.caption) for sample in found] == [
        (row["jpg"], row["caption"]) for row in expected
    ]
    if data_format == "webdataset":
        with tarfile.open(tmp_path / "out" / "00003.tar") as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}
        images = {"00003000000.png", "00003000001.jpg", "00003000002.webp"}
        assert images < members.keys() and len(members) == 9
        assert json.loads(members["00003000002.json"]) == {"width": 2, "height": 7}
        counts = json.loads((tmp_path / "out" / "sizes.json").read_text())
        assert list(counts.values()) == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("data_format", FORMATS)
def test_what_a_kill_leaves_at_any_point_is_written_anew(tmp_path, data_format):
    write_all(begin(tmp_path / "undisturbed", data_format=data_format)).finish()
    output = begin(tmp_path / "out", data_format=data_format)
    output.write_chunk(1, make_rows(1), bad=["a: bad."])
    output.write_chunk(2, make_rows(3))
    output.write_chunk(3, make_rows(2))

    def die():
        yield from make_rows(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        output.write_chunk(0, die())
    partial = tmp_path / "out.partial"
    assert list((partial / "tmp").iterdir()) == []
    # Killed after the data was renamed and before its note was: with other rows, to be recognised.
    (partial / "chunks" / "00002.json").unlink()
    # Killed while a chunk was being written.
    (data,) = (path for path in (partial / "data").iterdir() if "00003" in path.name)
    (partial / "chunks" / "00003.json").unlink()
    data.rename(partial / "tmp" / data.name)
    (partial / "tmp" / f"{data.name}.folder").mkdir()
    (partial / "tmp" / f"{data.name}.folder" / "shard.00000.mds").write_bytes(b"cut")
    (partial / "tmp" / "3.json").write_text("{")
    assert not (tmp_path / "out").exists()
    resumed = begin(tmp_path / "out", data_format=data_format)
    assert resumed.missing_chunks() == [0, 2, 3]
    assert resumed.totals()[:2] == (1, ["a: bad."])
    write_all(resumed).finish()
    assert read_files(tmp_path / "out") == read_files(tmp_path / "undisturbed")
    assert not partial.exists()


def test_mds_shards_have_both_hashes_and_their_final_names(tmp_path):
    write_all(begin(tmp_path / "out")).finish()
    shards = json.loads((tmp_path / "out" / "index.json").read_text())["shards"]
    assert [shard["samples"] for shard in shards] == [1, 2, 3]
    for number, shard in enumerate(shards, start=1):
        file = shard["raw_data"]
        assert file["basename"] == f"shard.{number:05d}.mds"
        data = (tmp_path / "out" / file["basename"]).read_bytes()
        assert file["hashes"] == {name: get_hash(name, data) for name in ("sha1", "xxh64")}


def test_a_folder_that_is_taken(tmp_path):
    write_all(begin(tmp_path / "out")).finish()
    with refused("--folder", value=str(tmp_path / "out")):
        begin(tmp_path / "out")
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "thesis.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked.partial").symlink_to(tmp_path / "empty")
    for name in ("other", "linked"):
        with refused("--folder", value=str(tmp_path / f"{name}.partial")):
            begin(tmp_path / name)
    assert (tmp_path / "other.partial" / "thesis.txt").is_file()
    assert not list((tmp_path / "empty").iterdir())


def test_another_job_is_refused_and_the_same_one_goes_on(tmp_path):
    begin(tmp_path / "out", job={"source": "x", "sizes": (1, 2)}).write_chunk(2, make_rows(2))
    resumed = begin(tmp_path / "out", job={"source": "x", "sizes": (1, 2)})
    assert resumed.missing_chunks() == [0, 1, 3]
    with refused("--folder", value="y"):
        begin(tmp_path / "out", job={"source": "y", "sizes": (1, 2)})
    with refused("--folder", value="parquet"):
        begin(tmp_path / "out", data_format="parquet", job={"source": "x", "sizes": (1, 2)})


def test_a_note_that_does_not_say_of_which_data_is_refused(tmp_path):
    begin(tmp_path / "out")
    note = tmp_path / "out.partial" / "job.json"
    facts = json.loads(note.read_text())
    del facts["inputs"]
    note.write_text(json.dumps(facts))
    with refused("--folder"):
        begin(tmp_path / "out", accepts_changes=True)


def test_only_one_command_writes(tmp_path):
    output = begin(tmp_path / "out")
    with output.lock(), refused("--folder", value=str(tmp_path / "out")), begin(output.out).lock():
        pass
    with output.lock():
        write_all(output).finish()


def test_finishing_finds_what_is_not_there_and_that_all_samples_are_bad(tmp_path):
    output = begin(tmp_path / "out")
    with pytest.raises(RunError, match=r"4 of 4 chunks .* the first is 0"):
        output.finish()
    write_all(output)
    shard = tmp_path / "out.partial" / "data" / "shard.00003.mds"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert output.missing_chunks() == [3]
    shard.unlink()
    assert output.missing_chunks() == [3]
    write_all(output).finish()
    assert (tmp_path / "out" / "shard.00003.mds").read_bytes() == data
    output = begin(tmp_path / "bad", num_chunks=1)
    output.write_chunk(0, [], bad=["a: no caption."])
    with pytest.raises(RunError, match=r"all 1 samples are bad. a: no caption."):
        output.finish()


def test_a_full_disk_and_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    output = begin(tmp_path / "out")
    output.write_chunk(2, make_rows(2))

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(
            RunError, match=r"/out cannot be written \(.*No space left.*; finished chunks are"
        ):
            output.write_chunk(3, make_rows(3))
    assert output.missing_chunks() == [0, 1, 3]
    write_all(output).finish()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"/file/out cannot be written \(.*Not a directory"):
        begin(tmp_path / "file" / "out")


def test_a_source_that_cannot_be_read_is_not_the_outputs_fault(tmp_path):
    def read():
        yield from make_rows(2)
        raise PermissionError(errno.EACCES, "Permission denied", "photos/a.jpg")

    with pytest.raises(RunError, match=r"A sample cannot be read \(.*photos/a.jpg"):
        begin(tmp_path / "out").write_chunk(0, read())
