"""The conditions of --filters on a sample's metadata.

A condition is ``<=0.5``, ``>= 512``, ``== en``, ``!= 'two words'``, or several joined by ``and``.
Nothing is ever evaluated as a program.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from sdbench.base.errors import ConfigError

OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_TERM = r"""(<=|>=|==|!=|<|>)\s*('[^']*'|"[^"]*"|[^\s'"<>=!]+)"""
_CONDITION = re.compile(rf"{_TERM}(?:\s+and\s+{_TERM})*")


class Term(NamedTuple):
    """One comparison of a field: with a number, or with a text (``==`` and ``!=`` only)."""

    field: str
    sign: str
    value: float | str

    def accepts(self, metadata: Mapping[str, Any]) -> bool:
        """Return True if the field is present, has the same type, and compares as wanted."""
        found = metadata.get(self.field)
        if isinstance(self.value, float):
            is_number = isinstance(found, int | float) and not isinstance(found, bool)
            # Python's json reads NaN as a number, and `!=` holds between NaN and any number.
            return is_number and found == found and OPERATORS[self.sign](found, self.value)
        return isinstance(found, str) and OPERATORS[self.sign](found, self.value)


def parse_filters(filters: Mapping[str, str] | None) -> list[Term]:
    """Parse conditions, given by field; a `ConfigError` names the one that cannot be parsed."""
    terms = []
    for field, condition in (filters or {}).items():
        if _CONDITION.fullmatch(condition.strip()) is None:
            _raise_condition(field, condition)
        for sign, text in re.findall(_TERM, condition):
            value: float | str = text.strip("'\"")
            with contextlib.suppress(ValueError):
                value = float(text) if math.isfinite(float(text)) else value
            if isinstance(value, str) and sign not in ("==", "!="):
                _raise_condition(field, condition)
            terms.append(Term(field, sign, value))
    return terms


def _raise_condition(field: str, condition: str) -> NoReturn:
    raise ConfigError(
        f"The condition on {field} cannot be understood",
        value=condition,
        allowed="<=, >=, ==, !=, < or > and a number, or == or != and a word or a quoted text; "
        "several joined by and, e.g. '>= 512 and < 2048'",
        flag="--filters",
    )
