"""Files at URLs and the output of commands, read as they come; nothing is kept on a disk.

Arrow's S3 client does not replace this, as it does not survive the fork of loader workers and reads
no web files; nor do fsspec and smart_open, which do not notice that a file has been changed between
two parts of it.
"""

from __future__ import annotations

import gzip
import io
import threading
from concurrent.futures import Future
from typing import BinaryIO

from sdbench.base.errors import RunError
from sdbench.data.command_output import PIPE, CommandOutput
from sdbench.data.remote import GZIP_MAGIC, RemoteObject, find_object, is_url, read_part

# A request for so much: its latency of some 50 ms is then a small part of its time, a worker holds
# little, and no connection is kept while a trainer is busy (stores close those that are silent).
PART_BYTES = 8 * 2**20
# A reader of tars goes back by a block at most.
TAIL_BYTES = 4096


class RemoteFile(io.RawIOBase):
    """A file at a URL, read from any place; a request is for `PART_BYTES` at most."""

    def __init__(self, found: RemoteObject) -> None:
        """Open it."""
        self._found = found
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to another byte."""
        self._position = (0, self._position, self._found.num_bytes)[whence] + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        """Read as `read_part` does, up to the end of the file."""
        begin = self._position
        end = min(begin + len(buffer), self._found.num_bytes)
        while self._position < end:
            content = self._read(self._position, min(self._position + PART_BYTES, end))
            at = self._position - begin
            buffer[at : at + len(content)] = content
            self._position += len(content)
        return self._position - begin

    def _read(self, begin: int, end: int) -> bytes:
        return read_part(self._found, begin, end)


class _FileReadAhead(RemoteFile):
    """A file that is read from its beginning on: the next part is fetched while one is used."""

    def __init__(self, found: RemoteObject) -> None:
        super().__init__(found)
        self._coming: tuple[tuple[int, int], Future[bytes]] | None = None

    def _read(self, begin: int, end: int) -> bytes:
        coming, self._coming = self._coming, None
        is_it = coming is not None and coming[0] == (begin, end)
        content = coming[1].result() if is_it else super()._read(begin, end)
        following = end, min(end + PART_BYTES, self._found.num_bytes)
        if following[0] < following[1]:
            future: Future[bytes] = Future()
            # The exit of the process does not wait for a daemon, unlike for the threads of a pool.
            threading.Thread(target=self._fetch, args=(future, *following), daemon=True).start()
            self._coming = following, future
        return content

    def _fetch(self, future: Future[bytes], begin: int, end: int) -> None:
        try:
            future.set_result(read_part(self._found, begin, end))
        except BaseException as error:  # raised again by who asks for the result
            future.set_exception(error)


class _Onward:
    """A stream that can only be read forward, for a reader that knows its position and skips."""

    def __init__(self, stream: BinaryIO, *, below: BinaryIO | None = None) -> None:
        self._stream = stream
        self._below = below
        self._end = 0  # of what has been read
        self._tail = b""
        self._back = 0

    def tell(self) -> int:
        return self._end - self._back

    def seek(self, offset: int) -> int:
        self._back = max(self._end - offset, 0)
        if self._back > len(self._tail):
            raise RunError(f"cannot go back to byte {offset} from byte {self._end}")
        while self._end < offset and self._pull(min(offset - self._end, 2**20)):
            pass
        return self.tell()

    def read(self, num_bytes: int) -> bytes:
        again = self._tail[len(self._tail) - self._back :][:num_bytes]
        self._back -= len(again)
        if len(again) == num_bytes:
            return again
        return again + self._pull(num_bytes - len(again))

    def _pull(self, num_bytes: int) -> bytes:
        content = self._stream.read(num_bytes)
        self._end += len(content)
        self._tail = (self._tail + content[-TAIL_BYTES:])[-TAIL_BYTES:]
        return content

    def __enter__(self) -> _Onward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()
        if self._below is not None:
            self._below.close()


def open_stream(place: str) -> BinaryIO:
    """Open a file to be read forward, unpacked if it is a gzip file.

    `place` is ``s3://``, ``http(s)://``, ``pipe:`` and a command, or a path. The stream has `read`,
    `tell`, `close`, and a `seek` that goes back by at least `TAIL_BYTES`.
    """
    if place.startswith(PIPE):
        stream = io.BufferedReader(CommandOutput(place.removeprefix(PIPE)), PART_BYTES)
    elif is_url(place):
        stream = io.BufferedReader(_FileReadAhead(find_object(place)), PART_BYTES)
    else:
        stream = open(place, "rb")  # noqa: SIM115
    if stream.peek(len(GZIP_MAGIC))[: len(GZIP_MAGIC)] == GZIP_MAGIC:
        # Its own way back is to read all again.
        return _Onward(gzip.GzipFile(fileobj=stream), below=stream)
    # A file at a URL is not skipped in either: the part that comes would be asked for again.
    return _Onward(stream) if is_url(place) else stream
