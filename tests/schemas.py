"""Checks a record by the schema of its kind."""

from __future__ import annotations

from typing import Any

from sdbench.record.store import kind_of, make_validator


def validate(record: dict[str, Any]) -> None:
    """Check a record.

    Raises:
        jsonschema.ValidationError: It does not match.
    """
    make_validator(kind_of(record)).validate(record)
