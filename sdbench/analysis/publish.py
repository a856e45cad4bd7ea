"""The command `python -m sdbench publish`: copies runs into results/ and rebuilds its tables.

A published run is copied once and never edited. All figures in tables, plots and pages come from
these records. Runs of others come as one file of a pull request, which `--submitter` writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.analysis.report import RUNS, ReportFlags, rebuild
from sdbench.base.errors import EXIT_FAILED, EXIT_OK, ConfigError
from sdbench.base.files import (
    refused_unless_read,
    refused_unless_written,
    replace_file,
    write_json,
)
from sdbench.base.outside import MAX_TABLE_BYTES, read_json, read_text
from sdbench.base.secrets import redact
from sdbench.record.store import BENCHMARK, LOG_NAME, RECORD_NAME, STEPS_NAME, kind_of
from sdbench.report.runs import describe_run, read_record, use_each
from sdbench.results.submissions import (
    SUBMITTED,
    load_submissions,
    name_submission,
    read_submission,
    secrets_in,
)
from sdbench.settings.kinds import PATH, TEXT
from sdbench.settings.request import parse
from sdbench.settings.setting import setting

# An absolute path that is not a part of another path or of a URL.
PATH_PATTERN = re.compile(r"(?:(?<=file://)|(?<![\w./]))/(?!/)[^\s,=]+")

EPILOG = """\
examples:
  python -m sdbench publish runs/20261121T050000Z_2-core-cpu_tiny-64px-fast
  python -m sdbench publish            (rebuild what is made from the runs only)
  python -m sdbench publish --submitter "Ada Lovelace" runs/repeat_20261121T050000Z/*/2*
"""
STEPS_OF_A_REQUEST = """\
To submit it (docs/submit.md), read the file, which everybody will see, and open a pull request:
  git switch -c {branch}
  git add {folder}
  git commit -m {title}
  git push -u origin {branch}"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishFlags(ReportFlags):
    """Flags of publish."""

    runs: tuple[Path, ...] = setting(
        PATH, (), "folder of a run", is_positional=True, takes_several=True, spelling="[RUN ...]"
    )
    submitter: str | None = setting(
        TEXT,
        None,
        "write the runs, three or more of one configuration, into one file for a pull request to "
        "this project, under this name",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Publish runs and rebuild the tables; exit with 1 if a run or a file is left out."""
    flags = parse(
        PublishFlags,
        argv,
        prog="python -m sdbench publish",
        description="Copy finished runs into results/runs and rebuild the tables made from them.",
        epilog=EPILOG,
    ).config
    publish_one = functools.partial(publish, results=flags.folder)
    if flags.submitter is not None:
        published, refused = [submit(flags.runs, flags.submitter, results=flags.folder)], []
    elif len(flags.runs) == 1:  # a fault in a single run is bad input
        published, refused = [publish_one(flags.runs[0])], []
    else:
        published, refused = use_each(flags.runs, publish_one)
    try:
        made, left_out = rebuild(flags.folder)
    except BaseException:
        for place, is_new in published:
            if is_new:  # all or nothing
                shutil.rmtree(place) if place.is_dir() else place.unlink()
        raise
    for place, is_new in published:
        print(f"published {place}" if is_new else f"published before: {place}")
    print(made)
    if flags.submitter is not None:
        print(_describe_request(published[0][0], flags.folder))
    return EXIT_FAILED if refused or left_out else EXIT_OK


def publish(run: Path, *, results: Path) -> tuple[Path, bool]:
    """Copy a run's record, log and table of steps, if it has one, into a folder of results.

    Paths of this machine are replaced by the names of their flags.

    Returns:
        The published folder, and whether it is new: it may hold this very run already.
    """
    record = read_record(run, flag="RUN")
    if record["status"] != "ok":
        raise ConfigError(
            f"only a run that ended well is published ({record['reason']})",
            value=record["status"],
            allowed="the status ok",
            flag="RUN",
        )
    tables = [STEPS_NAME] if kind_of(record) == BENCHMARK else []
    _check_files(run, (RECORD_NAME, LOG_NAME, *tables))
    texts = [
        _without_paths(read_text(run / name, max_bytes=MAX_TABLE_BYTES), record["config"])
        for name in (RECORD_NAME, LOG_NAME)
    ]
    published = json.loads(texts[0])
    target = results / RUNS / record["run_id"]
    if target.exists():
        if read_json(target / RECORD_NAME) == published:
            return target, False
        raise ConfigError(
            "another record of this run is published already, and a published run is never edited",
            value=str(target),
            allowed=f"a run that is not in {results / RUNS}, or is there as it is",
            flag="RUN",
        )
    with refused_unless_written(results, flag="--folder"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written beside its place and then renamed: half a run must not look like a published one.
        with tempfile.TemporaryDirectory(dir=results, prefix=".publishing-") as folder:
            whole = Path(folder) / record["run_id"]
            whole.mkdir()
            for name in tables:
                shutil.copy(run / name, whole / name)
            write_json(whole / RECORD_NAME, published)
            replace_file(whole / LOG_NAME, redact(texts[1]))
            whole.rename(target)
    return target, True


def _check_files(run: Path, names: Sequence[str]) -> None:
    """Refuse a run that lacks one of these files, or holds what looks like a secret in them."""
    allowed = f"a run with {', '.join(names)}"
    with refused_unless_read(run, "a file of the run", allowed=allowed, flag="RUN"):
        found = [f"{name}, {fault}" for name in names for fault in secrets_in(run / name)]
    if found:
        raise ConfigError(
            f"this run holds what looks like a secret ({'; '.join(found)})",
            value=str(run),
            allowed="a run without passwords, signed URLs, keys and tokens",
            flag="RUN",
        )


def submit(runs: Sequence[Path], submitter: str, *, results: Path) -> tuple[Path, bool]:
    """Write runs as a submitted result into a folder of results; returns as `publish`."""
    records = [read_record(run, flag="RUN") for run in runs]
    for run in runs:
        # Before they are written: writing replaces secrets, and with them a part of the record.
        _check_files(run, (RECORD_NAME, STEPS_NAME))
    content = {
        "submitter": submitter,
        "runs": [
            {
                "record": json.loads(_without_paths(json.dumps(record), record["config"])),
                "steps": read_text(run / STEPS_NAME, max_bytes=MAX_TABLE_BYTES).splitlines(),
            }
            for run, record in zip(runs, records, strict=True)
        ],
    }
    target = results / SUBMITTED / name_submission(records)
    with refused_unless_read(target, "the file", allowed="a file of `publish`", flag="--folder"):
        if target.exists() and read_json(target) == content:
            return target, False
    if target.exists():
        raise ConfigError(
            "another result that begins with this run is submitted already",
            value=str(target),
            allowed="other runs, or the same ones once that file is deleted",
            flag="RUN",
        )
    published = {folder.name for folder in (results / RUNS).glob("*")}
    others, _ = load_submissions(results, known=published)
    with refused_unless_written(results, flag="--folder"):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json(target, content)
    try:
        known = {*published, *(record["run_id"] for record in others)}
        read_submission(target, known=known, flag="--submitter or RUN")
    except BaseException:
        target.unlink()
        with contextlib.suppress(OSError):  # it holds others
            target.parent.rmdir()
        raise
    return target, True


def _describe_request(file: Path, results: Path) -> str:
    """The steps from a submitted result to a pull request."""
    record, *_ = read_submission(file, known=(), flag="RUN")
    title = f"Result of {record['submission']['submitter']}: {describe_run(record)}"
    return STEPS_OF_A_REQUEST.format(
        branch=f"result-{file.stem}", folder=shlex.quote(str(results)), title=shlex.quote(title)
    )


def _without_paths(text: str, config: dict[str, Any]) -> str:
    """Replace paths of the publisher's machine by the names of their flags, e.g. <results_dir>."""
    names = {
        path: name
        for name, value in config.items()
        if isinstance(value, str)
        for path in ([value] if Path(value).is_absolute() else PATH_PATTERN.findall(value))
    }
    for path in sorted(names, key=len, reverse=True):  # one path may begin with another
        text = text.replace(path, f"<{names[path]}>")
    return text
