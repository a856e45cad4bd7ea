"""The error that a command refuses its arguments with."""

from __future__ import annotations

import importlib

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
