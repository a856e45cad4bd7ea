"""Checks a record by the schema of its kind."""

from __future__ import annotations

from typing import Any

from sdbench.record.store import SCHEMA_FILES, kind_of, load_schema


def validate(record: dict[str, Any]) -> None:
    """Raise a jsonschema.ValidationError for a record that does not match."""
    load_schema(SCHEMA_FILES[kind_of(record)]).validate(record)
