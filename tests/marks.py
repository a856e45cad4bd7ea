"""Cases of a parametrised test of which some are slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_and_slow(cases: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """Mark as slow the cases, values or tuples of them, that are not among the quick ones."""
    cases = list(cases)
    assert quick and all(case in cases for case in quick), quick
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
