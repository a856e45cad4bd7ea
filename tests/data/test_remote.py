"""Does data behind a URL arrive whole, or not at all? Against a real S3 server."""

from __future__ import annotations

import functools
import json
import os
import re
import select

import pytest

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.cli import main
from sdbench.data.convert import convert
from sdbench.data.formats.identity import describe_changes, identify
from sdbench.data.places import command_output, remote
from sdbench.data.places.remote import cache_folder, list_urls
from sdbench.data.places.remote_files import fetch
from tests.data import datasets
from tests.data.datasets import indices
from tests.data.s3_server import BUCKET, S3Server
from tests.refusals import refused

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("temporary_folder", "impatient")]


make_config = functools.partial(datasets.make_source, shuffle=False)


@pytest.fixture
def upload(s3: S3Server, tmp_path):
    """A function from a kind of data set to its URL in the bucket."""

    def put(kind: str) -> str:
        folder = tmp_path / kind
        datasets.WRITERS[kind](folder)
        return s3.upload(folder, f"{tmp_path.name}/{kind}")

    return put


@pytest.mark.parametrize(("kind", "num_workers"), [("mds", 2), ("webdataset", 0), ("parquet", 0)])
def test_every_format_is_read_from_s3(kind, num_workers, upload):
    place = upload(kind) + ("/{00000..00002}.tar" if kind == "webdataset" else "")
    loader = data.build(make_config(kind, place, num_workers=num_workers))
    assert indices(list(loader)) == list(range(48))


def test_copies_are_made_once_and_by_version(s3, upload, tmp_path):
    assert cache_folder("s3://a/b", None) != cache_folder("s3://a/c", None)
    url = f"{upload('webdataset')}/00000.tar"
    first = fetch(url, cache=tmp_path / "cache")
    num_requests = s3.num_requests
    assert fetch(url, cache=tmp_path / "cache") == first
    assert s3.num_requests == num_requests + 1  # HEAD
    s3.client().put_object(Bucket=BUCKET, Key=url.split("/", 3)[3], Body=b"another version")
    assert fetch(url, cache=tmp_path / "cache").read_bytes() == b"another version"


def test_a_new_version_of_mds_data_gets_a_cache_of_its_own(s3, upload, tmp_path):
    place = upload("mds")
    assert len(indices(list(data.build(make_config("mds", place))))) == 48
    rows = [(datasets.make_png(50), "other")] * 8
    other = datasets.write_shards(tmp_path / "other", {"jpg": "bytes", "caption": "str"}, rows)
    s3.upload(other, place.split("/", 3)[3])
    assert indices(list(data.build(make_config("mds", place)))) == [50] * 8


@pytest.mark.slow
def test_copies_of_shards_lie_where_nobody_else_can_look(upload, temporary_folder, tmp_path):
    place = upload("mds")
    for options in ({}, {"local": str(tmp_path / "made")}):
        loader = data.build(make_config("mds", place, **options))
        assert len(indices(list(loader))) == 48
    (index,) = (temporary_folder / "sdbench").glob("*/index.json")
    for folder in (temporary_folder / "sdbench", index.parent, tmp_path / "made"):
        assert folder.stat().st_mode & 0o777 == 0o700
    for file in (index, tmp_path / "made" / "index.json"):
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_busy_or_slow_server_is_waited_for(s3, upload, tmp_path):
    url = f"{upload('webdataset')}/00001.tar"
    s3.num_busy = 2
    copy = fetch(url, cache=tmp_path / "cache")
    assert copy.read_bytes() == (tmp_path / "webdataset" / "00001.tar").read_bytes()
    loader = data.build(make_config("mds", upload("mds")))
    s3.num_busy, s3.pause_s = 2, 0.1
    assert indices(list(loader)) == list(range(48))
    assert s3.num_busy == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"num_busy": 1000}, r"00001.tar cannot be read: .*503"),
        ({"pause_s": 3.0}, r"00001.tar cannot be read: ReadTimeoutError"),
        ({"cut_after": 100}, r"00001.tar, from byte 200 on, cannot be read"),
    ],
)
def test_a_failing_server_is_an_error_and_leaves_nothing(fault, message, s3, upload, tmp_path):
    url = f"{upload('webdataset')}/00001.tar"
    for name, value in fault.items():
        setattr(s3, name, value)
    with pytest.raises(RunError, match=message):
        fetch(url, cache=tmp_path / "cache")
    assert datasets.copies(tmp_path / "cache") == []
    s3.behave()
    whole = (tmp_path / "webdataset" / "00001.tar").read_bytes()
    assert fetch(url, cache=tmp_path / "cache").read_bytes() == whole


@pytest.mark.slow
def test_a_shard_that_is_not_in_the_bucket_is_named(s3, upload):
    place = upload("mds")
    key = f"{place.split('/', 3)[3]}/shard.00002.mds"
    s3.client().delete_object(Bucket=BUCKET, Key=key)
    config = make_config("mds", place, num_workers=2, shuffle=True)
    with pytest.raises(RunError, match=r"Shard shard.00002.mds cannot be had from s3://.*not foun"):
        list(data.build(config))


def test_a_bucket_is_verified(s3, upload, tmp_path, capsys):
    place = upload("mds")
    assert main(["verify-data", place, "--deep", "--num_workers", "0"]) == 0
    key = f"{place.split('/', 3)[3]}/shard.00001.mds"
    shard = tmp_path / "mds" / "shard.00001.mds"
    datasets.flip_a_bit(shard)
    s3.client().put_object(Bucket=BUCKET, Key=key, Body=shard.read_bytes())
    cache = str(tmp_path / "another")
    assert main(["verify-data", place, "--local", cache, "--num_workers", "0"]) == 1
    told = f"broken: {place}/shard.00001.mds: its xxh64 is not the one in index.json."
    assert told in capsys.readouterr().out.splitlines()
    assert not (tmp_path / "another" / "shard.00001.mds").exists()


def test_no_such_object_and_no_such_folder(s3, tmp_path):
    with pytest.raises(RunError, match=r"s3://pictures/none.tar cannot be read: .*404"):
        fetch("s3://pictures/none.tar", cache=tmp_path)
    assert list_urls("s3://pictures/none") == []
    with refused("--remote", value="gs://b/x"):
        list_urls("gs://b/x")


def test_lacking_credentials_are_named(s3, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(RunError, match="no S3 credentials are set"):
        fetch("s3://pictures/a.tar", cache=tmp_path)


def test_a_command_that_fails_or_hangs_is_named(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="'pipe:echo no >&2; exit 3' ended with exit code 3: no"):
        fetch("pipe:echo no >&2; exit 3", cache=tmp_path)
    with pytest.raises(RunError, match="ended with exit code 3"):  # not that of its last part
        fetch("pipe:(echo a; exit 3) | cat", cache=tmp_path)
    monkeypatch.setattr(command_output, "PIPE_SILENCE_TIMEOUT_S", 0.3)
    with pytest.raises(RunError, match="'pipe:echo a; sleep 60' printed nothing for 0.3 s"):
        fetch("pipe:echo a; sleep 60", cache=tmp_path)


def test_what_a_command_has_started_ends_with_it(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Open for writing as long as sleep lives.
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    output = command_output.CommandOutput(f"(echo up; exec sleep 1000) 3> {fifo} | cat")
    assert output.read(3) == b"up\n"
    output.close()
    ended = select.poll()
    ended.register(held, 0)
    assert ended.poll(10_000) == [(held, select.POLLHUP)]
    os.close(held)


def replace(s3: S3Server, url: str) -> None:
    """Put an object of the same length into the place of another."""
    place = {"Bucket": BUCKET, "Key": url.split("/", 3)[3]}
    content = s3.client().get_object(**place)["Body"].read()
    s3.client().put_object(**place, Body=content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("kind", ["webdataset", "parquet", "mds"])
def test_an_object_that_is_replaced_by_one_of_its_length_is_known_by_its_version(
    kind, s3, upload, tmp_path
):
    place = upload(kind)
    name = {"webdataset": "00001.tar", "parquet": "1.parquet", "mds": "shard.00001.mds"}[kind]
    # The hashes of shards are compared with index.json, unless that is switched off.
    config = make_config(kind, place, validate_hash="none")
    before = identify({"data": config})
    assert (
        before["data"]["num_bytes"]
        == identify({"data": make_config(kind, tmp_path / kind, validate_hash="none")})["data"][
            "num_bytes"
        ]
    )
    replace(s3, f"{place}/{name}")
    (told,) = describe_changes(before, identify({"data": config})).values()
    facts = r'\((\d+) bytes, "\w+" before, \1 bytes, "\w+" now\)'
    assert re.fullmatch(f"data: 1 file was written again: {name} {facts}", told)


def test_what_lies_beside_streamed_tars_is_known_by_what_it_says(s3, upload, tmp_path):
    place = upload("webdataset")
    put = functools.partial(s3.client().put_object, Bucket=BUCKET, Key=f"{place[14:]}/sizes.json")
    put(Body=json.dumps(datasets.TAR_SIZES))
    config = make_config("webdataset", f"{place}/{{00000..00002}}.tar", remote_files="stream")
    before = identify({"data": config})
    put(Body=json.dumps({**datasets.TAR_SIZES, "00001.tar": 29}))
    (told,) = describe_changes(before, identify({"data": config})).values()
    assert "--tar_sizes (" in told and "00001.tar 30 before, 29 now)" in told


def test_an_object_of_googles_store_is_known_by_its_version(s3, upload, monkeypatch):
    """By the protocol of S3, which the store speaks with such keys."""
    url = f"{upload('webdataset')}/00001.tar"
    monkeypatch.setenv("GCS_KEY", "key")
    monkeypatch.setenv("GCS_SECRET", "secret")
    monkeypatch.setattr(remote, "GOOGLE_URL", s3.url)
    config = make_config("webdataset", url.replace("s3://", "gs://"))
    before = identify({"data": config})
    replace(s3, url)
    (told,) = describe_changes(before, identify({"data": config})).values()
    assert told.startswith("data: 1 file was written again: 00001.tar (")


def test_a_conversion_does_not_go_on_from_an_object_that_was_replaced(s3, tmp_path):
    line = ["s3://pictures/one.tar", "--folder", str(tmp_path / "out")]

    def put(content: bytes) -> None:
        members = [("0.png", datasets.make_png(0)), ("0.txt", b"a"), ("1.png", content)]
        tar = datasets.write_tar(tmp_path / "one.tar", [*members, ("1.txt", b"b")])
        s3.client().put_object(Bucket=BUCKET, Key="one.tar", Body=tar.read_bytes())

    put(b"no picture")
    with pytest.raises(RunError, match=r"one\.tar: 1: "):
        convert.main(line)
    put(b"of no sort")
    with refused("--changed_inputs") as caught:
        convert.main(line)
    assert "data: 1 file was written again: one.tar (" in caught.value.what


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run(upload, running_s3):
    """The last test of this module: the server does not come back."""
    loader = data.build(make_config("mds", upload("mds"), num_workers=2, prefetch_factor=1))
    batches = iter(loader)
    next(batches)
    running_s3.die()
    with pytest.raises(RunError, match=r"Shard shard.0000\d.mds cannot be had from s3://"):
        list(batches)
