"""Reads YAML from outside: a file of keys and values, or the value of a flag.

Values have no tags, keys are unique, and depth and size are bounded (`outside.check_values`).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from sdbench.base.files import refused_unless_read
from sdbench.base.outside import MAX_DEPTH, MAX_VALUES, TOO_DEEP, check_values, read_text, shorten

# The config file of a run has a few hundred settings.
MAX_CONFIG_VALUES = 10_000
MAX_YAML_BYTES = 4 * 2**20


def read_mapping(path: Path, *, allowed: str, flag: str) -> dict[str, Any]:
    """Read a YAML file whose content is a mapping; else a ConfigError of the flag that names it."""
    with refused_unless_read(path, "the file", allowed=allowed, flag=flag):
        content = parse_yaml(read_text(path, max_bytes=MAX_YAML_BYTES), max_values=MAX_VALUES)
        if not isinstance(content, dict):
            raise ValueError("it has no keys")
    return content


def parse_yaml(text: str, *, max_values: int = MAX_CONFIG_VALUES) -> Any:
    """Parse YAML; a ValueError if it is invalid, or a value has a tag or is out of bounds."""
    import yaml

    depth = 0
    try:
        # Before values are made: deep lists take a loader seconds, or crash the process.
        for event in yaml.parse(text, Loader=_loader()):
            if getattr(event, "tag", None) is not None:
                line = event.start_mark.line + 1
                raise ValueError(f"line {line}: the tag {shorten(event.tag)!r} is not allowed")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_DEPTH:
                raise ValueError(TOO_DEEP)
        content = yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    check_values(content, max_values=max_values)
    return content


@functools.cache
def _loader() -> Any:
    """A loader that refuses repeated keys, in C where PyYAML was built with it."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = set()
            for key, _ in node.value:
                line = f"line {key.start_mark.line + 1}"
                if not isinstance(key, yaml.ScalarNode):
                    raise ValueError(f"{line}: a key is neither text nor number")
                if key.value in names:
                    raise ValueError(f"{line}: the key {shorten(key.value)!r} is there twice")
                names.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader
