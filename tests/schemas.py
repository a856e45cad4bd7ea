"""Does a record match the schema of its kind?"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from referencing import Registry, Resource

from sdbench.measure.record import SCHEMA_FILE, SCHEMA_FILES, kind_of


def validate(record: dict[str, Any]) -> None:
    """Check a record; the schemas of the other kinds refer to that of a benchmark run.

    Raises:
        jsonschema.ValidationError: It does not match.
    """
    base = Resource.from_contents(json.loads(SCHEMA_FILE.read_text()))
    registry = Registry().with_resource(SCHEMA_FILE.name, base)
    schema = json.loads(SCHEMA_FILES[kind_of(record)].read_text())
    validator = jsonschema.validators.validator_for(schema)(schema, registry=registry)
    validator.validate(record)
