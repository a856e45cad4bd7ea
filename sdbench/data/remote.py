"""Copies of files behind URLs, of packed files and of the output of commands, on this machine.

Tars and parquet files are read by number, which needs whole files, so each is copied once, and
unpacked if it is a gzip file. (MDS shards are copied one by one, as they are needed, by Streaming.)
A library does not replace this: fsspec's file cache asks no web server for the version of a file,
never tries again, and locks out no other process; Streaming's downloaders know neither versions nor
web servers, and load torch.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sdbench.base.cache import private_folder
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import new_file
from sdbench.base.progress import show_progress

PIPE = "pipe:"
S3 = "s3://"
# RFC 1952, section 2.3.1: the first two bytes.
GZIP_MAGIC = b"\x1f\x8b"

# How long a server may be silent, and how often boto3 and urllib3 try, with growing pauses: a store
# that answers 503 for a few seconds is waited for, a dead one is given up within a minute.
SILENCE_TIMEOUT_S = 20.0
NUM_ATTEMPTS = 5
# A command may have to think before it prints.
PIPE_SILENCE_TIMEOUT_S = 300.0
NUM_PARALLEL_DOWNLOADS = 8


def is_url(place: str) -> bool:
    """Whether a place is a URL or a command, not a path."""
    return "://" in place or place.startswith(PIPE)


def must_be_copied(place: str) -> bool:
    """Whether a file can only be read by number from a copy: it is elsewhere, or packed.

    Args:
        place: A URL, a command, or the path of a file that is there.

    Raises:
        RunError: The file cannot be read.
    """
    try:
        return is_url(place) or _is_packed(Path(place))
    except OSError as error:
        raise RunError(f"{place} cannot be read: {error.strerror}.") from error


def cache_folder(place: str, local: str | None) -> Path:
    """The folder for copies of the files at `place`.

    Args:
        place: As the user gave it.
        local: Value of ``--local``, or None for a folder of the user's cache, one for each place.

    Raises:
        ConfigError: As `private_folder`.
    """
    if local is not None:
        return Path(local)
    return private_folder(hashlib.sha256(place.encode()).hexdigest()[:12])


def identify(place: str) -> str:
    """A name of a place that may be stored: a path, or a digest of what may hold a password."""
    if is_url(place):
        return hashlib.sha256(place.encode()).hexdigest()
    return str(Path(place).resolve()) if Path(place).exists() else place


def fetch_all(places: Sequence[str], *, cache: Path) -> list[Path]:
    """Copy files in parallel, showing progress.

    Args:
        places: What to copy.
        cache: Folder for the copies.

    Returns:
        The copies, in the same order.

    Raises:
        RunError: As `fetch`.
    """
    with ThreadPoolExecutor(NUM_PARALLEL_DOWNLOADS) as pool:
        copies = pool.map(functools.partial(fetch, cache=cache), places)
        return list(show_progress(copies, total=len(places), unit="file"))


def fetch(place: str, *, cache: Path) -> Path:
    """Copy a file, unpacked, unless this version of it has been copied before.

    Of several processes one copies, and the others wait for it. A copy has a temporary name until
    it is whole. Its final name holds a digest of the place and of the version that the store tells
    (its ETag), so that no other file or version is taken for it. The output of a command has no
    version: the command runs again only if its copy has been deleted.

    Args:
        place: ``s3://``, ``http(s)://``, another scheme that Streaming knows, ``pipe:`` and a
            command, or the path of a gzip file.
        cache: Folder for the copy.

    Returns:
        The copy.

    Raises:
        RunError: The file cannot be copied; its place and the reason are named.
    """
    from filelock import FileLock

    try:
        version = _version(place)
        digest = hashlib.sha256(f"{place}\n{version}".encode()).hexdigest()[:12]
        name = urlsplit(place).path if is_url(place) else place
        name = "pipe" if place.startswith(PIPE) else name.rsplit("/", 1)[-1]
        path = cache / f"{digest}-{name}"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(cache / f".{path.name}.lock", mode=0o600):
            if not path.is_file():
                with new_file(path) as new:
                    _copy_unpacked(place, new)
        return path
    except RunError:
        raise
    except Exception as error:
        # Each store raises its own types; all mean that the file cannot be copied.
        raise RunError(f"{place!r} cannot be read: {explain(error)}") from error


def list_urls(folder: str, *, endings: tuple[str, ...]) -> list[str]:
    """The files of an S3 folder whose names end with one of `endings`, sorted.

    Raises:
        ConfigError: It is a folder of another store, whose files have to be named.
        RunError: The store does not answer, or denies access.
    """
    if not folder.startswith(S3):
        raise ConfigError(
            "Only folders of S3 can be listed",
            value=folder,
            allowed=f"an s3:// folder, or each file by name, e.g. {folder}/{{00..15}}{endings[0]}",
            flag="--remote",
        )
    bucket, prefix = _split_s3(folder.rstrip("/") + "/")
    try:
        pages = _s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    except Exception as error:
        raise RunError(f"{folder} cannot be listed: {explain(error)}") from error
    return sorted(f"{S3}{bucket}/{key}" for key in keys if key.endswith(endings))


def _version(url: str) -> str:
    if not is_url(url):
        stat = os.stat(url)
        return f"{Path(url).absolute()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"
    if url.startswith(S3):
        bucket, key = _split_s3(url)
        return _s3_client().head_object(Bucket=bucket, Key=key)["ETag"]
    if url.startswith(("http://", "https://")):
        # GET, not HEAD, which servers and signed URLs may refuse; the content is not taken.
        answer = _get(url)
        answer.close()
        return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
    return ""


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
        _run(url.removeprefix(PIPE), path)
    elif url.startswith(S3):
        bucket, key = _split_s3(url)
        _s3_client().download_file(bucket, key, str(path))
    elif url.startswith(("http://", "https://")):
        _download(url, path)
    else:
        from streaming.base.storage import CloudDownloader

        CloudDownloader.direct_download(url, str(path), SILENCE_TIMEOUT_S)


def _run(command: str, path: Path) -> None:
    """Write the output of a command to a file.

    Raises:
        RunError: A part of it ended with an error, or it printed nothing, at all or for
            `PIPE_SILENCE_TIMEOUT_S`.
    """
    with path.open("wb") as file, tempfile.TemporaryFile() as errors:
        # WebDataset's "pipe:" is a command line for the shell, given by the user. Without pipefail
        # a download that fails before a | would be taken for an empty file.
        shell = ["bash", "-o", "pipefail", "-c", command]
        process = subprocess.Popen(shell, stdout=file, stderr=errors)
        num_bytes = -1
        while True:
            try:
                exit_code = process.wait(PIPE_SILENCE_TIMEOUT_S)
                break
            except subprocess.TimeoutExpired:
                if path.stat().st_size == num_bytes:
                    process.kill()
                    process.wait()
                    raise RunError(
                        f"{PIPE + command!r} printed nothing for {PIPE_SILENCE_TIMEOUT_S:g} s."
                    ) from None
                num_bytes = path.stat().st_size
        errors.seek(0)
        said = " ".join(errors.read().decode(errors="replace").split())[-500:] or "no error message"
    if exit_code:
        raise RunError(f"{PIPE + command!r} ended with exit code {exit_code}: {said}")
    if not path.stat().st_size:
        raise RunError(f"{PIPE + command!r} printed nothing: {said}")


def _download(url: str, path: Path) -> None:
    answer = _get(url)
    with path.open("wb") as file:
        # Shorter than promised is an error of urllib3's.
        for piece in answer.stream(2**20):
            file.write(piece)


def _get(url: str) -> Any:
    """Open a web file; its content has not been read yet.

    Raises:
        RunError: The server answers that it cannot be had.
    """
    import urllib3

    retries = urllib3.Retry(
        NUM_ATTEMPTS, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504)
    )
    # urllib3 ignores the user and password of a URL, and drops the header on a way to other hosts.
    # It encodes the header as Latin-1, which gives the bytes that Latin-1 was decoded from.
    user_info = urllib3.util.parse_url(url).auth
    headers = urllib3.util.make_headers(basic_auth=user_info and unquote(user_info, "latin-1"))
    answer = urllib3.request(
        "GET",
        url,
        headers=headers,
        preload_content=False,
        timeout=SILENCE_TIMEOUT_S,
        retries=retries,
    )
    if answer.status != 200:
        raise RunError(f"{url} cannot be read: the server answers {answer.status}")
    return answer


def _split_s3(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc, parts.path.lstrip("/")


def _s3_client() -> Any:
    """A client of the store at `S3_ENDPOINT_URL`, which Streaming reads too, or of Amazon's."""
    return _make_s3_client(os.environ.get("S3_ENDPOINT_URL"), os.getpid())


@functools.cache
def _make_s3_client(endpoint_url: str | None, process: int) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=SILENCE_TIMEOUT_S,
        read_timeout=SILENCE_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": NUM_ATTEMPTS},
    )
    return boto3.session.Session().client("s3", endpoint_url=endpoint_url, config=config)


def explain(error: Exception) -> str:
    """A store's error in one line: its type, its message, and what to do about credentials."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return f"no S3 credentials are set, by AWS_ACCESS_KEY_ID, a profile or a role ({reason})"
    return reason
