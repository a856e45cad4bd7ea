"""Kinds of values: what is accepted, in words, and how a flag's text or a YAML value is parsed."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

from sdbench.base.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        allowed: What is accepted, in words, for errors and help.
        parse: Turns the received value into the setting's, or raises ValueError or TypeError.
        metavar: Stands for the value in the help.
    """

    allowed: str
    parse: Callable[[Any], Any]
    metavar: str = "X"


class RowOf:
    """The name of a row in a table of another room; has the attributes of a `Kind`.

    The table is imported when a value is checked: settings lie below the rooms that have tables,
    and a new row is all that a new choice takes.

    Args:
        table: ``module:name`` of a dictionary.
        others: Choices that are no row.
    """

    metavar = "X"

    def __init__(self, table: str, *others: str) -> None:
        self._table, self._others = table, others

    def _choices(self) -> tuple[str, ...]:
        module, name = self._table.split(":")
        return (*self._others, *getattr(importlib.import_module(module), name))

    @property
    def allowed(self) -> str:
        """The choices."""
        return " | ".join(self._choices())

    def parse(self, value: Any) -> str:
        """Take one of the choices, or raise ValueError."""
        return _parse_choice(value, self._choices())


def parse_value(name: str, value: Any, *, kind: Kind | RowOf) -> Any:
    """Bring the value of a flag or a key to its kind.

    Raises:
        ConfigError: It is of another kind.
    """
    try:
        return kind.parse(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"--{name} has a value of the wrong kind",
            value=value,
            allowed=kind.allowed,
            flag=f"--{name}",
        ) from None


def whole_number(minimum: int, maximum: float = float("inf")) -> Kind:
    """Whole numbers from a minimum to a maximum."""

    def parse(value: Any) -> int:
        if isinstance(value, bool | float):
            raise ValueError
        received = int(value)
        if not minimum <= received <= maximum:
            raise ValueError
        return received

    bounds = f"of at least {minimum}" if maximum == float("inf") else f"from {minimum} to {maximum}"
    return Kind(f"a whole number {bounds}", parse, "N")


def number(allowed: str, is_allowed: Callable[[float], bool]) -> Kind:
    """Numbers that satisfy a condition; NaN satisfies none."""

    def parse(value: Any) -> float:
        received = float(value)
        if isinstance(value, bool) or not is_allowed(received):
            raise ValueError
        return received

    return Kind(allowed, parse)


def one_of(*choices: str) -> Kind:
    """One of some texts."""
    return Kind(" | ".join(choices), lambda value: _parse_choice(value, choices))


def positive_or(word: str) -> Kind:
    """A whole number of at least 1, or a word in its place."""

    def parse(value: Any) -> int | str:
        return value if value == word else POSITIVE.parse(value)

    metavar = "N|auto" if word == "auto" else "X"
    return Kind(f"{word}, or {POSITIVE.allowed}", parse, metavar)


def _parse_choice(value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError
    return value


def _parse_conditions(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        import yaml

        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError from None
    if not isinstance(value, dict):
        raise ValueError
    return {str(name): str(condition) for name, condition in value.items()}


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _parse_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _parse_precision_target(value: Any) -> float:
    is_percent = isinstance(value, str) and value.endswith("%")
    share = float(value.removesuffix("%")) / 100 if is_percent else float(value)
    if isinstance(value, bool) or not 0 < share < 1:
        raise ValueError
    return share


def _parse_duration(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[1-9][0-9]*(ba|ep)", value):
        raise ValueError
    return value


def _is_positive(value: float) -> bool:
    return 0 < value < float("inf")


POSITIVE = whole_number(1)
NOT_NEGATIVE = whole_number(0)
TEXT = Kind("a text", _parse_text, "TEXT")
SWITCH = Kind("true | false", _parse_switch)
POSITIVE_NUMBER = number("a number above 0", _is_positive)
NOT_NEGATIVE_NUMBER = number("a number of at least 0", lambda value: 0 <= value < float("inf"))
SECONDS = number("a number of seconds above 0", _is_positive)
FRACTION = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
CONDITIONS = Kind(
    'fields and conditions, e.g. {pwatermark: "<=0.5", original_width: ">=512"}',
    _parse_conditions,
    "YAML",
)
PRECISION_TARGET = Kind("a share above 0, e.g. 1% or 0.01", _parse_precision_target)
DURATION = Kind("a number of batches or epochs, e.g. 48ba or 5ep", _parse_duration)
