"""Writes the folder of a run and reads its record.

Each run has its own folder: record.json (everything needed to repeat it), stdout.log and, where a
model was trained, steps.csv (every step; after an error, the steps that the first rank has timed).
The record exists from the start with the status `failed`, so that a killed run leaves one, and disk
space is reserved for its last version. A log that cannot be written never ends a run.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import json
import os
import reprlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from sdbench.base.escape import without_controls
from sdbench.base.files import refused_unless_written, replace_file, write_json
from sdbench.base.outside import MAX_TABLE_BYTES, read_json_object, read_text, shorten
from sdbench.base.secrets import redact
from sdbench.record.contradictions import find_contradictions
from sdbench.record.record_kinds import BENCHMARK, FEED, PRECOMPUTE, TRAIN, kind_of
from sdbench.record.row import format_csv
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.feed import FeedSettings
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.setting import declarations

# Increased with every change of the keys or settings of a record: only this version is read.
SCHEMA_VERSION = 2
SCHEMA_FILE = Path(__file__).with_name("schemas") / "record.schema.json"
SCHEMA_FILES = {
    BENCHMARK: SCHEMA_FILE,
    FEED: SCHEMA_FILE.with_name("feed.schema.json"),
    PRECOMPUTE: SCHEMA_FILE.with_name("precompute.schema.json"),
    TRAIN: SCHEMA_FILE.with_name("train.schema.json"),
}
# The settings of each kind of record. Its schema lists those of `PRECOMPUTE`, which a room above
# declares.
SETTINGS_OF: dict[str, type] = {
    BENCHMARK: BenchmarkConfig,
    FEED: FeedSettings,
    TRAIN: TrainConfig,
}

OK = "ok"
INVALID = "invalid"
FAILED = "failed"
OOM = "oom"
TIMEOUT = "timeout"
INTERRUPTED = "interrupted"

UNFINISHED_REASON = (
    "the run did not end: it is still running, or it was killed before it could say why "
    "(SIGKILL, the out-of-memory killer, power)"
)
RECORD_NAME = "record.json"
STEPS_NAME = "steps.csv"
LOG_NAME = "stdout.log"
RESERVE_NAME = ".reserve"
FAILURE_NAME = ".failed"
RESERVE_BYTES = 256 * 1024  # records take about 10 KB
STEP_COLUMNS = ("index", "phase", "step_time_s", "data_wait_s", "loss")


def utc_now() -> str:
    """The present moment as ISO 8601 in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path, *, record_name: str = RECORD_NAME) -> None:
        self.path = path
        self._record_path = path / record_name

    @staticmethod
    def create(results_dir: str, *, machine: str, name: str) -> Path:
        """Make a new folder ``<YYYYMMDDTHHMMSSZ>_<machine>_<name>`` below `results_dir`."""
        with refused_unless_written(results_dir):
            Path(results_dir).mkdir(parents=True, exist_ok=True)
            while True:
                stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
                path = Path(results_dir) / f"{stamp}_{machine}_{name}"
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    return path
                time.sleep(0.1)  # another run began within the same second

    def begin_again(self) -> None:
        """Let the next process of the same run report its own end."""
        (self.path / FAILURE_NAME).unlink(missing_ok=True)

    def reserve_space(self) -> None:
        """Reserve disk space for the last version of the record; OSError if the disk is full."""
        reserve = self.path / RESERVE_NAME
        try:
            with reserve.open("wb") as file:
                file.write(bytes(RESERVE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            reserve.unlink(missing_ok=True)
            raise

    def write_record(self, record: dict[str, Any], *, is_last: bool = False) -> dict[str, Any]:
        """Replace the record atomically, and return it as written, without secrets.

        The last version uses the reserved space if the disk is full, and frees it otherwise.
        """
        if not is_last:
            return write_json(self._record_path, record)
        reserve = self.path / RESERVE_NAME
        record = write_json(self._record_path, record, reserve=reserve)
        reserve.unlink(missing_ok=True)
        return record

    def write_steps(self, steps: Iterable[Any]) -> None:
        """Write steps.csv with a row for each step; with buckets it tells shapes."""
        rows = [vars(step) for step in steps]
        has_shapes = any(row.get("shape") for row in rows)
        text = format_csv(rows, columns=(*STEP_COLUMNS, "shape") if has_shapes else STEP_COLUMNS)
        replace_file(self.path / STEPS_NAME, text)

    def claim_failure(self) -> bool:
        """Return True on the first rank to report a failure, which has to write the reason."""
        if not self.path.is_dir():
            return False  # this node does not share the results folder
        try:
            os.close(os.open(self.path / FAILURE_NAME, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:
            return True  # the disk is full: a reason may be written twice
        return True


def load_record(path: Path) -> dict[str, Any]:
    """Read a record of any kind, given by its file or the folder of its run.

    ValueError: the file is not JSON within bounds (`sdbench.base.outside`), has another schema
    version or an unknown kind, does not match its schema, has other settings than its program, or
    contradicts itself.
    """
    file = path / RECORD_NAME if path.is_dir() else path
    try:
        record = read_json_object(file)
        steps_csv = ""
        with contextlib.suppress(OSError, ValueError):  # what draws the steps reports the fault
            steps_csv = read_text(file.with_name(STEPS_NAME), max_bytes=MAX_TABLE_BYTES)
        check_record(record, steps_csv)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return record


def check_record(record: Mapping[str, Any], steps_csv: str) -> None:
    """Raise the ValueError of `load_record`; the text of the run's steps.csv may be empty."""
    for name, value, known in (
        ("schema_version", record.get("schema_version"), [SCHEMA_VERSION]),
        ("kind", kind_of(record), [*SCHEMA_FILES]),
    ):
        if value not in known:
            reads = f"this version of the suite reads {', '.join(map(str, known))}"
            raise ValueError(f"it has the {name} {reprlib.repr(value)}; {reads}")
    check_schema(record, SCHEMA_FILES[kind_of(record)])
    _check_settings(record)
    for contradiction in find_contradictions(record, steps_csv):
        raise ValueError(f"it contradicts itself: {contradiction}")


def _check_settings(record: Mapping[str, Any]) -> None:
    """Raise a ValueError if a record lacks settings of its program, or has others."""
    if (config_type := SETTINGS_OF.get(kind_of(record))) is None:
        return
    known, recorded = declarations(config_type).keys(), record["config"].keys()
    for what, names in (("lacks", known - recorded), ("has unknown", recorded - known)):
        if names:
            raise ValueError(shorten(f"it {what} settings: {', '.join(sorted(names))}", length=300))


@functools.cache
def load_schema(file: Path) -> Any:
    """The ``jsonschema`` validator of a schema, which may refer to that of a benchmark run."""
    import jsonschema  # 70 ms, which not every command needs
    from referencing import Registry, Resource

    common = Resource.from_contents(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    return jsonschema.Draft202012Validator(
        json.loads(file.read_text(encoding="utf-8")),
        registry=Registry().with_resource(SCHEMA_FILE.name, common),
    )


def check_schema(content: Any, file: Path) -> None:
    """Raise a ValueError that names the first fault of a content that does not match a schema."""
    fault = next(load_schema(file).iter_errors(content), None)
    if fault is not None:
        raise ValueError(describe_fault(fault))


def describe_fault(fault: Any) -> str:
    """A ``jsonschema.ValidationError`` as one line, with its JSON path."""
    # The message quotes the value, which may be a whole summary.
    value, shortened = repr(fault.instance), reprlib.repr(fault.instance)
    return shorten(f"{fault.json_path}: {fault.message.replace(value, shortened)}", length=300)


class OutputLog:
    """Copies the program's output to stdout.log, including output before the folder is made.

    If the log cannot be written, a warning is printed once, and the run goes on without it.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = io.StringIO()  # None: the log is lost

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Copy stdout and stderr while the block runs."""
        stdout, stderr = _Tee(sys.stdout, self), _Tee(sys.stderr, self)
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                yield
            finally:
                with self._warn_once():
                    if self._file is not None:
                        self._file.close()

    def move_to(self, folder: Path) -> None:
        """Write to stdout.log in this folder, beginning with the output so far."""
        assert isinstance(self._file, io.StringIO)
        kept = self._file.getvalue()
        with self._warn_once():
            self._file = (folder / LOG_NAME).open("a", encoding="utf-8", buffering=1)
            self._file.write(kept)

    def write(self, text: str) -> None:
        """Log a piece of output, unless it is of a progress bar, which overwrites its line."""
        if self._file is not None and not text.startswith("\r"):
            with self._warn_once():
                self._file.write(without_controls(redact(text)))

    @contextlib.contextmanager
    def _warn_once(self) -> Iterator[None]:
        """If the file cannot be written, print a warning and close the log."""
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()  # tries again to write its buffer
            print(f"warning: {LOG_NAME} ends here: {error.strerror}", file=sys.stderr)


class _Tee:
    """A text stream that also writes to a log; other attributes are the stream's."""

    def __init__(self, stream: TextIO, log: OutputLog) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
