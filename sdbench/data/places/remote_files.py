"""Files at URLs, packed files and the output of commands: read as they come, or copied once.

Tars and parquet files are streamed or copied; Streaming copies MDS shards, as they are needed.
Arrow's S3 client cannot replace this: it does not survive the fork of loader workers and reads no
web files. fsspec was tried for gs, az and hf: 8 lines of 1,025 went, 9 packages (6 MB) came, and a
part took 3, 2 and 4 requests, not 1: only a second question tells its version. One that broke off
was lost, not resumed. GCS_KEY, oci:// and sftp:// went too, and Streaming excludes the client of
Google's store that gcsfs of 2026 needs.
"""

from __future__ import annotations

import datetime
import functools
import gzip
import hashlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from sdbench.base.errors import RunError
from sdbench.base.files import new_file
from sdbench.data.places import remote
from sdbench.data.places.command_output import PIPE, CommandOutput
from sdbench.data.places.remote import (
    S3,
    TELLING,
    WEB,
    RemoteObject,
    errors_named,
    find_object,
    get_web_file,
    in_parallel,
    is_url,
    read_part,
    shown,
)
from sdbench.data.source import SourceConfig

# RFC 1952, section 2.3.1: the first two bytes.
GZIP_MAGIC = b"\x1f\x8b"

# Bytes per request: enough to make 50 ms of latency a small part, yet little for a worker to hold.
# No connection is kept while a trainer is busy (stores close silent ones).
PART_BYTES = 8 * 2**20

# Places whose older copies this process uses without knowing whether the source has changed, to the
# modification times of the copies in seconds since 1970.
_unchecked: dict[str, float] = {}


class RemoteFile(io.RawIOBase):
    """A file at a URL; each request is for `PART_BYTES` at most."""

    def __init__(self, found: RemoteObject, *, reads_ahead: bool = False) -> None:
        """Set up; with `reads_ahead` the next part is fetched while one is used."""
        if not found.has_parts:
            raise RunError(f"{found} cannot be streamed: the server gives no byte ranges.")
        self._found = found
        self._position = 0
        self._reads_ahead = reads_ahead
        self._coming: Future[bytes] | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return False where the part that was fetched ahead would be requested again."""
        return not self._reads_ahead

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
        # With `reads_ahead`, parts are read in sequence: the next one is the one asked for.
        coming, self._coming = self._coming, None
        content = read_part(self._found, begin, end) if coming is None else coming.result()
        following = min(end + PART_BYTES, self._found.num_bytes)
        if self._reads_ahead and end < following:
            self._coming = Future()
            # A daemon: the exit of the process would wait for the threads of a pool.
            arguments = self._coming, end, following
            threading.Thread(target=self._fetch, args=arguments, daemon=True).start()
        return content

    def _fetch(self, future: Future[bytes], begin: int, end: int) -> None:
        try:
            future.set_result(read_part(self._found, begin, end))
        except BaseException as error:  # raised again by who asks for the result
            future.set_exception(error)


class _Unpacked(gzip.GzipFile):
    """The content of a gzip file; closing it closes that file too."""

    def seekable(self) -> bool:
        return False  # it goes back by decompressing everything again

    def close(self) -> None:
        packed = self.fileobj
        super().close()
        if packed is not None:
            packed.close()


def open_stream(place: str) -> BinaryIO:
    """Open a file to be read forward, unpacked if it is a gzip file.

    `place` is ``s3://``, ``http(s)://``, ``pipe:`` and a command, or a path. Only a file at a path
    that is not packed is `seekable`.
    """
    if place.startswith(PIPE):
        stream = io.BufferedReader(CommandOutput(place.removeprefix(PIPE)), PART_BYTES)
    elif is_url(place):
        found = find_object(place)
        raw = RemoteFile(found, reads_ahead=True) if found.has_parts else get_web_file(place)
        stream = io.BufferedReader(raw, PART_BYTES)
    else:
        stream = open(place, "rb")  # noqa: SIM115
    if stream.peek(len(GZIP_MAGIC))[: len(GZIP_MAGIC)] == GZIP_MAGIC:
        return _Unpacked(fileobj=stream)
    return stream


def must_be_copied(place: str) -> bool:
    """Return True if a file can be read by number only from a copy: it is remote, or packed."""
    try:
        if is_url(place):
            return True
        with open(place, "rb") as file:
            return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    except OSError as error:
        raise RunError(f"{place} cannot be read: {error.strerror}.") from error


def fetch_all(places: Sequence[str], *, cache: Path, config: SourceConfig) -> dict[str, Path]:
    """Copy files in parallel by `fetch`; rank 0 reports older copies that are used unchecked."""
    num_known = len(_unchecked)
    copy = functools.partial(
        fetch, cache=cache, run_began_s=config.run_began_s, refresh=config.refresh
    )
    copies = dict(zip(places, in_parallel(copy, places), strict=True))
    found = describe_unchecked(places)
    if found is not None and config.rank == 0 and len(_unchecked) > num_known:
        print(
            f"Copies in {cache} are used of {found['num_files']} of {len(places)} files, which do "
            f"not tell whether they have changed since (the oldest is of {found['oldest_utc']}). "
            "They are copied again by --refresh, or if they are deleted.",
            file=sys.stderr,
        )
    return copies


def describe_unchecked(places: Iterable[str | None]) -> dict[str, Any] | None:
    """Describe, for a record, the older copies of places that this process uses unchecked."""
    made_s = [_unchecked[place] for place in places if place in _unchecked]
    if not made_s:
        return None
    oldest = datetime.datetime.fromtimestamp(int(min(made_s)), datetime.UTC)
    return {"num_files": len(made_s), "oldest_utc": oldest.isoformat()}


def fetch(place: str, *, cache: Path, run_began_s: float = 0.0, refresh: bool = False) -> Path:
    """Copy a file, decompressed, unless this version of it has been copied before.

    One process copies, and others wait for it. A copy has a temporary name until it is complete.
    Its final name holds a digest of the place and of the version given by the store (its ETag, or
    else its length), so no other file or version is taken for it.

    If the store gives no version, a copy made before the run began (`run_began_s`, seconds since
    1970) may be stale: with `refresh` it is made again, else it is used and counted by
    `describe_unchecked`. A `RunError` names a file that cannot be copied.
    """
    from filelock import FileLock

    with errors_named(f"{shown(place)} cannot be read"):
        version, is_sure = _version(place)
        digest = hashlib.sha256(f"{place}\n{version}".encode()).hexdigest()[:12]
        name = urlsplit(place).path if is_url(place) else place
        name = "pipe" if place.startswith(PIPE) else name.rsplit("/", 1)[-1]
        path = cache / f"{digest}-{name}"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(cache / f".{path.name}.lock", mode=0o600):
            is_there = path.is_file()
            made_s = path.stat().st_mtime if is_there else run_began_s
            may_be_stale = made_s < run_began_s and not is_sure
            if not is_there or (may_be_stale and refresh):
                with new_file(path) as new:
                    _copy_unpacked(place, new)
                _unchecked.pop(place, None)
            elif may_be_stale:
                _unchecked[place] = made_s
        return path


def _version(place: str) -> tuple[str, bool]:
    """Return a version of a file's content, and whether every change of content changes it."""
    if not is_url(place):
        stat = os.stat(place)
        return f"{Path(place).absolute()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}", True
    if not place.startswith(TELLING):
        return "", False
    found = find_object(place)
    return (found.version, True) if found.version else (f"{found.num_bytes} bytes", False)


def _copy_unpacked(place: str, path: Path) -> None:
    """Copy a file, decompressed, to `path` in a temporary folder."""
    if is_url(place) and not place.startswith((PIPE, S3, *WEB)):
        from streaming.base.storage import CloudDownloader

        source, place = place, str(path.with_name("copy"))
        CloudDownloader.direct_download(source, place, remote.SILENCE_TIMEOUT_S)
    with open_stream(place) as stream, path.open("wb") as file:
        shutil.copyfileobj(stream, file, 2**20)
