"""Assertions on the facts of a `ConfigError`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import ANY

import pytest

from sdbench.base.errors import ConfigError

PLACE_FLAGS = "--remote or --local"


@contextlib.contextmanager
def refused(flag: str = PLACE_FLAGS, *, value: object = ANY, allowed: object = ANY) -> Iterator:
    """Expect that the block is refused for this value of this flag."""
    with pytest.raises(ConfigError) as caught:
        yield caught
    error = caught.value
    assert (error.flag, error.value, error.allowed) == (flag, value, allowed)
