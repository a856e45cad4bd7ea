"""Reads YAML files of keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError


def read_mapping(path: Path, *, allowed: str, flag: str) -> dict[str, Any]:
    """Read a YAML file whose content is a mapping.

    Args:
        path: The file, UTF-8.
        allowed: What such a file is, for the message.
        flag: The flag that the path was given with.

    Raises:
        ConfigError: It cannot be read, is no YAML, or has no keys.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
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
