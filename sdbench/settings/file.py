"""`read_values`: the values of a YAML file and of arguments ``key=value``, by OmegaConf.

A value may refer to another one (``${lr}``) or be left to the command line (``???``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sdbench.base.carried import find_recipe
from sdbench.base.errors import ConfigError
from sdbench.base.outside import MAX_DEPTH, check_values, read_text, shorten
from sdbench.base.yaml_file import MAX_YAML_BYTES, parse_yaml

CONFIG_FLAG = "--config"
# OmegaConf's parser takes a millisecond for each of them, and more where they are nested.
MAX_REFERENCES = 100
MISSING = "???"
_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)


def is_assignment(argument: str) -> bool:
    """Whether an argument has the form ``key=value``."""
    return _ASSIGNMENT.fullmatch(argument) is not None


def as_literal(value: Any) -> Any:
    """A value as a file has to hold it: with ``${`` of a text escaped."""
    return value.replace("${", "\\${") if isinstance(value, str) else value


def read_values(
    path: str | None,
    assignments: Sequence[str],
    *,
    flags: Mapping[str, Any],
    names: Collection[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a YAML file or a recipe of the suite, if one is named, and arguments ``key=value``.

    ``a.b=value`` changes a nested mapping of the file, and ``${lr}`` may refer to the flag --lr.
    `names` has the names of all settings. Returns the values of the file with these changes, and
    the values that arguments assign to settings.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    flat = [text for text in assignments if text.partition("=")[0] in names]
    nested = [text for text in assignments if text not in flat]
    try:
        content = OmegaConf.create() if path is None else _load(path)
        for text in assignments:
            _check_assignment(text)
        raw: Any = OmegaConf.to_container(OmegaConf.merge(content, OmegaConf.from_dotlist(nested)))
        assigned: Any = OmegaConf.to_container(OmegaConf.from_dotlist(flat))
        given = assigned | {name: as_literal(value) for name, value in flags.items()}
        # `optimizer` is a setting, and in files of another trainer a mapping of its own.
        given = {
            name: value
            for name, value in given.items()
            if not isinstance(raw.get(name), dict) or value is None or isinstance(value, dict)
        }
        _refuse_missing(list(_find_missing(raw | given)), names=names)
        check_values(raw)
        resolved: Any = OmegaConf.to_container(OmegaConf.create(raw | given), resolve=True)
    except ConfigError:
        raise
    # OmegaConf raises TypeError for a mapping in place of a list, and asserts that a file holds one
    # of both.
    except (
        *(OSError, ValueError, TypeError, AssertionError, RecursionError),
        *(OmegaConfBaseException, yaml.YAMLError),
    ) as error:
        reason = shorten(" ".join(str(error).split()) or "it is one value", length=300)
        raise ConfigError(
            f"the config cannot be read ({reason})",
            value=" ".join(filter(None, (path, *assignments))),
            allowed="readable YAML of flag names and values, ${key} for the value of another key, "
            "\\${ for the characters themselves",
            flag=CONFIG_FLAG,
        ) from None
    of_file = {name: value for name, value in resolved.items() if name not in given}
    return of_file, {name: resolved[name] if name in given else assigned[name] for name in assigned}


def _load(path: str) -> Any:
    from omegaconf import OmegaConf

    text = read_text(find_recipe(path), max_bytes=MAX_YAML_BYTES)
    parse_yaml(text)
    _check_references(text)
    content = OmegaConf.create(text)
    if not OmegaConf.is_dict(content):
        raise ValueError("it does not hold keys and values, such as `batch_size: 2048`")
    return content


def _check_assignment(text: str) -> None:
    """Check the value of ``key=value`` and the depth of the key, as those of a file."""
    key, _, value = text.partition("=")
    if key.count(".") + key.count("[") > MAX_DEPTH:
        raise ValueError(f"a key is more than {MAX_DEPTH} levels deep")
    parse_yaml(value)
    _check_references(value)


def _check_references(text: str) -> None:
    if text.count("${") > MAX_REFERENCES:
        raise ValueError(f"there are more than {MAX_REFERENCES} references to other values")


def _find_missing(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _find_missing(inner, f"{key}.{name}" if key else str(name))
    elif value == MISSING:
        yield key


def _refuse_missing(keys: Sequence[str], *, names: Collection[str]) -> None:
    if keys:
        raise ConfigError(
            "values that the config file leaves to the command line are missing",
            value=MISSING,
            allowed="a value for each",
            flag=", ".join(f"--{key}" if key in names else f"{key}=VALUE" for key in keys),
        )
