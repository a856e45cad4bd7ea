"""Copies of files at URLs, of packed files and of the output of commands; reads parts of files.

Tars and parquet files are read by number: each is copied once, and unpacked if it is a gzip file,
or it is read in parts (remote_files.py). Streaming copies MDS shards, as they are needed.
fsspec's file cache does not replace this: it asks no web server for the version of a file, never
tries again, and locks out no other process.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gzip
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from sdbench.base.cache import private_folder
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import new_file
from sdbench.base.progress import show_progress
from sdbench.data.command_output import PIPE, CommandOutput
from sdbench.data.source import SourceConfig

S3 = "s3://"
WEB = ("http://", "https://")
# RFC 1952, section 2.3.1: the first two bytes.
GZIP_MAGIC = b"\x1f\x8b"

# How long a server may be silent, and how often boto3 and urllib3 try, with growing pauses: a store
# that answers 503 for a few seconds is waited for, a dead one is given up within a minute.
SILENCE_TIMEOUT_S = 20.0
NUM_ATTEMPTS = 5
# Before a part that broke off is asked for again; then twice as long, and so on.
FIRST_PAUSE_S = 0.2
NUM_PARALLEL_DOWNLOADS = 8
# A copy that breaks off goes on after its last piece.
PIECE_BYTES = 2**18
# What a process keeps open to a server for its threads, of which each tar that is being read has
# one. For more the libraries warn, and connect anew each time.
NUM_CONNECTIONS = 64

# Places whose older copies this process uses although nothing tells whether they have changed, and
# when these were made, in seconds since 1970.
_unchecked: dict[str, float] = {}

Item = TypeVar("Item")
Content = TypeVar("Content")


def is_url(place: str) -> bool:
    """Return True for a URL or a command, False for a path."""
    return "://" in place or place.startswith(PIPE)


def shown(place: str) -> str:
    """Return a place as messages show it: its name, and a command in quotes."""
    return repr(place) if place.startswith(PIPE) else place


def path_of(place: str) -> str:
    """Return the path of a place: of S3 with the bucket, of other URLs without host and query."""
    if not is_url(place):
        return place
    if place.startswith(S3):
        return place.removeprefix(S3)  # a key may hold ? and #
    path = urlsplit(place).path
    return unquote(path) if place.startswith(WEB) else path


def must_be_copied(place: str) -> bool:
    """Return True if a file can be read by number only from a copy: it is remote, or packed."""
    try:
        return is_url(place) or _is_packed(Path(place))
    except OSError as error:
        raise RunError(f"{place} cannot be read: {error.strerror}.") from error


def cache_folder(place: str, local: str | None) -> Path:
    """The folder for copies of the files at `place`.

    Args:
        place: As the user gave it.
        local: Value of ``--local``, or None for a folder of the user's cache, one for each place.
    """
    if local is not None:
        return Path(local)
    return private_folder(hashlib.sha256(place.encode()).hexdigest()[:12])


def identify(place: str) -> str:
    """Return a name of a place that may be stored: a path, or a digest of a URL.

    A URL may hold a password.
    """
    if is_url(place):
        return hashlib.sha256(place.encode()).hexdigest()
    return str(Path(place).resolve()) if Path(place).exists() else place


def in_parallel(work: Callable[[Item], Content], items: Sequence[Item]) -> list[Content]:
    """Apply `work` to items in several threads, showing progress; returns the results in order."""
    with ThreadPoolExecutor(NUM_PARALLEL_DOWNLOADS) as pool:
        done = pool.map(work, items)
        return list(show_progress(done, total=len(items), unit="file"))


def fetch_all(places: Sequence[str], *, cache: Path, config: SourceConfig) -> dict[str, Path]:
    """Copy files as `fetch` does, several at once; returns the copy of each place.

    The first rank prints how many older copies are used although nothing tells whether they are
    still what their sources hold.
    """
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


def describe_unchecked(places: Iterable[str]) -> dict[str, Any] | None:
    """Describe, for a record, older copies of places that this process uses unchecked.

    Returns:
        ``num_files``, and ``oldest_utc``, when the oldest was made; None if there are none.
    """
    made_s = [_unchecked[place] for place in places if place in _unchecked]
    if not made_s:
        return None
    oldest = datetime.datetime.fromtimestamp(int(min(made_s)), datetime.timezone.utc)
    return {"num_files": len(made_s), "oldest_utc": oldest.isoformat()}


def fetch(place: str, *, cache: Path, run_began_s: float = 0.0, refresh: bool = False) -> Path:
    """Copy a file, unpacked, unless this version of it has been copied before.

    Of several processes one copies, and the others wait for it. A copy has a temporary name until
    it is whole. Its final name holds a digest of the place and of the version that the store tells
    (its ETag, or else its length), so that no other file or version is taken for it.

    Args:
        place: ``s3://``, ``http(s)://``, another scheme that Streaming knows, ``pipe:`` and a
            command, or the path of a gzip file.
        cache: Folder for the copy.
        run_began_s: When the run began, in seconds since 1970. A copy that was made before may be
            stale if its store tells no version.
        refresh: Make such a copy again. Otherwise it is used, and `describe_unchecked` counts it.

    Returns:
        The copy.

    Raises:
        RunError: The file cannot be copied; its place and the reason are named.
    """
    from filelock import FileLock

    with _errors_named(f"{place!r} cannot be read"):
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


@contextlib.contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Turn the errors of a store, each of which raises its own types, into a `RunError`."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        raise RunError(f"{what}: {explain(error)}") from error


def list_urls(folder: str) -> list[str]:
    """Return the files of an S3 folder and the folders below it, sorted."""
    if not folder.startswith(S3):
        raise ConfigError(
            "Only folders of S3 can be listed",
            value=folder,
            allowed=f"an s3:// folder, or each file by name, e.g. {folder}/{{00..15}}.tar",
            flag="--remote",
        )
    bucket, prefix = _split_s3(folder.rstrip("/") + "/")
    with _errors_named(f"{folder} cannot be listed"):
        pages = _s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return sorted(f"{S3}{bucket}/{key}" for key in keys if not key.endswith("/"))


class RemoteObject(NamedTuple):
    """A file at a URL, as it was found.

    Attributes:
        url: ``s3://`` or ``http(s)://``.
        num_bytes: Its length.
        version: The store's name for this content (its ETag), empty if there is none.
    """

    url: str
    num_bytes: int
    version: str

    @property
    def source(self) -> str:
        """As of `StoredFile`."""
        return self.url

    def __str__(self) -> str:
        return self.url


def find_object(url: str) -> RemoteObject:
    """Ask for the length and version of a file of S3 or the web."""
    with _errors_named(f"{url} cannot be read"):
        num_bytes, version = _ask(url)
    if num_bytes is None:
        raise RunError(f"{url} cannot be streamed: the server does not say how long it is.")
    return RemoteObject(url, num_bytes, version)


def _ask(url: str) -> tuple[int | None, str]:
    """Return length and version of a file; None for an unknown length."""
    if url.startswith(S3):
        bucket, key = _split_s3(url)
        found = _s3_client().head_object(Bucket=bucket, Key=key)
        return found["ContentLength"], found["ETag"]
    # GET, not HEAD, which servers and signed URLs may refuse; the content is not taken.
    answer = _get(url)
    answer.close()
    num_bytes = answer.headers.get("Content-Length")
    return None if num_bytes is None else int(num_bytes), _web_version(answer)


def read_part(file: RemoteObject, begin: int, end: int) -> bytes:
    """Read the bytes from `begin` to before `end`, in up to `NUM_ATTEMPTS` attempts.

    Raises:
        RunError: They cannot be read, or the file has changed since it was found.
    """
    place = f"{file.url}, from byte {begin} on,"
    for attempt in range(NUM_ATTEMPTS):
        # The libraries of the stores have tried again by themselves.
        with _errors_named(f"{place} cannot be read"):
            version, num_bytes, body = _open_part(file.url, begin, end)
        if (version, num_bytes) != (file.version, file.num_bytes):
            raise RunError(f"{file.url} has been changed since it was opened.")
        try:
            content = body.read()
            if len(content) == end - begin:
                return content
            fault: Exception = EOFError(f"{len(content)} of {end - begin} bytes came")
        except Exception as error:
            fault = error
        if attempt + 1 < NUM_ATTEMPTS:
            time.sleep(FIRST_PAUSE_S * 2**attempt)
    reason = f"{place} cannot be read, in {NUM_ATTEMPTS} attempts: {explain(fault)}"
    raise RunError(reason) from fault


def _open_part(url: str, begin: int, end: int) -> tuple[str, int, Any]:
    """Return version and length of a file, and a reader of these bytes of it."""
    part = f"bytes={begin}-{end - 1}"
    if url.startswith(S3):
        bucket, key = _split_s3(url)
        answer = _s3_client().get_object(Bucket=bucket, Key=key, Range=part)
        version, content_range, body = answer["ETag"], answer.get("ContentRange"), answer["Body"]
    else:
        body = _get(url, part=part)
        version, content_range = _web_version(body), body.headers.get("Content-Range")
    # E.g. "bytes 0-99/1234" (RFC 9110, 14.4).
    given, _, num_bytes = (content_range or "").partition("/")
    if given != part.replace("=", " ") or not num_bytes.isdecimal():
        body.close()
        raise RunError(
            f"{url} cannot be read: asked for {part} the server gives {content_range or 'no range'}"
        )
    return version, int(num_bytes), body


def _web_version(answer: Any) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _version(place: str) -> tuple[str, bool]:
    """Return a name of the content of a file, and whether other content would have another name."""
    if not is_url(place):
        stat = os.stat(place)
        return f"{Path(place).absolute()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}", True
    if not place.startswith((S3, *WEB)):
        return "", False
    num_bytes, version = _ask(place)
    return (version, True) if version else (f"{num_bytes} bytes", False)


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC


def _copy_unpacked(place: str, path: Path) -> None:
    """Copy a file to `path`; its folder is a temporary one."""
    found = Path(place)
    if is_url(place):
        found = path.with_name("copy")
        _copy(place, found)
        if not _is_packed(found):
            found.rename(path)
            return
    with gzip.open(found) as packed, path.open("wb") as file:
        shutil.copyfileobj(packed, file, 2**20)


def _copy(url: str, path: Path) -> None:
    if url.startswith(PIPE):
        with CommandOutput(url.removeprefix(PIPE)) as output, path.open("wb") as file:
            shutil.copyfileobj(output, file, 2**20)
    elif url.startswith(S3):
        bucket, key = _split_s3(url)
        _s3_client().download_file(bucket, key, str(path))
    elif url.startswith(WEB):
        _download(url, path)
    else:
        from streaming.base.storage import CloudDownloader

        CloudDownloader.direct_download(url, str(path), SILENCE_TIMEOUT_S)


def _download(url: str, path: Path) -> None:
    """Copy a web file; a download that breaks off goes on if it is still the same file."""
    import urllib3

    answer = _get(url)
    length, version = answer.headers.get("Content-Length"), _web_version(answer)
    # A response that the server compresses cannot be continued at a byte of the unpacked file.
    can_go_on = length is not None and "Content-Encoding" not in answer.headers
    with path.open("wb") as file:
        num_failed = 0
        while True:
            before = file.tell()
            try:
                # Shorter than promised is an error of urllib3's.
                for piece in answer.stream(PIECE_BYTES):
                    file.write(piece)
                return
            except urllib3.exceptions.HTTPError:
                num_failed = 1 if file.tell() >= before + PIECE_BYTES else num_failed + 1
                if not can_go_on or num_failed == NUM_ATTEMPTS:
                    raise
            time.sleep(FIRST_PAUSE_S * 2 ** (num_failed - 1))
            known, num_bytes, answer = _open_part(url, file.tell(), int(length))
            if (known, num_bytes) != (version, int(length)):
                raise RunError(f"{url} has been changed while it was copied.")


def _get(url: str, *, part: str | None = None) -> Any:
    """Open a web file, or with a Range header a part of it; its content is not read yet."""
    import urllib3

    retries = urllib3.Retry(
        NUM_ATTEMPTS, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504)
    )
    # urllib3 ignores the user and password of a URL, and drops the header on a way to other hosts.
    # It encodes the header as Latin-1, which gives the bytes that Latin-1 was decoded from.
    user_info = urllib3.util.parse_url(url).auth
    headers = urllib3.util.make_headers(basic_auth=user_info and unquote(user_info, "latin-1"))
    answer = _make_web_pool(os.getpid()).request(
        "GET",
        url,
        headers=headers if part is None else {**headers, "Range": part},
        preload_content=False,
        # A part of what a server has packed cannot be unpacked, nor has it the length asked for.
        decode_content=part is None,
        timeout=SILENCE_TIMEOUT_S,
        retries=retries,
    )
    if answer.status != (200 if part is None else 206):
        answer.close()
        ignored = part is not None and answer.status == 200
        said = "gives no parts of files" if ignored else f"answers {answer.status}"
        raise RunError(f"{url} cannot be read: the server {said}")
    return answer


@functools.cache
def _make_web_pool(process: int) -> Any:
    """Return connections of this process: two workers must not read from one."""
    import urllib3

    return urllib3.PoolManager(maxsize=NUM_CONNECTIONS)


def _split_s3(url: str) -> tuple[str, str]:
    # Not by `urlsplit`: a key may hold ? and #.
    bucket, _, key = url.removeprefix(S3).partition("/")
    return bucket, key.lstrip("/")


def _s3_client() -> Any:
    """Return a client of the store at `S3_ENDPOINT_URL`, as for Streaming, or of Amazon's."""
    return _make_s3_client(os.environ.get("S3_ENDPOINT_URL"), os.getpid())


@functools.cache
def _make_s3_client(endpoint_url: str | None, process: int) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=SILENCE_TIMEOUT_S,
        read_timeout=SILENCE_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": NUM_ATTEMPTS},
        max_pool_connections=NUM_CONNECTIONS,
    )
    return boto3.session.Session().client("s3", endpoint_url=endpoint_url, config=config)


def explain(error: Exception) -> str:
    """Return a store's error in one line: type, message, and what to do about credentials."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return f"no S3 credentials are set, by AWS_ACCESS_KEY_ID, a profile or a role ({reason})"
    return reason
