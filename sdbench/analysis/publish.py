"""The command `python -m sdbench publish`: copies runs into results/ and rebuilds its tables.

A published run is copied once and never edited. All figures in tables, plots and pages come from
these records.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
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
from sdbench.base.secrets import find_secrets, redact
from sdbench.record.store import BENCHMARK, LOG_NAME, RECORD_NAME, STEPS_NAME, kind_of
from sdbench.report.runs import read_record, use_each
from sdbench.settings.kinds import PATH
from sdbench.settings.request import parse
from sdbench.settings.setting import setting

# An absolute path that is not a part of another path or of a URL.
PATH_PATTERN = re.compile(r"(?:(?<=file://)|(?<![\w./]))/(?!/)[^\s,=]+")

EPILOG = """\
examples:
  python -m sdbench publish runs/20261121T050000Z_2-core-cpu_tiny-64px-fast
  python -m sdbench publish            (rebuild what is made from the runs only)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishFlags(ReportFlags):
    """Flags of publish."""

    runs: tuple[Path, ...] = setting(
        PATH, (), "folder of a run", is_positional=True, takes_several=True, spelling="[RUN ...]"
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
    if len(flags.runs) == 1:  # a fault in a single run is bad input
        published, refused = [publish_one(flags.runs[0])], []
    else:
        published, refused = use_each(flags.runs, publish_one)
    try:
        made, left_out = rebuild(flags.folder)
    except BaseException:
        for folder, is_new in published:
            if is_new:  # all or nothing
                shutil.rmtree(folder)
        raise
    for folder, is_new in published:
        print(f"published {folder}" if is_new else f"published before: {folder}")
    print(made)
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
    copied = [run / name for name in (RECORD_NAME, LOG_NAME, *tables)]
    allowed = f"a run with {', '.join(path.name for path in copied)}"
    with refused_unless_read(run, "a file of the run", allowed=allowed, flag="RUN"):
        found = [f"{path.name}, {fault}" for path in copied for fault in secrets_in(path)]
        texts = [
            _without_paths(read_text(run / name, max_bytes=MAX_TABLE_BYTES), record["config"])
            for name in (RECORD_NAME, LOG_NAME)
        ]
    if found:
        raise ConfigError(
            f"this run holds what looks like a secret ({'; '.join(found)})",
            value=str(run),
            allowed="a run without passwords, signed URLs, keys and tokens",
            flag="RUN",
        )
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
