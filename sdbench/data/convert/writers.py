"""Writes a data set chunk by chunk, so that a kill at any moment costs one chunk at most.

A chunk is a fixed run of samples that becomes one file (a folder, for a folder of images). It is
written under a temporary name, synchronized to disk and renamed. Then a small note of its content
is written. All that happens in ``OUT.partial``; at the end one rename makes OUT of the data, so OUT
is either whole or absent::

    OUT.partial/job.json            what is being written; a resume must want the same
    OUT.partial/chunks/00007.json   what the finished chunk 7 holds
    OUT.partial/tmp/                chunks that are being written, or were when a process died
    OUT.partial/data/               what becomes OUT
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import replace_file
from sdbench.data.convert.chunk_formats import FORMATS, Chunk, Columns, Row, Rows, remove, to_json
from sdbench.data.convert.maker import VAE_TENSORS, WEIGHTS
from sdbench.data.formats.identity import MODEL, describe_changes, write_provenance
from sdbench.data.formats.latent_columns import find_image_columns
from sdbench.data.source import IN_BUCKETS, VAE_FACTOR

FOLDER_FLAG = "--folder"
# Names in OUT.partial.
JOB_NAME = "job.json"
PARTIAL_FOLDERS = ("chunks", "tmp", "data")


class Totals(NamedTuple):
    """Number of samples written, a sentence for each bad one left out, and all `Chunk.sizes`."""

    num_written: int
    bad: list[str]
    sizes: list[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Output:
    """A data set that is being written; made by `open_output`, may be pickled."""

    out: Path  # the folder that it will be
    data_format: str  # a key of `FORMATS`
    columns: Columns
    num_chunks: int

    @property
    def partial(self) -> Path:
        """Folder that everything is written to."""
        return self.out.with_name(self.out.name + ".partial")

    def missing_chunks(self) -> list[int]:
        """Return the numbers of the chunks that are not whole on disk."""
        return sorted(set(range(self.num_chunks)) - self._finished().keys())

    def write_chunk(self, number: int, rows: Rows, *, bad: Sequence[str] = ()) -> None:
        """Write one chunk: afterwards it is whole, or after any error or kill absent.

        Several processes may write chunks at once, each its own. `bad` has a sentence for each
        sample left out, and may grow while `rows` is consumed.
        """
        target = self._data(number)
        temporary = self.partial / "tmp" / target.name
        num_rows = 0
        sizes: list[Sequence[int]] = []

        def counted() -> Rows:
            nonlocal num_rows
            try:
                for row in rows:
                    yield row
                    num_rows += 1
                    sizes.extend(_sizes_in(row))
            except OSError as error:  # of the source, not of the output
                raise RunError(f"A sample cannot be read ({error}).") from error

        with self._errors_named():
            remove(temporary)
            try:
                details = FORMATS[self.data_format].write(temporary, counted(), self.columns)
                remove(target)
                if num_rows:
                    _synchronize(temporary)
                    temporary.rename(target)
            finally:
                remove(temporary)
            num_bytes = _count_bytes(target) if num_rows else 0
            note = Chunk(num_rows, num_bytes, list(bad), details, sizes)
            replace_file(self._note(number), to_json(note._asdict()))

    def write_beside(self, name: str, content: bytes) -> None:
        """Write a file beside the chunks, unless it is there; several processes may do so."""
        target = self.partial / "data" / name
        with self._errors_named():
            if not target.exists():
                with tempfile.NamedTemporaryFile(dir=self.partial / "tmp", delete=False) as file:
                    file.write(content)
                _synchronize(Path(file.name))
                Path(file.name).rename(target)

    def totals(self) -> Totals:
        """Count what the finished chunks hold."""
        chunks = self._finished().values()
        bad = [sentence for chunk in chunks for sentence in chunk.bad]
        sizes = [size for chunk in chunks for size in chunk.sizes]
        return Totals(sum(chunk.rows for chunk in chunks), bad, sizes)

    def finish(self) -> Totals:
        """Make OUT of all chunks. Only one process may call this, when no other writes any more."""
        if missing := self.missing_chunks():
            raise RunError(
                f"{len(missing)} of {self.num_chunks} chunks of {self.out} are missing or cut, the "
                f"first is {missing[0]}: run the same command again to write them."
            )
        totals = self.totals()
        if not totals.num_written:
            raise RunError(
                f"Nothing can be written to {self.out}: all {len(totals.bad)} samples are bad. "
                f"{' '.join(totals.bad[:1])}"
            )
        with self._errors_named():
            data = self.partial / "data"
            chunks = {
                self._data(number).name: chunk
                for number, chunk in self._finished().items()
                if chunk.rows
            }
            FORMATS[self.data_format].finish(data, chunks)
            write_provenance(data, json.loads((self.partial / JOB_NAME).read_bytes())["job"])
            _synchronize(data)
            data.rename(self.out)
            shutil.rmtree(self.partial)
        return totals

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second command from writing to the same OUT; the lock ends with the process."""
        with (self.partial / JOB_NAME).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    "Another command is writing to this folder",
                    value=str(self.out),
                    allowed="another folder, or this one after that command has ended",
                    flag=FOLDER_FLAG,
                ) from error
            yield

    def _number(self, number: int) -> str:
        return f"{number:0{max(5, len(str(self.num_chunks - 1)))}d}"

    def _data(self, number: int) -> Path:
        name = FORMATS[self.data_format].name
        return self.partial / "data" / name.format(self._number(number))

    def _note(self, number: int) -> Path:
        return self.partial / "chunks" / f"{self._number(number)}.json"

    def _finished(self) -> dict[int, Chunk]:
        """Return the notes of the chunks that are whole, in order."""
        found = {}
        for number in range(self.num_chunks):
            path, data = self._note(number), self._data(number)
            if path.is_file():
                chunk = Chunk(**json.loads(path.read_bytes()))
                if not chunk.rows or (data.exists() and _count_bytes(data) == chunk.bytes):
                    found[number] = chunk
        return found

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.out} cannot be written ({error}); finished chunks are kept, and the same "
                "command goes on from them."
            ) from error


def _sizes_in(row: Row) -> Iterator[Sequence[int]]:
    """Yield the size of a row's picture, or of its latents if they may have any shape."""
    if "width" in row:
        yield row["width"], row["height"]
    for column, resolution in find_image_columns(row).items():
        if resolution.endswith(IN_BUCKETS):
            height, width = row[column].shape[-2:]
            yield width * VAE_FACTOR, height * VAE_FACTOR


def open_output(
    out: Path,
    *,
    data_format: str,
    columns: Columns,
    num_chunks: int,
    job: Mapping[str, object],
    inputs: Mapping[str, Any],
    accepts_changes: bool = False,
) -> Output:
    """Begin a data set, or go on with one that was not finished.

    `job` holds, as JSON values, what decides the content of the chunks, but not how the work is
    done (workers, what happens on bad samples). `inputs` is what `identify` returns of source and
    model. With `accepts_changes` it goes on if files of the source were written again under their
    names, e.g. a repaired picture, and finished chunks keep what they hold; never with another
    model. Folders take the columns ``jpg``, ``caption``, ``width`` and ``height`` alone; tars take
    these, or arrays.
    """
    out = out.resolve()
    output = Output(out=out, data_format=data_format, columns=dict(columns), num_chunks=num_chunks)
    facts = {
        "job": job,
        "data_format": data_format,
        "columns": output.columns,
        "num_chunks": num_chunks,
        "inputs": inputs,
    }
    with output._errors_named():
        _check_place(output)
        for name in PARTIAL_FOLDERS:
            (output.partial / name).mkdir(parents=True, exist_ok=True)
        path = output.partial / JOB_NAME
        if not path.is_file():
            replace_file(path, to_json(facts))
        found = json.loads(path.read_bytes())
    wanted = json.loads(to_json(facts))
    # `inputs` say more of a model than what the note of the data set has of it.
    _check_same_job(output, found=found, wanted=wanted, without=(WEIGHTS, VAE_TENSORS))
    _check_same_inputs(output, found=found, wanted=wanted, accepts=accepts_changes)
    _check_same_job(output, found=found, wanted=wanted)
    return output


def _check_place(output: Output) -> None:
    """Refuse an output that exists, and a folder for its parts that is not ours to delete."""
    out, partial = output.out, output.partial
    is_empty = out.is_dir() and not any(out.iterdir()) and not out.is_mount()
    if out.exists() and not is_empty:
        raise ConfigError(
            "The output folder is not empty",
            value=str(out),
            allowed="a new or an empty folder, not a mount point",
            flag=FOLDER_FLAG,
        )
    if not os.path.lexists(partial):
        return
    is_own = partial.lstat().st_uid == os.geteuid()
    is_open = partial.parent.stat().st_mode & stat.S_IWOTH
    names = {path.name for path in partial.iterdir() if not path.name.startswith(".")}
    has_others = JOB_NAME not in names and names - {*PARTIAL_FOLDERS}
    if partial.is_symlink() or (is_open and not is_own) or has_others:
        raise ConfigError(
            "The folder for unfinished output is a link, another user's, or has other files",
            value=str(partial),
            allowed="another --folder, or move that folder away",
            flag=FOLDER_FLAG,
        )


def _check_same_job(
    output: Output, *, found: dict, wanted: dict, without: Sequence[str] = ()
) -> None:
    before, now = ({**one, **one["job"], "job": None, "inputs": None} for one in (found, wanted))
    names = (before.keys() | now.keys()) - {*without}
    differing = sorted(key for key in names if before.get(key) != now.get(key))
    if differing:
        key = differing[0]
        raise ConfigError(
            f"{output.partial} holds unfinished output of another job, with another "
            f"{', '.join(differing)}",
            value=now.get(key),
            allowed=f"{before.get(key)!r} as before, another folder, or delete that folder",
            flag=FOLDER_FLAG,
        )


def _check_same_inputs(output: Output, *, found: dict, wanted: dict, accepts: bool) -> None:
    before, now = found.get("inputs"), wanted["inputs"]
    if before is None:
        changes, may_accept = {JOB_NAME: f"{JOB_NAME} does not say which"}, False
    else:
        changes = describe_changes(before, now)
        has_same_names = (before[name].get("names") == now[name].get("names") for name in changes)
        may_accept = MODEL not in changes and all(has_same_names)
    if changes and not (may_accept and accepts):
        raise ConfigError(
            f"{output.partial} was begun with other data or models: {'; '.join(changes.values())}",
            value="refuse" if may_accept else "shards of other samples, or by another model",
            allowed="what it was begun with, another --folder, or "
            + ("accept" if may_accept else "delete that folder"),
            flag="--changed_inputs" if may_accept else FOLDER_FLAG,
        )
    for change in changes.values():
        print(f"{change} (--changed_inputs accept): finished shards keep what they hold")


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def _count_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _synchronize(path: Path) -> None:
    for file in {*_files(path), path}:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
