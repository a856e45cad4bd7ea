"""Prompts, as texts or from a text file or a CSV."""

from __future__ import annotations

import collections
import csv
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.base.outside import HAS_NUL, read_text
from sdbench.settings.recipe import PROMPT_SEPARATOR

# A name that is safe in a folder; in a tar of WebDataset it ends at the first dot.
UID = re.compile(r"[A-Za-z0-9_-]+")


def read_prompts(value: str, *, flag: str) -> list[tuple[str, str]]:
    """Read pairs of unique uid and prompt: texts separated by |, or a file, see `read_prompt_file`.

    A file is what ends in .txt or .csv, and what is there.
    """
    if value.lower().endswith((".txt", ".csv")) or os.path.isfile(value):
        return read_prompt_file(value, flag=flag)
    return _number_prompts(value.split(PROMPT_SEPARATOR), value=value, flag=flag)


def read_prompt_file(path: str, *, flag: str) -> list[tuple[str, str]]:
    """Read pairs of unique uid and prompt from a CSV with the columns uid and caption, or a text.

    A text has a prompt on each line, whose number is the uid.
    """
    try:
        text = read_text(Path(path))
        if "\0" in text:
            raise ValueError(f"it {HAS_NUL}")
    except (OSError, ValueError) as error:
        what = f"the prompt file cannot be read ({error})"
        raise _bad_prompts(what, value=path, flag=flag) from None
    if not path.lower().endswith(".csv"):
        return _number_prompts(text.splitlines(), value=path, flag=flag)
    try:
        return _read_table(text, path=path, flag=flag)
    except csv.Error as error:
        what = f"the prompt file cannot be read ({error})"
        raise _bad_prompts(what, value=path, flag=flag) from None


def _number_prompts(lines: Sequence[str], *, value: str, flag: str) -> list[tuple[str, str]]:
    """Pairs of number and prompt, without empty lines; the lines are from `value` of `flag`."""
    captions = [line.strip() for line in lines if line.strip()]
    if not captions:
        raise _bad_prompts("there is no prompt", value=value, flag=flag)
    return [(f"{number:05d}", caption) for number, caption in enumerate(captions)]


def _read_table(text: str, *, path: str, flag: str) -> list[tuple[str, str]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = set(reader.fieldnames or ())
    if not {"uid", "caption"} <= columns:
        missing = ", ".join(sorted({"uid", "caption"} - columns))
        raise _bad_prompts(f"the prompt file lacks the column {missing}", value=path, flag=flag)
    rows = [(row["uid"] or "", (row["caption"] or "").strip()) for row in reader]
    if not rows:
        raise _bad_prompts("the prompt file has no prompt", value=path, flag=flag)
    counts = collections.Counter(uid for uid, _ in rows)
    for uid, count in counts.items():
        if count > 1 or not UID.fullmatch(uid):
            what = f"a uid of {path} is there twice or cannot be the name of a file"
            raise _bad_prompts(what, value=uid, flag=flag)
    return rows


def _bad_prompts(what: str, *, value: str, flag: str) -> ConfigError:
    return ConfigError(
        what,
        value=value,
        allowed=f"prompts with {PROMPT_SEPARATOR} between two, or a file: UTF-8 text (.txt) with a "
        "prompt on each line, or a .csv with the columns uid (a name of letters, digits, _ and -, "
        "once each) and caption",
        flag=flag,
    )
