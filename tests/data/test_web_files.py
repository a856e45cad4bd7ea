"""Web files whose servers break off, give another part or tell no version."""

from __future__ import annotations

import http.server
import re
import threading

import pytest

from sdbench.base.errors import RunError
from sdbench.data.remote import fetch, find_object, read_part

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("temporary_folder", "impatient")]
CONTENT = bytes(range(256)) * 4096


class Server:
    """A web server of one file, with the faults that a test gives it.

    Attributes:
        content: The file.
        etag: Its version; None: no such header.
        cut_after: Bytes after which an answer breaks off; None: none does.
        change_range: Makes another Content-Range of the right one.
        asked: The Range headers that have come.
    """

    def __init__(self):
        self.content, self.etag, self.cut_after = CONTENT, '"1"', None
        self.change_range = lambda text: text
        self.asked = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.headers.get("Range")
                outer.asked.append(asked)
                first, last = 0, len(outer.content) - 1
                if asked:
                    first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())
                part = outer.content[first : last + 1]
                self.send_response(206 if asked else 200)
                self.send_header("Content-Length", str(len(part)))
                if asked:
                    text = outer.change_range(f"bytes {first}-{last}/{len(outer.content)}")
                    if text is not None:
                        self.send_header("Content-Range", text)
                if outer.etag:
                    self.send_header("ETag", outer.etag)
                self.end_headers()
                self.wfile.write(part[: outer.cut_after])

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/file.tar"


@pytest.fixture
def server():
    one = Server()
    thread = threading.Thread(target=one.http.serve_forever, daemon=True)
    thread.start()
    yield one
    one.http.shutdown()
    one.http.server_close()


def test_a_download_that_breaks_off_goes_on_where_it_was(server, tmp_path):
    server.cut_after = 300_000
    assert fetch(server.url, cache=tmp_path).read_bytes() == CONTENT
    # The first answer tells the version, the second is the copy.
    assert server.asked[:2] == [None, None]
    begins = [int(re.fullmatch(r"bytes=(\d+)-1048575", one)[1]) for one in server.asked[2:]]
    assert begins == sorted(set(begins)) and begins[0] > 0 and len(begins) == 3


def test_a_download_does_not_go_on_with_another_file(server, tmp_path):
    def change(text):
        server.etag = '"2"'
        return text

    server.cut_after = 300_000
    send = server.change_range
    server.change_range = lambda text: change(send(text))
    with pytest.raises(RunError, match="changed while it was copied"):
        fetch(server.url, cache=tmp_path)
    assert not [
        path
        for path in tmp_path.iterdir()
        if path.name.endswith("file.tar") and not path.name.startswith(".")
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda _: "bytes 10-29/1048576", "gives bytes 10-29"),
        (lambda _: None, "gives"),
        (lambda text: text.replace("/1048576", "/*"), "gives"),
        (lambda text: text.replace("/1048576", "/1048577"), "has been changed"),
    ],
)
def test_a_part_of_something_else_is_not_taken(server, change, told):
    found = find_object(server.url)
    assert read_part(found, 0, 20) == CONTENT[:20]
    server.change_range = change
    with pytest.raises(RunError, match=told):
        read_part(found, 0, 20)


def test_a_file_without_a_version_is_copied_again_when_its_length_changes(server, tmp_path, capsys):
    server.etag = None
    fetch(server.url, cache=tmp_path)
    assert capsys.readouterr().err.count("does not say") == 0
    copy = fetch(server.url, cache=tmp_path)
    told = capsys.readouterr().err
    assert "does not say whether it has changed" in told and str(copy) in told
    server.content = b"another"
    assert fetch(server.url, cache=tmp_path).read_bytes() == b"another"


def test_the_copy_of_what_a_command_printed_is_named(tmp_path, capsys):
    first = fetch("pipe:echo one", cache=tmp_path)
    capsys.readouterr()
    assert fetch("pipe:echo one", cache=tmp_path) == first
    assert str(first) in capsys.readouterr().err
