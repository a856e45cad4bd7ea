"""Web files whose servers break off, give another part or tell no version."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
import werkzeug
import werkzeug.serving
from PIL import Image

import data as data_script
from sdbench.base.errors import RunError
from sdbench.data.formats.identity import describe_changes, identify
from sdbench.data.places import remote
from sdbench.data.places.remote import find_object, read_part
from sdbench.data.places.remote_files import RemoteFile, fetch
from sdbench.record.store import load_record
from tests.data import datasets
from tests.data.datasets import copies
from tests.schemas import validate

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("temporary_folder", "impatient")]
CONTENT = bytes(range(256)) * 4096


class Server:
    """A web server of one file, with the faults that a test gives it.

    The next `num_busy` requests are answered by 503, an answer breaks off after `cut_after` bytes,
    and `change_range` makes another Content-Range of the right one. `asked` has the Range headers
    that have come.
    """

    def __init__(self):
        self.content, self.etag, self.user = CONTENT, '"1"', ""
        self.cut_after, self.num_busy, self.gives_parts = None, 0, True
        self.change_range = lambda text: text
        self.asked = []
        answer = werkzeug.Request.application(self.answer)
        self.http = werkzeug.serving.make_server("127.0.0.1", 0, answer, threaded=True)
        self.host = f"127.0.0.1:{self.http.server_port}"
        self.url = f"http://{self.host}/file.tar"

    def answer(self, request):
        asked = request.headers.get("Range") if self.gives_parts else None
        self.asked.append(asked)
        self.num_busy -= 1
        user = "Basic " + base64.b64encode(self.user.encode()).decode()
        if self.num_busy >= 0:
            return werkzeug.Response(status=503)
        if self.user and request.headers.get("Authorization") != user:
            return werkzeug.Response(status=401)
        if request.path != "/file.tar":
            return werkzeug.Response(status=404)
        num_bytes = len(self.content)
        first, last = 0, num_bytes - 1
        headers = {"ETag": self.etag}
        if asked:
            first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())
            headers["Content-Range"] = self.change_range(f"bytes {first}-{last}/{num_bytes}")
        part = self.content[first : last + 1]
        headers["Content-Length"] = len(part)
        headers = {name: value for name, value in headers.items() if value is not None}
        return werkzeug.Response([part[: self.cut_after]], 206 if asked else 200, headers)


@pytest.fixture
def server():
    one = Server()
    threading.Thread(target=one.http.serve_forever, daemon=True).start()
    yield one
    one.http.shutdown()
    one.http.server_close()


def test_a_copy_is_made_once_of_a_signed_file_of_a_busy_server(server, tmp_path):
    server.num_busy = 2
    url = f"{server.url}?X-Amz-Signature=0"
    copy = fetch(url, cache=tmp_path)
    assert copy.read_bytes() == CONTENT
    num_asked = len(server.asked)
    assert fetch(url, cache=tmp_path) == copy
    assert len(server.asked) == num_asked + 1
    with pytest.raises(RunError, match="the server answers 404"):
        fetch(f"http://{server.host}/none.tar", cache=tmp_path)
    assert copies(tmp_path) == [copy]


def test_the_user_and_password_of_a_url_are_sent(server, tmp_path):
    server.user = "me:p@ss:w\u00f6rd"
    copy = fetch(f"http://me:p%40ss:w%C3%B6rd@{server.host}/file.tar", cache=tmp_path)
    assert copy.read_bytes() == CONTENT
    for wrong in ("", "me:other@", "me@"):
        with pytest.raises(RunError, match="the server answers 401"):
            fetch(f"http://{wrong}{server.host}/file.tar", cache=tmp_path)
    assert copies(tmp_path) == [copy]


def test_a_download_that_breaks_off_goes_on_where_it_was(server, tmp_path):
    server.cut_after = 300_000
    assert fetch(server.url, cache=tmp_path).read_bytes() == CONTENT
    # A byte tells version and length.
    copying = [one for one in server.asked if one != "bytes=0-0"]
    begins = [int(re.fullmatch(r"bytes=(\d+)-1048575", one)[1]) for one in copying]
    assert begins == sorted(set(begins)) and begins[0] == 0 and len(begins) == 4


def test_a_server_that_gives_no_parts_of_files_is_copied_from(server, tmp_path):
    server.gives_parts = False
    assert fetch(server.url, cache=tmp_path).read_bytes() == CONTENT
    with pytest.raises(RunError, match="cannot be streamed: the server gives no byte ranges"):
        RemoteFile(find_object(server.url))


def test_a_download_does_not_go_on_with_another_file(server, tmp_path):
    def change(text):
        if not text.startswith("bytes 0-"):
            server.etag = '"2"'
        return text

    server.cut_after, server.change_range = 300_000, change
    with pytest.raises(RunError, match="has been changed since it was opened"):
        fetch(server.url, cache=tmp_path)
    assert copies(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda _: "bytes 10-29/1048576", "gave bytes 10-29"),
        (lambda _: None, "gave"),
        (lambda text: text.replace("/1048576", "/*"), "gave"),
        (lambda text: text.replace("/1048576", "/1048577"), "has been changed"),
    ],
)
def test_a_part_of_something_else_is_not_taken(server, change, told):
    found = find_object(server.url)
    assert read_part(found, 0, 20) == CONTENT[:20]
    server.change_range = change
    with pytest.raises(RunError, match=told):
        read_part(found, 0, 20)


def write_tar(path, shade):
    """A tar of four pictures of one shade."""
    picture = datasets.encode(Image.new("RGB", (16, 16), (shade,) * 3))
    members = []
    for index in range(4):
        members += [(f"{index}.png", picture), (f"{index}.txt", b"grey")]
    return datasets.write_tar(path, members).read_bytes()


@pytest.mark.parametrize("kind", ["web", "pipe"])
def test_a_copy_of_unknown_age_is_told_and_recorded_and_refreshed_on_request(
    kind, server, tmp_path, capsys
):
    tar, cache = tmp_path / "file.tar", tmp_path / "cache"
    old, new = write_tar(tmp_path / "old.tar", 10), write_tar(tmp_path / "new.tar", 20)
    assert len(old) == len(new) and old != new
    server.etag = None
    place = server.url if kind == "web" else f"pipe:cat {tar}"

    def run(content, *flags):
        """The content of the copy after a run, what the record says of it, and what was told."""
        server.content = content
        tar.write_bytes(content)
        results = tmp_path / "runs" / str(len(list((tmp_path / "runs").glob("*"))))
        argv = ["--remote", place, "--local", str(cache), "--results_dir", str(results), *flags]
        size = ["--image_size", "16", "--batch_size", "4", "--num_workers", "0"]
        assert data_script.main([*argv, *size, "--num_batches", "1"]) == 0
        (record,) = map(load_record, results.glob("*/record.json"))
        validate(record)
        (copy,) = copies(cache)
        found = copy.read_bytes(), record["data"].get("unchecked_copies")
        os.utime(copy, (10**9, 10**9))  # of long before the next run
        return *found, capsys.readouterr().err.count("--refresh")

    unchecked = {"num_files": 1, "oldest_utc": "2001-09-09T01:46:40+00:00"}
    assert run(old) == (old, None, 0)
    assert run(new) == (old, unchecked, 1)
    assert run(new, "--refresh") == (new, None, 0)
    assert run(new) == (new, unchecked, 1)


def test_a_file_without_a_version_is_copied_again_when_its_length_changes(server, tmp_path):
    server.etag = None
    fetch(server.url, cache=tmp_path)
    server.content = b"another"
    assert fetch(server.url, cache=tmp_path).read_bytes() == b"another"


def test_a_refresh_that_fails_leaves_the_copy(tmp_path):
    place = f"pipe:cat {tmp_path}/file"
    (tmp_path / "file").write_text("whole")
    copy = fetch(place, cache=tmp_path / "cache")
    (tmp_path / "file").unlink()
    with pytest.raises(RunError, match="No such file"):
        fetch(place, cache=tmp_path / "cache", run_began_s=time.time() + 1, refresh=True)
    assert copy.read_text() == "whole"


RANK = """import sys
from pathlib import Path
from sdbench.data.places.remote_files import fetch_all
from sdbench.data.source import SourceConfig
sizes = {"image_size": 16, "device_batch_size": 1, "seed": 0}
config = SourceConfig(data_format="webdataset", refresh=True, **sizes)
for _ in range(2):
    fetch_all([sys.argv[1]], cache=Path(sys.argv[2]), config=config)
"""
LAUNCHER = """import os, subprocess, sys, time
time.sleep(0.1)
for rank in "01":
    command = [sys.executable, "-c", sys.argv[1], *sys.argv[2:]]
    subprocess.run(command, env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"}, check=True)
"""


@pytest.mark.slow
def test_ranks_refresh_once_a_run(tmp_path, repository):
    (tmp_path / "torchrun").write_text(LAUNCHER)
    place = f"pipe:echo copied | tee -a {tmp_path}/log"
    command = [sys.executable, tmp_path / "torchrun", RANK, place, tmp_path / "cache"]
    for num_runs in (1, 2):
        # The second rank begins when the first has ended: later than the copy was made.
        subprocess.run(command, cwd=repository, check=True)
        assert (tmp_path / "log").read_text() == num_runs * "copied\n"
        time.sleep(1.1)  # the kernel tells the start of a process from whole seconds of the boot


@pytest.mark.parametrize("gives_parts", [True, False])
def test_a_web_file_is_known_by_its_length_and_what_its_server_tells(server, gives_parts, capsys):
    server.gives_parts = gives_parts
    config = datasets.make_source("webdataset", server.url)

    def told_after(etag: str | None, content: bytes) -> list[str]:
        before = identify({"data": config})
        server.etag, server.content = etag, content
        return [*describe_changes(before, identify({"data": config})).values()]

    start = "data: 1 file was written again: file.tar (1048576 bytes, "
    assert told_after('"2"', CONTENT) == [f'{start}"1" before, 1048576 bytes, "2" now)']
    assert told_after('"2"', CONTENT) == []
    assert "will not be seen" not in capsys.readouterr().err
    assert told_after(None, CONTENT) == [f'{start}"2" before, 1048576 bytes now)']
    assert told_after(None, b"short") == [
        "data: 1 file was written again: file.tar (1048576 bytes before, 5 bytes now)"
    ]
    assert "a change of 1 file of the data will not be seen" in capsys.readouterr().err


def test_an_object_of_googles_store_is_known_by_its_generation(monkeypatch):
    """By its own protocol, as a server with one object has it."""
    stored = {"0.tar": {"size": "10240", "generation": "7"}}

    @werkzeug.Request.application
    def answer(request: werkzeug.Request) -> werkzeug.Response:
        found = stored.get(request.path.removeprefix("/storage/v1/b/pictures/o/"))
        return werkzeug.Response(json.dumps(found), 404 if found is None else 200)

    http = werkzeug.serving.make_server("127.0.0.1", 0, answer, threaded=True)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{http.server_port}")
    try:
        config = datasets.make_source("webdataset", "gs://pictures/0.tar")
        before = identify({"data": config})
        stored["0.tar"]["generation"] = "8"
        (told,) = describe_changes(before, identify({"data": config})).values()
        assert told.endswith("0.tar (10240 bytes, 7 before, 10240 bytes, 8 now)")
        with pytest.raises(
            RunError, match=r"gs://pictures/1\.tar cannot be read: there is no such"
        ):
            find_object("gs://pictures/1.tar")
    finally:
        http.shutdown()
        http.server_close()
        remote._make_google_client.cache_clear()
