"""Names of data places; listing of S3 folders, and reading of files of S3 and the web in parts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from sdbench.base.cache import private_folder
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.progress import show_progress
from sdbench.base.secrets import redact
from sdbench.data.places.command_output import PIPE

S3, GS = "s3://", "gs://"
WEB = ("http://", "https://")
# What stores and servers of these places tell of a file: its length and its version.
TELLING = (S3, GS, *WEB)
# Google's store by the protocol of S3.
GOOGLE_URL = "https://storage.googleapis.com"

# How long a server may be silent, and how often boto3 and urllib3 try, with growing pauses: a store
# that answers 503 for a few seconds is waited for, a dead one is given up within a minute.
SILENCE_TIMEOUT_S = 20.0
NUM_ATTEMPTS = 5
# Pause before a part that broke off is requested again; it doubles with each attempt.
FIRST_PAUSE_S = 0.2
NUM_PARALLEL_DOWNLOADS = 8
# Parts are read in pieces; one that breaks off resumes after its last piece.
PIECE_BYTES = 2**18
# Connections a process keeps open to a server: each tar being read has a thread that needs one.
# Beyond this number the libraries warn, and reconnect each time.
NUM_CONNECTIONS = 64

Item = TypeVar("Item")
Content = TypeVar("Content")


def is_url(place: str) -> bool:
    """Return True for a URL or a command, False for a path."""
    return "://" in place or place.startswith(PIPE)


def shown(place: str) -> str:
    """Return a place as messages show it: commands are quoted."""
    return repr(place) if place.startswith(PIPE) else place


def file_beside(place: str, name: str) -> str:
    """Return the place of a file of this name in the folder of another, a path or a URL."""
    if place.startswith(WEB):
        parts = urlsplit(place)
        return parts._replace(path=f"{parts.path.rpartition('/')[0]}/{name}").geturl()
    folder, slash, _ = place.rpartition("/")
    return f"{folder}{slash}{name}"


def path_of(place: str) -> str:
    """Return the path of a place: of S3 with the bucket, of other URLs without host and query."""
    if not is_url(place):
        return place
    if place.startswith(S3):
        return place.removeprefix(S3)  # a key may hold ? and #
    path = urlsplit(place).path
    return unquote(path) if place.startswith(WEB) else path


def cache_folder(place: str, local: str | None) -> Path:
    """The folder for copies of a place: ``--local``, or one of the user's cache named after it."""
    if local is not None:
        return Path(local)
    return private_folder(hashlib.sha256(place.encode()).hexdigest()[:12])


def lasting_name(file: str) -> str:
    """Return a name that stays the same: a path, or a URL without its signature."""
    if not is_url(file):
        return os.path.abspath(file)
    # Without the prefix, because `redact` cuts a ``pipe:`` command to its program.
    return redact(file.removeprefix(PIPE))


def storable_name(place: str) -> str:
    """Return a lasting name of a place that may be stored: a path, or a digest of a URL.

    A URL may hold a password.
    """
    if is_url(place):
        return hashlib.sha256(lasting_name(place).encode()).hexdigest()
    return str(Path(place).resolve()) if Path(place).exists() else place


def in_parallel(work: Callable[[Item], Content], items: Sequence[Item]) -> list[Content]:
    """Apply `work` to items in several threads, showing progress; returns the results in order."""
    with ThreadPoolExecutor(NUM_PARALLEL_DOWNLOADS) as pool:
        done = pool.map(work, items)
        return list(show_progress(done, total=len(items), unit="file"))


@contextlib.contextmanager
def errors_named(what: str) -> Iterator[None]:
    """Turn any error of a store's library into a `RunError`."""
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
    with errors_named(f"{folder} cannot be listed"):
        pages = _s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return sorted(f"{S3}{bucket}/{key}" for key in keys if not key.endswith("/"))


class RemoteObject(NamedTuple):
    """A file of a store or the web, as it was found."""

    url: str
    num_bytes: int | None  # None where the server does not tell it
    version: str  # the store's name for this content (its ETag), empty if there is none
    has_parts: bool = True  # whether the server gives ranges of bytes

    @property
    def source(self) -> str:
        """The URL, as `StoredFile.source`."""
        return self.url

    def __str__(self) -> str:
        return self.url


def find_object(url: str) -> RemoteObject:
    """Ask for the length and version of a file at one of the places of `TELLING`."""
    with errors_named(f"{url} cannot be read"):
        if url.startswith(GS):
            return _find_google_object(url)
        if url.startswith(S3):
            bucket, key = _split_s3(url)
            found = _s3_client().head_object(Bucket=bucket, Key=key)
            return RemoteObject(url, found["ContentLength"], found["ETag"])
        # GET, not HEAD, which servers and signed URLs may refuse.
        found, body = _open_part(url, 0, 1)
        body.close()
        return found


def _find_google_object(url: str) -> RemoteObject:
    """Ask Google's store, with the credentials that Streaming copies files with."""
    bucket, _, key = url.removeprefix(GS).partition("/")
    if {"GCS_KEY", "GCS_SECRET"} <= os.environ.keys():
        account = os.environ["GCS_KEY"], os.environ["GCS_SECRET"], None, "auto"
        client = _make_s3_client(GOOGLE_URL, os.getpid(), *account)
        found = client.head_object(Bucket=bucket, Key=key)
        return RemoteObject(url, found["ContentLength"], found["ETag"])
    blob = _make_google_client(os.getpid()).bucket(bucket).get_blob(key)
    if blob is None:
        raise RunError(f"{url} cannot be read: there is no such object")
    return RemoteObject(url, blob.size, str(blob.generation))


def read_part(file: RemoteObject, begin: int, end: int) -> bytes:
    """Read the bytes from `begin` to before `end`, resuming where a response breaks off.

    Raises a `RunError` after `NUM_ATTEMPTS` attempts in a row that gave less than a piece each, or
    if the file has changed since it was found.
    """
    pieces: list[bytes] = []
    num_failed = 0
    while begin < end:
        place, first = f"{file.url}, from byte {begin} on,", begin
        # boto3 and urllib3 retry failed requests themselves.
        with errors_named(f"{place} cannot be read"):
            found, body = _open_part(file.url, begin, end)
        if found != file:
            raise RunError(f"{file.url} has been changed since it was opened.")
        try:
            while begin < end:
                pieces.append(body.read(min(end - begin, PIECE_BYTES)))
                if not pieces[-1]:
                    raise EOFError(f"{end - begin} bytes are missing")
                begin += len(pieces[-1])
        except Exception as error:
            num_failed = 1 if begin >= first + PIECE_BYTES else num_failed + 1
            if num_failed == NUM_ATTEMPTS:
                reason = f"{place} cannot be read, in {NUM_ATTEMPTS} attempts: {explain(error)}"
                raise RunError(reason) from error
            time.sleep(FIRST_PAUSE_S * 2 ** (num_failed - 1))
    return b"".join(pieces)


def _open_part(url: str, begin: int, end: int) -> tuple[RemoteObject, Any]:
    """Return the current state of a file, and a reader of these bytes."""
    part = f"bytes={begin}-{end - 1}"
    if url.startswith(S3):
        bucket, key = _split_s3(url)
        answer = _s3_client().get_object(Bucket=bucket, Key=key, Range=part)
        version, content_range, body = answer["ETag"], answer.get("ContentRange"), answer["Body"]
    else:
        body = get_web_file(url, part=part)
        version = body.headers.get("ETag") or body.headers.get("Last-Modified") or ""
        if body.status == 200:
            length = body.headers.get("Content-Length") or ""
            num_bytes = int(length) if length.isdecimal() else None
            return RemoteObject(url, num_bytes, version, has_parts=False), body
        content_range = body.headers.get("Content-Range")
    # E.g. "bytes 0-99/1234" (RFC 9110, 14.4).
    given, _, num_bytes = (content_range or "").partition("/")
    if given != part.replace("=", " ") or not num_bytes.isdecimal():
        body.close()
        raise RunError(
            f"{url} cannot be read: asked for {part}, the server gave {content_range or 'no range'}"
        )
    return RemoteObject(url, int(num_bytes), version), body


def get_web_file(url: str, *, part: str | None = None) -> Any:
    """Open a web file; `part` is the value of a Range header, which a server may ignore."""
    import urllib3

    retries = urllib3.Retry(
        NUM_ATTEMPTS, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504)
    )
    # urllib3 ignores the user and password of a URL, and drops this header when redirected to
    # another host. It encodes the header as Latin-1, so decoding as Latin-1 keeps the bytes.
    user_info = urllib3.util.parse_url(url).auth
    headers = urllib3.util.make_headers(basic_auth=user_info and unquote(user_info, "latin-1"))
    answer = _make_web_pool(os.getpid()).request(
        "GET",
        url,
        headers=headers if part is None else {**headers, "Range": part},
        preload_content=False,
        # A part of compressed content cannot be decompressed, and has another length.
        decode_content=False,
        timeout=SILENCE_TIMEOUT_S,
        retries=retries,
    )
    if answer.status not in (200, 206):
        answer.close()
        raise RunError(f"{url} cannot be read: the server answers {answer.status}")
    answer.auto_close = False  # a BufferedReader reads once more at the end
    return answer


@functools.cache
def _make_web_pool(process: int) -> Any:
    """Return this process's connection pool: two workers must not share a connection."""
    import urllib3

    return urllib3.PoolManager(maxsize=NUM_CONNECTIONS)


def _split_s3(url: str) -> tuple[str, str]:
    # Not by `urlsplit`: a key may hold ? and #.
    bucket, _, key = url.removeprefix(S3).partition("/")
    return bucket, key.lstrip("/")


def _s3_client() -> Any:
    """Return a client of the store at `S3_ENDPOINT_URL` (as in Streaming), or of Amazon's."""
    return _make_s3_client(os.environ.get("S3_ENDPOINT_URL"), os.getpid())


@functools.cache
def _make_s3_client(endpoint_url: str | None, process: int, *account: str | None) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=SILENCE_TIMEOUT_S,
        read_timeout=SILENCE_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": NUM_ATTEMPTS},
        max_pool_connections=NUM_CONNECTIONS,
    )
    session = boto3.session.Session(*account)
    return session.client("s3", endpoint_url=endpoint_url, config=config)


@functools.cache
def _make_google_client(process: int) -> Any:
    from google.cloud.storage import Client

    return Client()


def explain(error: Exception) -> str:
    """Return a store's error in one line: type, message, and what to do about credentials."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return f"no S3 credentials are set, by AWS_ACCESS_KEY_ID, a profile or a role ({reason})"
    return reason
