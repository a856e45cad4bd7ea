"""Kinds of values: what is accepted, in words, and how a flag's text or a YAML value is parsed."""

from __future__ import annotations

import math
import pkgutil
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.names import nearest
from sdbench.base.outside import LARGEST, SMALLEST, is_bounded
from sdbench.base.shape import Shape
from sdbench.base.yaml_file import parse_yaml

# Some libraries hold counts in 32 bits, such as Composer its seeds.
MAX_COUNT = 2**31 - 1
# Samples of a whole training.
MAX_DURATION = 10**12


class OutOfBoundsError(ValueError):
    """A number of the right kind that is too large or too small; the message is the bound."""


class Kind:
    """A kind of value.

    Attributes:
        parse: Turns the received value into the setting's, or raises ValueError, TypeError or the
            ConfigError to show.
        metavar: Stands for the value in the help.
    """

    def __init__(
        self,
        allowed: str | None,
        parse: Callable[[Any], Any],
        metavar: str = "X",
        choices: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Take what is accepted in words (None: the choices) and a function that lists choices."""
        self.parse = parse
        self.metavar = metavar
        self._allowed = allowed
        self._choices = choices

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted texts that can be listed."""
        return tuple(self._choices())

    @property
    def allowed(self) -> str:
        """What is accepted, in words, for errors and help."""
        return " | ".join(self.choices) if self._allowed is None else self._allowed

    def nearest_choice(self, value: Any) -> str | None:
        """The choice nearest to a refused value, or None.

        In a list with commas the first wrong text counts.
        """
        wrong = [part for part in str(value).split(",") if part not in self.choices]
        return nearest(wrong[0], self.choices) if wrong else None


def _choice(choices: Callable[[], Sequence[str]]) -> Kind:
    def parse(value: Any) -> str:
        if value not in choices():
            raise ValueError
        return value

    return Kind(None, parse, choices=choices)


def one_of(*choices: str) -> Kind:
    """One of some texts."""
    return _choice(lambda: choices)


def row_of(table: str, *others: str, find: str | None = None) -> Kind:
    """The name of a row in a table of another room.

    The table, ``module:name`` of a dictionary or of a function that lists names, is imported when a
    value is checked, because settings may not import the rooms with tables. `others` are further
    choices; `find` is a function that turns any text into a value, or refuses it.
    """

    def choices() -> Sequence[str]:
        rows = pkgutil.resolve_name(table)
        return (*others, *(rows() if callable(rows) else rows))

    if find is not None:

        def parse(value: Any) -> Any:
            return pkgutil.resolve_name(find)(_parse_text(value))

        return Kind(TEXT.allowed, parse, TEXT.metavar, choices)
    return _choice(choices)


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


def positive_or(word: str) -> Kind:
    """A whole number of at least 1, or a word in its place."""

    def parse(value: Any) -> int | str:
        return value if value == word else POSITIVE.parse(value)

    metavar = "N|auto" if word == "auto" else "X"
    return Kind(f"{word}, or {POSITIVE.allowed}", parse, metavar, lambda: (word,))


def number_or(word: str) -> Kind:
    """A number above 0, or a word in its place."""

    def parse(value: Any) -> float | str:
        return value if value == word else POSITIVE_NUMBER.parse(value)

    return Kind(f"{word}, or {POSITIVE_NUMBER.allowed}", parse, "X", lambda: (word,))


def list_of(kind: Kind) -> Kind:
    """Values of a kind, separated by commas, as a tuple."""

    def parse(value: Any) -> tuple[Any, ...]:
        return tuple(map(kind.parse, str(value).split(",")))

    allowed = f"{kind.allowed}; several with commas between them"
    return Kind(allowed, parse, f"{kind.metavar},...", lambda: kind.choices)


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


def _parse_name(value: Any) -> str:
    name = _parse_text(value)
    if "/" in name or name in ("", ".", ".."):
        raise ValueError
    return name


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


def _parse_shape(value: Any) -> Shape:
    width, height = str(value).split("x")
    return Shape(POSITIVE.parse(width), POSITIVE.parse(height))


def _parse_shapes(value: Any) -> str:
    shapes = read_shapes(value) if isinstance(value, str) else tuple(map(_parse_shape, value))
    if not shapes:
        raise ValueError
    return ",".join(map(str, shapes))


def read_shapes(text: str) -> tuple[Shape, ...]:
    """The shapes in a value of the kind `SHAPES`."""
    return tuple(map(_parse_shape, text.split(",")))


def _is_positive(value: float) -> bool:
    return 0 < value < float("inf")


POSITIVE = whole_number(1)
NOT_NEGATIVE = whole_number(0)
TEXT = Kind("a text", _parse_text, "TEXT")
WORD = Kind("a word", _parse_word, "WORD")
NAME = Kind("the name of a folder, without /, not . or ..", _parse_name, "NAME")
PATH = Kind("a path", lambda value: Path(_parse_text(value)), "PATH")
SWITCH = Kind("true | false", _parse_switch)
POSITIVE_NUMBER = number("a number above 0", _is_positive)
NOT_NEGATIVE_NUMBER = number("a number of at least 0", lambda value: 0 <= value < float("inf"))
SHAPE = Kind("WIDTHxHEIGHT in pixels, e.g. 640x384", _parse_shape, "WxH")
# As text, which files and records hold; `read_shapes` reads it.
SHAPES = Kind(f"{SHAPE.allowed}; several with commas between them", _parse_shapes, "WxH,...")
# How often a command is measured.
REPEATS = whole_number(1, 1000)
SECONDS = number("a number of seconds above 0, at most 1e9", lambda value: 0 < value <= 1e9)
FRACTION = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
FINITE_NUMBER = number("a number", math.isfinite)
BETWEEN_0_AND_1 = number("a number above 0 and below 1", lambda value: 0 < value < 1)
BELOW_1 = number("a number of at least 0 and below 1", lambda value: 0 <= value < 1)
CONDITIONS = Kind(
    'fields and conditions, e.g. {pwatermark: "<=0.5", original_width: ">=512"}',
    _parse_conditions,
    "YAML",
)
PARTS = Kind(
    "parts with `pretrained` or `params`, e.g. {vae: {pretrained: FOLDER}, unet: {params: "
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
