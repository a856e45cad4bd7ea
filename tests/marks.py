"""Cases of a parametrised test of which some are slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_and_slow(cases: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """Mark the cases that are not among the quick ones, for `pytest.mark.parametrize`.

    Args:
        cases: Values, or tuples of them.
        quick: Those of them that differ in what they may find.
    """
    cases = list(cases)
    assert quick and all(case in cases for case in quick), quick
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
