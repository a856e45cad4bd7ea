"""Submitted results: one JSON file holds the runs of one configuration on somebody else's machine.

`read_submission` makes every check. `publish` calls it on the file that it writes, `report` on each
file that it shows, and a test on each file that is committed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.files import refused_unless_read
from sdbench.base.outside import MAX_TABLE_BYTES, read_json, read_json_object, read_text
from sdbench.base.secrets import find_secrets
from sdbench.base.units import counted
from sdbench.record.configuration import as_key, settings_of
from sdbench.record.contradictions import parse_steps
from sdbench.record.provenance import is_in_history
from sdbench.record.store import BENCHMARK, OK, SCHEMA_FILE, check_record, check_schema, kind_of
from sdbench.report.runs import read_time, use_each
from sdbench.statistics.intervals import MIN_RUNS

SUBMITTED = "submitted"
SCHEMA = SCHEMA_FILE.with_name("submission.schema.json")
SUBMITTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,39}")
# Other processes used the CPUs or the GPU.
NOT_IDLE = ("busy", "shared")


def load_submissions(results: Path, *, known: Collection[str]) -> tuple[list[Any], list[Path]]:
    """The records of all submitted results of a folder, and the files left out, named on stderr.

    `known` are the ids of the runs that are counted already.
    """
    counted_runs = {*known}

    def read(path: Path) -> list[dict[str, Any]]:
        records = read_submission(path, known=counted_runs, flag="--folder")
        counted_runs.update(record["run_id"] for record in records)
        return records

    files, left_out = use_each(sorted((results / SUBMITTED).glob("*.json")), read)
    return [record for records in files for record in records], left_out


def read_submission(path: Path, *, known: Collection[str], flag: str) -> list[dict[str, Any]]:
    """Check a submitted result, and return its records.

    Each gets a key that no record has when it is written, ``submission``: what its row in a table
    has in place of that of a run measured here.

    Raises:
        ConfigError: The file is not accepted. Whether a commit is in the history of the suite is
            not asked where there is no checkout with its whole history.
    """
    allowed = "a file of `publish --submitter`, as it was written"
    with refused_unless_read(path, "a submitted result", allowed=allowed, flag=flag):
        content = read_json_object(path)
        check_schema(content, SCHEMA)
        for number, run in enumerate(content["runs"], start=1):
            try:
                check_record(run["record"], "\n".join(run["steps"]))
            except ValueError as error:
                raise ValueError(f"run {number}: {error}") from None
    for what, value, allowed in _faults_of(content, path, known):
        raise ConfigError(what, value=value, allowed=allowed, flag=flag)
    records = [run["record"] for run in content["runs"]]
    for record in records:
        read_time(record["started_utc"], of=path)
    row = {"kind": SUBMITTED, "source": path.stem, "submitter": content["submitter"]}
    return [record | {"submission": row} for record in records]


def name_submission(records: Collection[Mapping[str, Any]]) -> str:
    """The name of the file of a submitted result: the id of its first run."""
    return f"{min((record['run_id'] for record in records), default='none')}.json"


def _faults_of(
    content: dict[str, Any], path: Path, known: Collection[str]
) -> Iterator[tuple[str, object, str]]:
    """What is wrong, the value, and what is allowed, of a file whose records are as they should be.

    The order matters: figures of a run that did not end well are not there to be looked at.
    """
    if not SUBMITTER.fullmatch(content["submitter"]):
        allowed = "1 to 40 letters, digits, spaces and . _ -, the first a letter or a digit"
        yield "this is no name of a submitter", content["submitter"], allowed
    if secrets := "; ".join(secrets_in(path)):
        allowed = "runs without passwords, signed URLs, keys and tokens"
        yield f"these runs hold what looks like a secret ({secrets})", str(path), allowed
    for run in content["runs"]:
        yield from _faults_of_run(run["record"], run["steps"])
    records = [run["record"] for run in content["runs"]]
    for commit in dict.fromkeys(record["git"]["commit"] for record in records):
        if commit is None or is_in_history(commit) is False:
            what = "the commit of a run is not in the history of this checkout"
            yield what, commit, "a commit that this checkout's HEAD comes from"
    ids = [record["run_id"] for record in records]
    several = f"{MIN_RUNS} or more runs of one configuration"
    if len({*ids}) < len(ids) or len({tuple(run["steps"]) for run in content["runs"]}) < len(ids):
        yield "a run is there more than once", ", ".join(ids), several
    if again := sorted({*ids} & {*known}):
        yield "a run is counted already", ", ".join(again), "runs that no other file holds"
    if len(ids) < MIN_RUNS:
        yield "these are too few runs", len(ids), several
    settings = [{*as_key(settings_of(record))} for record in records]
    if different := {name for one in settings for name, _ in one - set.intersection(*settings)}:
        yield "the runs differ in settings", ", ".join(sorted(different)), several
    if path.name != name_submission(records):
        yield "the file has another name", path.name, name_submission(records)


def _faults_of_run(
    record: Mapping[str, Any], steps: Collection[str]
) -> Iterator[tuple[str, object, str]]:
    run, is_dirty = record["run_id"], record["git"]["dirty"]
    if kind_of(record) != BENCHMARK:
        yield f"{run} is no run of benchmark.py", kind_of(record), "a measurement of training"
    if record["status"] != OK:
        yield f"{run} did not end well ({record['reason']})", record["status"], "the status ok"
    if not parse_steps("\n".join(steps)):
        allowed = "the steps.csv of the run, from which its figures are computed again"
        yield f"{run} has no table of steps", counted(len(steps), "line"), allowed
    flags = record["summary"]["flags"]
    if flags is None or {*flags} & {*NOT_IDLE}:
        what = f"the machine of {run} was not idle, or that is not known"
        yield what, flags, f"a run without the flags {' and '.join(NOT_IDLE)}"
    if is_dirty is not False:
        what = f"the code of {run} had uncommitted changes, or that is not known"
        yield what, is_dirty, "a run from a clean checkout of this project"


def secrets_in(path: Path) -> Iterator[str]:
    """The place (JSON path or line number) and the kind of each text that looks like a secret."""
    if path.suffix == ".json":
        texts = _texts_in(read_json(path), place="")
    else:
        lines = read_text(path, max_bytes=MAX_TABLE_BYTES).splitlines()
        texts = ((f"line {number}", line) for number, line in enumerate(lines, start=1))
    for place, text in texts:
        yield from (f"{place}: {kind}" for kind in find_secrets(text))


def _texts_in(value: Any, *, place: str) -> Iterator[tuple[str, str]]:
    """Every text in a JSON value with its path, e.g. ``config.remote`` or ``command[2]``."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts_in(item, place=f"{place}[{number}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts_in(item, place=f"{place}.{name}".lstrip("."))
