"""Reads YAML of others: a file of keys and values, or the value of a flag.

Values are without tags, no key is there twice, and nesting and aliases are bounded, so that a small
file is read in no time and means one thing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.outside import MAX_DEPTH, check_values, read_text, shorten, too_deep

# A sweep of 16,000 cells that are written out has 200,000.
MAX_NODES = 1_000_000
# The config file of a run is one of a few hundred settings.
MAX_CONFIG_NODES = 10_000
MAX_YAML_BYTES = 4 * 2**20


@dataclasses.dataclass
class _Open:
    """A list or a mapping whose end is not read yet."""

    anchor: str | None
    is_mapping: bool
    num_parts: int = 0
    num_nodes: int = 1
    keys: set[str] = dataclasses.field(default_factory=set)

    @property
    def awaits_key(self) -> bool:
        return self.is_mapping and self.num_parts % 2 == 0


def read_mapping(path: Path, *, allowed: str, flag: str) -> dict[str, Any]:
    """Read a YAML file whose content is a mapping.

    Args:
        path: The file, UTF-8.
        allowed: What such a file is, for the message.
        flag: The flag that the path was given with.

    Raises:
        ConfigError: It cannot be read, is no YAML as above, or has no keys.
    """
    import yaml

    try:
        content = parse_yaml(read_text(path, max_bytes=MAX_YAML_BYTES), max_nodes=MAX_NODES)
        if not isinstance(content, dict):
            raise ValueError("it has no keys")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the file cannot be read ({' '.join(str(error).split())})",
            value=str(path),
            allowed=allowed,
            flag=flag,
        ) from None
    return content


def parse_yaml(text: str, *, max_nodes: int = MAX_CONFIG_NODES) -> Any:
    """Parse a YAML document.

    Args:
        text: The document.
        max_nodes: Bound on keys and values, those of aliases counted each time.

    Raises:
        ValueError: It is not as this module reads it, or a value is out of bounds.
        yaml.YAMLError: It is no YAML.
    """
    import yaml

    check_yaml(text, max_nodes=max_nodes)
    content = yaml.load(text, Loader=_loader())
    check_values(content)
    return content


def check_yaml(text: str, *, max_nodes: int = MAX_CONFIG_NODES) -> None:
    """Check the form of a YAML document before its values are made.

    Args:
        text: The document.
        max_nodes: As of `parse_yaml`.

    Raises:
        ValueError: It is not as this module reads it.
        yaml.YAMLError: It is no YAML.
    """
    import yaml

    around = [_Open(None, is_mapping=False)]
    num_nodes: dict[str, int] = {}
    for event in yaml.parse(text, Loader=_loader()):
        if isinstance(event, yaml.CollectionEndEvent):
            ended = around.pop()
            _add(around[-1], ended.num_nodes, max_nodes)
            if ended.anchor is not None:
                num_nodes[ended.anchor] = ended.num_nodes
        elif isinstance(event, yaml.NodeEvent):
            line = f"line {event.start_mark.line + 1}"
            if getattr(event, "tag", None) is not None:
                raise ValueError(f"{line}: the tag {shorten(event.tag)!r}; values have none here")
            _check_key(around[-1], event, line=line)
            if isinstance(event, yaml.CollectionStartEvent):
                if len(around) > MAX_DEPTH:
                    raise ValueError(too_deep())
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                around.append(_Open(event.anchor, is_mapping))
            elif isinstance(event, yaml.AliasEvent):
                if any(one.anchor == event.anchor for one in around):
                    raise ValueError(f"{line}: *{shorten(event.anchor)} is within itself")
                _add(around[-1], num_nodes.get(event.anchor, 1), max_nodes)
            else:
                _add(around[-1], 1, max_nodes)


def _add(around: _Open, num_nodes: int, max_nodes: int) -> None:
    around.num_parts += 1
    around.num_nodes += num_nodes
    if around.num_nodes > max_nodes:
        raise ValueError(f"it has more than {max_nodes:,} keys and values, aliases included")


def _check_key(around: _Open, event: Any, *, line: str) -> None:
    import yaml

    if not around.awaits_key:
        return
    if not isinstance(event, yaml.ScalarEvent):
        raise ValueError(f"{line}: a key that is no text or number")
    if event.value in around.keys:
        raise ValueError(f"{line}: the key {shorten(event.value)!r} is there twice")
    around.keys.add(event.value)


def _loader() -> Any:
    """The loader in C where PyYAML was built with it."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
