"""Assertions on the facts of a `ConfigError`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from unittest.mock import ANY

import pytest

from sdbench.base.errors import ConfigError
from sdbench.cli import COMMANDS


def refusal_of(command: str, *argv: object) -> ConfigError:
    """Run a command of `python -m sdbench` in this process and return its refusal.

    Args:
        command: A key of `COMMANDS`.
        argv: Its arguments, as text or as values whose text they are.
    """
    module, function = COMMANDS[command][0].split(":")
    with pytest.raises(ConfigError) as caught:
        getattr(importlib.import_module(module), function)([str(argument) for argument in argv])
    return caught.value


PLACE_FLAGS = "--remote or --local"


@contextlib.contextmanager
def refused(flag: str = PLACE_FLAGS, *, value: object = ANY, allowed: object = ANY) -> Iterator:
    """Expect that the block is refused for this value of this flag."""
    with pytest.raises(ConfigError) as caught:
        yield caught
    error = caught.value
    assert (error.flag, error.value, error.allowed) == (flag, value, allowed)
