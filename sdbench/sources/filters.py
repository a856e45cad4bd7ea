"""Does a sample's metadata meet the user's conditions?

A condition is ``<=0.5``, ``>= 512``, ``== en``, or several joined by ``and``. Nothing is ever
evaluated as a program.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sdbench.errors import ConfigError

OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_TERM = re.compile(r"(<=|>=|==|!=|<|>)\s*(\S.*)")


class Term(NamedTuple):
    """One comparison of a field: with a number, or with a text (``==`` and ``!=`` only)."""

    field: str
    sign: str
    value: float | str

    def accepts(self, metadata: Mapping[str, Any]) -> bool:
        """Whether the field is there, is of the same type, and compares as wanted."""
        found = metadata.get(self.field)
        if isinstance(self.value, float):
            is_number = isinstance(found, int | float) and not isinstance(found, bool)
            return is_number and OPERATORS[self.sign](found, self.value)
        return isinstance(found, str) and OPERATORS[self.sign](found, self.value)


def parse_filters(filters: Mapping[str, str]) -> list[Term]:
    """Take the conditions apart.

    Args:
        filters: Field to condition.

    Raises:
        ConfigError: A condition is none of this grammar.
    """
    return [
        _parse_term(field, part.strip())
        for field, condition in filters.items()
        for part in re.split(r"\sand\s", condition)
    ]


def _parse_term(field: str, text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        _raise_condition(field, text)
    sign, value = match.groups()
    try:
        return Term(field, sign, float(value))
    except ValueError:
        if sign not in ("==", "!="):
            _raise_condition(field, text)
        return Term(field, sign, value.strip("'\""))


def _raise_condition(field: str, text: str) -> None:
    raise ConfigError(
        f"The condition on {field} cannot be understood",
        value=text,
        allowed="<=, >=, ==, !=, < or > and a number, or == or != and a text; several joined by "
        "and, e.g. '>= 512 and < 2048'",
        flag="--filters",
    )


def accepts(terms: list[Term], metadata: Mapping[str, Any]) -> bool:
    """Whether metadata meets all conditions."""
    return all(term.accepts(metadata) for term in terms)
