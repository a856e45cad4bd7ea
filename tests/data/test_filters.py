"""Which samples meet a condition, and what is no condition at all?"""

from __future__ import annotations

import pytest

from sdbench.data.formats.filters import parse_filters
from tests.refusals import refused


@pytest.mark.parametrize(
    ("condition", "value", "expected"),
    [
        ("<=0.5", 0.5, True),
        (">= 512", 511, False),
        ("<1e3", 999.5, True),
        ("> -1", -1, False),
        ("== 3", 3.0, True),
        ("!= 3", 3, False),
        (">= 512 and < 2048", 2047, True),
        (">= 512 and < 2048 and != 600", 600, False),
        ("== en", "en", True),
        ("!= en", "de", True),
        # Quoted, or a number by its looks.
        ("== 'salt and pepper'", "salt and pepper", True),
        ('== "3"', "3", True),
        ('== "3"', 3, False),
        ("== nan", "nan", True),
        # Another type than the one asked for is no answer, whatever the comparison.
        (">= 512", "512", False),
        (">= 0", True, False),
        ("!= en", None, False),
    ],
)
def test_a_condition_compares_values_of_its_own_type(condition, value, expected):
    terms = parse_filters({"field": condition})
    assert all(term.accepts({"field": value}) for term in terms) is expected


@pytest.mark.parametrize(
    "condition",
    [
        " ",
        "=0.5",
        "<= en",
        "<= nan",
        "== en or de",
        "== 'en",
        ">= 512 and",
        ">= 512 >= 3",
        "<=0.5; touch FILE",
        "== __import__('os').system('touch FILE')",
    ],
)
def test_anything_else_is_an_error_and_never_runs(condition, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("--filters", value=condition):
        parse_filters({"pwatermark": condition})
    assert list(tmp_path.iterdir()) == []
