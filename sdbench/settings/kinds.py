"""Kinds of values: what is accepted, in words, and how a flag's text or a YAML value is parsed."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdbench.base.names import nearest
from sdbench.base.outside import LARGEST, SMALLEST, is_bounded
from sdbench.base.yaml_file import parse_yaml

# What is counted is held in 32 bits by some of what computes with it, such as Composer's seeds.
MAX_COUNT = 2**31 - 1
# Samples of a whole training.
MAX_DURATION = 10**12


class OutOfBoundsError(ValueError):
    """A number of the right kind that is too large or too small; says what is allowed besides."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        allowed: What is accepted, in words, for errors and help.
        parse: Turns the received value into the setting's, or raises ValueError or TypeError.
        metavar: Stands for the value in the help.
        choices: Texts that it takes, as far as they can be listed.
    """

    allowed: str
    parse: Callable[[Any], Any]
    metavar: str = "X"
    choices: tuple[str, ...] = ()


class RowOf:
    """The name of a row in a table of another room; has the attributes of a `Kind`.

    The table is imported when a value is checked: settings lie below the rooms that have tables,
    and a new row is all that a new choice takes.

    Args:
        table: ``module:name`` of a dictionary, or of a function that lists names.
        others: Choices that are no row.
    """

    metavar = "X"

    def __init__(self, table: str, *others: str) -> None:
        self._table, self._others = table, others

    @property
    def choices(self) -> tuple[str, ...]:
        """Texts that it takes, as far as they can be listed."""
        table = pkgutil.resolve_name(self._table)
        return (*self._others, *(table() if callable(table) else table))

    @property
    def allowed(self) -> str:
        """The choices."""
        return " | ".join(self.choices)

    def parse(self, value: Any) -> str:
        """Take one of the choices, or raise ValueError."""
        return _parse_choice(value, self.choices)


class RowOrText(RowOf):
    """The same, or any other text."""

    metavar = "TEXT"

    @property
    def allowed(self) -> str:
        """What is accepted, in words."""
        return TEXT.allowed

    def parse(self, value: Any) -> str:
        """Take a text, or raise ValueError."""
        return _parse_text(value)


def nearest_choice(kind: Kind | RowOf, value: Any) -> str | None:
    """The choice that was meant by a value that the kind refuses; None if that cannot be told.

    Args:
        kind: Of the value, with or without choices.
        value: As it was received. Of several with commas between them, the first wrong one counts.
    """
    wrong = [part for part in str(value).split(",") if part not in kind.choices]
    return nearest(wrong[0], kind.choices) if wrong else None


def whole_number(minimum: int, maximum: int | None = None) -> Kind:
    """Whole numbers from a minimum to a maximum; None: to `MAX_COUNT`."""

    def parse(value: Any) -> int:
        if isinstance(value, bool | float):
            raise ValueError
        received = int(value)
        if maximum is None and received > MAX_COUNT:
            raise OutOfBoundsError(f"at most {MAX_COUNT:,}")
        if received < minimum or (maximum is not None and received > maximum):
            raise ValueError
        return received

    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Kind(f"a whole number {bounds}", parse, "N")


def number(allowed: str, is_allowed: Callable[[float], bool]) -> Kind:
    """Numbers that satisfy a condition; NaN satisfies none."""

    def parse(value: Any) -> float:
        received = as_float(value)
        if isinstance(value, bool) or not is_allowed(received):
            raise ValueError
        if not is_bounded(received):
            raise OutOfBoundsError(f"at most {LARGEST:g}, and if not 0 at least {SMALLEST:g}")
        return received

    return Kind(allowed, parse)


def as_float(value: Any) -> float:
    """A number or a text as a float; an integer that no float can hold is infinite."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def one_of(*choices: str) -> Kind:
    """One of some texts."""
    return Kind(" | ".join(choices), lambda value: _parse_choice(value, choices), choices=choices)


def positive_or(word: str) -> Kind:
    """A whole number of at least 1, or a word in its place."""

    def parse(value: Any) -> int | str:
        return value if value == word else POSITIVE.parse(value)

    metavar = "N|auto" if word == "auto" else "X"
    return Kind(f"{word}, or {POSITIVE.allowed}", parse, metavar, (word,))


def list_of(kind: Kind) -> Kind:
    """Values of a kind with commas between them, as a tuple."""

    def parse(value: Any) -> tuple[Any, ...]:
        return tuple(map(kind.parse, str(value).split(",")))

    allowed = f"{kind.allowed}; several with commas between them"
    return Kind(allowed, parse, f"{kind.metavar},...", kind.choices)


def _parse_choice(value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError
    return value


def _parse_conditions(value: Any) -> dict[str, str]:
    return {str(name): str(condition) for name, condition in _parse_mapping(value).items()}


def _parse_parts(value: Any) -> dict[str, dict[str, Any]]:
    parts = _parse_mapping(value)
    for given in parts.values():
        ((form, source),) = _parse_mapping(given).items()
        if not isinstance(source, {"pretrained": str, "params": dict}.get(form, ())):
            raise ValueError
    return parts


def _parse_resources(value: Any) -> dict[str, float]:
    resources = {str(name): as_float(amount) for name, amount in _parse_mapping(value).items()}
    if not resources or not all(map(_is_positive, resources.values())):
        raise ValueError
    return resources


def _parse_mapping(value: Any) -> dict[Any, Any]:
    if isinstance(value, str):
        value = parse_yaml(value)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    return value


def _parse_word(value: Any) -> str:
    if len(_parse_text(value).split()) != 1 or value != value.strip():
        raise ValueError
    return value


def _parse_path(value: Any) -> Path:
    return Path(_parse_text(value))


def _parse_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _parse_share(value: Any) -> float:
    is_percent = isinstance(value, str) and value.endswith("%")
    share = float(value.removesuffix("%")) / 100 if is_percent else as_float(value)
    if isinstance(value, bool) or not SMALLEST <= share < 1:
        raise ValueError
    return share


def _parse_duration(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[1-9][0-9]*(ba|ep|sp)", value):
        raise ValueError
    if int(value[:-2]) > MAX_DURATION:
        raise OutOfBoundsError(f"at most {MAX_DURATION:,}")
    return value


def _is_positive(value: float) -> bool:
    return 0 < value < float("inf")


POSITIVE = whole_number(1)
NOT_NEGATIVE = whole_number(0)
TEXT = Kind("a text", _parse_text, "TEXT")
WORD = Kind("a word", _parse_word, "WORD")
PATH = Kind("a path", _parse_path, "PATH")
SWITCH = Kind("true | false", _parse_switch)
POSITIVE_NUMBER = number("a number above 0", _is_positive)
NOT_NEGATIVE_NUMBER = number("a number of at least 0", lambda value: 0 <= value < float("inf"))
# For a command that is measured again and again.
REPEATS = whole_number(1, 1000)
SECONDS = number("a number of seconds above 0, at most 1e9", lambda value: 0 < value <= 1e9)
FRACTION = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
BETWEEN_0_AND_1 = number("a number above 0 and below 1", lambda value: 0 < value < 1)
CONDITIONS = Kind(
    'fields and conditions, e.g. {pwatermark: "<=0.5", original_width: ">=512"}',
    _parse_conditions,
    "YAML",
)
PARTS = Kind(
    "parts with a place or with all numbers, e.g. {vae: {pretrained: FOLDER}, unet: {params: "
    "{in_channels: 4, sample_size: 64}}}",
    _parse_parts,
    "YAML",
)
RESOURCES = Kind(
    'names of Ray\'s resources and amounts above 0, e.g. {"CPU": 4, "GPU": 1}',
    _parse_resources,
    "YAML",
)
SHARE = Kind("a share above 0 and below 100 %, e.g. 1% or 0.01", _parse_share)
DURATION = Kind("a number of batches, epochs or samples, e.g. 48ba, 5ep or 6000sp", _parse_duration)
