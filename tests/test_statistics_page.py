"""docs/statistics.md has what the code gives: some cells are simulated again, all if full."""

from __future__ import annotations

import re

import numpy as np
import pytest

from sdbench.statistics import intervals
from tools import simulate_steps

COVERAGE, PRECISION, ALARMS = "## Within-run", "## --target", "## Drift"
POWER = "Percent of the drifting windows that are called drifting"


@pytest.fixture(scope="module")
def page(repository) -> str:
    return (repository / "docs/statistics.md").read_text()


def cell(page: str, heading: str, row: str, column: str) -> str:
    """A cell of the table behind the text that begins with `heading`."""
    table = re.search(r"(?:^\|.*\n)+", page.partition(heading)[2], re.MULTILINE).group()
    header, _, *rows = ([part.strip() for part in line.split("|")] for line in table.splitlines())
    (found,) = (cells for cells in rows if cells[1] == row)
    return found[header.index(column)]


def assert_says(page_share: str, share: float, *, least: float = 0.0, most: float = 1.0) -> None:
    assert least <= share <= most
    # Another processor may round the sum of a window otherwise.
    assert abs(float(page_share) - 100 * share) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "least", "most"), [("outliers", 0.0, 0.05), ("correlated, 0.5", 0.99, 1.0)]
)
def test_a_precision_is_reached_where_no_outliers_are_missed(page, case, least, most):
    reached, length, covered = simulate_steps.find_precision(case)
    columns = ("reach it, % of the runs", "median steps", "interval has the true rate in it, %")
    shares = [cell(page, PRECISION, case, column) for column in columns]
    assert_says(shares[0], reached, least=least, most=most)
    assert shares[1] == f"{length:.0f}"
    assert_says(shares[2], covered, least=0.93)


@pytest.mark.parametrize(
    ("heading", "case", "num_steps", "least", "most"),
    [
        (COVERAGE, "plain", 10, 0.95, 1.0),
        (COVERAGE, "correlated, 0.8", 20, 0.93, 1.0),
        (COVERAGE, "heavy-tailed", 50, 0.94, 1.0),
        (ALARMS, "correlated, 0.5", 100, 0.0, 0.1),
        (ALARMS, "correlated, 0.8", 20, 0.0, 0.13),
        (POWER, "plain, 3 % faster from end to end", 50, 0.48, 1.0),
    ],
)
def test_intervals_cover_the_rate_and_windows_that_drift_are_told(
    page, heading, case, num_steps, least, most
):
    if heading == COVERAGE:
        share, *_ = simulate_steps.find_coverage(case, num_steps)
    else:
        share = simulate_steps.find_alarms(case, num_steps)
    shown, *_ = cell(page, heading, case, f"{num_steps} steps").split()
    assert_says(shown, share, least=least, most=most)


@pytest.mark.parametrize("num_steps", [10, 20])
def test_the_page_says_how_the_drift_of_steady_steps_varies(page, num_steps):
    windows = simulate_steps.simulate("plain", num_windows=1000, num_steps=num_steps)
    trends = [intervals.check_steady(list(window)).trend for window in windows]
    says = re.search(rf"(?:drift|that) of {num_steps}\b.*?by (\d\.\d) %", page, re.DOTALL)
    # The standard error of a standard deviation of 1,000 is 2.2 %.
    assert float(says[1]) == pytest.approx(100 * float(np.std(trends)), rel=0.07)


@pytest.mark.full  # two minutes
def test_the_whole_page_is_what_the_simulation_gives(page):
    numbers = r"\d+(?:\.\d+)?"
    made = simulate_steps.make_page()
    assert re.sub(numbers, "0", made) == re.sub(numbers, "0", page)
    pairs = zip(re.findall(numbers, made), re.findall(numbers, page), strict=True)
    assert all(abs(float(one) - float(other)) <= 1 for one, other in pairs)
