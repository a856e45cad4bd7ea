"""Assertions on the facts of a `ConfigError`."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from unittest.mock import ANY

import pytest

from sdbench.base.errors import ConfigError
from sdbench.cli import load_command


def refusal_of(command: str, *argv: object) -> ConfigError:
    """Run a command of `python -m sdbench` in this process and return its refusal."""
    with pytest.raises(ConfigError) as caught:
        load_command(command)([str(argument) for argument in argv])
    return caught.value


PLACE_FLAGS = "--remote or --local"
# Of a data set that has fewer samples than a batch.
TOO_FEW_FLAG = f"--batch_size (or another data set with {PLACE_FLAGS})"


@contextlib.contextmanager
def refused(flag: str = PLACE_FLAGS, *, value: object = ANY, allowed: object = ANY) -> Iterator:
    """Expect that the block is refused for this value of this flag."""
    with pytest.raises(ConfigError) as caught:
        yield caught
    error = caught.value
    assert (error.flag, error.value, error.allowed) == (flag, value, allowed)


def printed_refusal(text: str) -> ConfigError:
    """The refusal in the last line of what a program has printed on stderr."""
    line = text.splitlines()[-1]
    assert line.startswith("error: "), text
    rest, _, flag = line.removeprefix("error: ").removesuffix(".").rpartition("; change it with ")
    rest, _, allowed = rest.rpartition("; allowed: ")
    what, _, value = rest.rpartition(": got ")
    return ConfigError(what, value=ast.literal_eval(value), allowed=allowed, flag=flag)
