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
import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.base.errors import ConfigError, RunError
from sdbench.data.identity import describe_change
from sdbench.data.made_by import note_how_made
from sdbench.data.prepare.chunk_formats import (
    FORMATS,
    ChunkFormat,
    Columns,
    Rows,
    remove,
    write_exact_json,
)

FOLDER_FLAG = "--folder"
# What is in OUT.partial.
JOB_NAME = "job.json"
PARTIAL_FOLDERS = ("chunks", "tmp", "data")


class Totals(NamedTuple):
    """What has been written.

    Attributes:
        num_written: Samples in finished chunks.
        num_bad: Samples that were left out of them.
        bad: One sentence for each of those, with its name.
    """

    num_written: int
    num_bad: int
    bad: list[str]


@dataclass(frozen=True, kw_only=True)
class Output:
    """A data set that is being written; made by `open_output`, may be pickled.

    Attributes:
        out: Folder that the data set will be.
        data_format: A key of `FORMATS`.
        columns: Column to its MDS encoding, e.g. ``bytes`` or ``ndarray:float16:8,64,64``.
        num_chunks: Chunks of the whole data set.
    """

    out: Path
    data_format: str
    columns: Columns
    num_chunks: int

    @property
    def partial(self) -> Path:
        """Folder that everything is written to."""
        return self.out.with_name(self.out.name + ".partial")

    def missing_chunks(self) -> list[int]:
        """Numbers of the chunks that are not yet whole on disk."""
        return [number for number in range(self.num_chunks) if not self._is_whole(number)]

    def write_chunk(self, number: int, rows: Rows, *, bad: Sequence[str] = ()) -> None:
        """Write one chunk: afterwards it is whole, or after any error or kill absent.

        Several processes may write chunks at once, each its own.

        Args:
            number: Of the chunk, from 0.
            rows: Values by column; may be empty.
            bad: One sentence for each sample left out; may grow while `rows` is consumed.

        Raises:
            RunError: The disk is full, writing is not permitted, a row cannot be read, or a shard
                is beyond the 4 GiB that MDS can address.
        """
        target, temporary = self._data(number), self.partial / "tmp" / self._data(number).name
        note = self.partial / "tmp" / f"{number}.json"
        with self._errors_named():
            remove(temporary)
            try:
                num_rows, details = self._format.write(
                    temporary, _name_source_errors(rows), self.columns
                )
            except BaseException:
                remove(temporary)
                raise
            remove(target)
            num_bytes = 0
            if num_rows:
                num_bytes = _synchronize(temporary)
                temporary.rename(target)
            remove(temporary)
            facts = _ChunkNote(rows=num_rows, bytes=num_bytes, bad=list(bad), details=details)
            write_exact_json(note, facts._asdict())
            note.rename(self._note(number))

    def totals(self) -> Totals:
        """Count what the finished chunks hold."""
        notes = self._notes()
        bad = [sentence for note in notes for sentence in note.bad]
        return Totals(num_written=sum(note.rows for note in notes), num_bad=len(bad), bad=bad)

    def finish(self) -> Totals:
        """Check the size of every chunk's file, and make OUT of them all.

        Only one process may call this, when none writes any more.

        Raises:
            RunError: A chunk is missing or of another size, or there is not a single sample.
        """
        if missing := self.missing_chunks():
            raise RunError(
                f"{len(missing)} of {self.num_chunks} chunks of {self.out} are missing, the first "
                f"is {missing[0]}: the same command again writes them."
            )
        totals = self.totals()
        if not totals.num_written:
            raise RunError(
                f"Nothing can be written to {self.out}: all {totals.num_bad} samples are bad. "
                f"{' '.join(totals.bad[:1])}"
            )
        with self._errors_named():
            for number in range(self.num_chunks):
                self._verify(number)
            details = [note.details for note in self._notes() if note.rows]
            self._format.finish(self.partial / "data", details)
            job = json.loads((self.partial / JOB_NAME).read_bytes())["job"]
            note_how_made(self.partial / "data", job)
            _synchronize(self.partial / "data")
            (self.partial / "data").rename(self.out)
            shutil.rmtree(self.partial)
        return totals

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second command from writing to the same OUT; its death ends the lock.

        Raises:
            ConfigError: Another process has it.
        """
        with (self.partial / JOB_NAME).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    "Another command is writing to this folder",
                    value=str(self.out),
                    allowed="another folder, or the same one when that command has ended",
                    flag=FOLDER_FLAG,
                ) from error
            yield

    @property
    def _format(self) -> ChunkFormat:
        return FORMATS[self.data_format]

    def _number(self, number: int) -> str:
        return f"{number:0{max(5, len(str(self.num_chunks - 1)))}d}"

    def _data(self, number: int) -> Path:
        return self.partial / "data" / self._format.name.format(self._number(number))

    def _note(self, number: int) -> Path:
        return self.partial / "chunks" / f"{self._number(number)}.json"

    def _notes(self) -> list[_ChunkNote]:
        """Those of the finished chunks, in order."""
        notes = (self._read_note(number) for number in range(self.num_chunks))
        return [note for note in notes if note is not None]

    def _read_note(self, number: int) -> _ChunkNote | None:
        note = self._note(number)
        return _ChunkNote(**json.loads(note.read_bytes())) if note.is_file() else None

    def _is_whole(self, number: int) -> bool:
        note = self._read_note(number)
        return note is not None and (not note.rows or self._data(number).exists())

    def _verify(self, number: int) -> None:
        note, path = self._read_note(number), self._data(number)
        num_bytes = _count_bytes(path) if note.rows else 0
        if num_bytes != note.bytes:
            raise RunError(
                f"{path} has {num_bytes} bytes, and {note.bytes} were written: delete it and give "
                "the same command again."
            )

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kept = "finished chunks are kept, and the same command goes on from them"
            if error.errno == errno.ENOSPC:
                raise RunError(f"No space is left for {self.out}; {kept}.") from error
            raise RunError(f"{self.out} cannot be written ({error}); {kept}.") from error


def open_output(
    out: Path,
    *,
    data_format: str,
    columns: Columns,
    num_chunks: int,
    job: Mapping[str, object],
    data: Mapping[str, Any] | None = None,
    accepts_changes: bool = False,
) -> Output:
    """Begin a data set, or go on with one that was not finished.

    Args:
        out: Folder of the new data set.
        data_format: A key of `FORMATS`.
        columns: Column to its MDS encoding. Tars and folders take ``jpg`` and ``caption`` alone.
        num_chunks: Chunks of the whole data set.
        job: What decides the content of the chunks, as values of JSON; not how the work is done
            (workers, what happens on bad samples).
        data: The source as `identify_data` describes it.
        accepts_changes: Go on where files of the source have been written again under their names,
            e.g. a picture that was repaired. Finished chunks keep what they hold.

    Raises:
        ConfigError: `out` exists, or holds the beginnings of another job.
        RunError: The folder cannot be made.
    """
    out = out.resolve()
    output = Output(out=out, data_format=data_format, columns=dict(columns), num_chunks=num_chunks)
    facts = {
        "job": job,
        "data_format": data_format,
        "columns": output.columns,
        "num_chunks": num_chunks,
        "data": data,
    }
    with output._errors_named():
        _check_absent(output)
        output.partial.mkdir(parents=True, exist_ok=True)
        _check_ours(output.partial)
        for name in PARTIAL_FOLDERS:
            (output.partial / name).mkdir(exist_ok=True)
        path = output.partial / JOB_NAME
        if not path.is_file():
            note = output.partial / "tmp" / f"job.{os.getpid()}.json"
            write_exact_json(note, facts)
            note.rename(path)
        found = json.loads(path.read_bytes())
    _check_same_job(output, found=found, wanted=json.loads(json.dumps(facts)))
    _check_same_data(output, found=found.get("data"), wanted=data, accepts=accepts_changes)
    return output


def _check_absent(output: Output) -> None:
    out = output.out
    if out.is_dir() and not any(out.iterdir()) and not out.is_mount():
        return
    if not out.exists():
        return
    if (output.partial / JOB_NAME).is_file() and not (output.partial / "data").exists():
        # Killed between the rename that made OUT and the removal of the notes.
        shutil.rmtree(output.partial)
    raise ConfigError(
        "The output exists",
        value=str(out),
        allowed="a new or an empty folder, not a mount point",
        flag=FOLDER_FLAG,
    )


def _check_ours(partial: Path) -> None:
    """Refuse a folder that somebody else made, as it is deleted in the end."""
    is_own = partial.lstat().st_uid == os.geteuid()
    if partial.is_symlink() or (partial.parent.stat().st_mode & stat.S_IWOTH and not is_own):
        raise ConfigError(
            "The folder that it is to be prepared in is a link, or another user has made it",
            value=str(partial),
            allowed="another folder, or one in a folder that others cannot write to",
            flag=FOLDER_FLAG,
        )
    names = {path.name for path in partial.iterdir()}
    if JOB_NAME not in names and names - {*PARTIAL_FOLDERS}:
        raise ConfigError(
            "The folder that it is to be prepared in holds other files",
            value=str(partial),
            allowed="another folder, or move that folder away",
            flag=FOLDER_FLAG,
        )


def _check_same_job(output: Output, *, found: dict, wanted: dict) -> None:
    flat = [{**facts, **facts["job"]} for facts in (found, wanted)]
    differing = sorted(
        key
        for key in flat[0].keys() | flat[1].keys()
        if key not in ("job", "data") and flat[0].get(key) != flat[1].get(key)
    )
    if not differing:
        return
    key = differing[0]
    raise ConfigError(
        f"{output.partial} holds the beginnings of another job, with another "
        f"{', '.join(differing)}",
        value=flat[1].get(key),
        allowed=f"{flat[0].get(key)!r} as before, another folder, or delete that folder",
        flag=FOLDER_FLAG,
    )


def _check_same_data(output: Output, *, found: Any, wanted: Any, accepts: bool) -> None:
    if found in (None, wanted):  # None: synthetic, or begun by a version that did not note it
        return
    change = describe_change(found, wanted)
    same_names = found["names"] == wanted["names"]
    if not (same_names and accepts):
        raise ConfigError(
            f"{output.partial} was begun with other data: {change}",
            value="refuse" if same_names else "files of other names, so that shards have others",
            allowed="the data it was begun with, another --folder, or "
            + ("accept" if same_names else "delete that folder"),
            flag="--changed_inputs" if same_names else FOLDER_FLAG,
        )
    print(f"{change} (--changed_inputs accept): finished shards keep what they hold")


class _ChunkNote(NamedTuple):
    """What a finished chunk holds; `details` are what `ChunkFormat.write` returned."""

    rows: int
    bytes: int
    bad: list[str]
    details: Any


def _name_source_errors(rows: Rows) -> Rows:
    """Pass rows on; an error in reading them names the source, not the output."""
    try:
        yield from rows
    except OSError as error:
        raise RunError(f"A sample cannot be read ({error}).") from error


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def _count_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _synchronize(path: Path) -> int:
    """Synchronize a file, or a folder with its files, to disk; return the number of bytes."""
    for file in {*_files(path), path}:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return _count_bytes(path)
