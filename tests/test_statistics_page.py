"""docs/statistics.md has what the code gives: some cells are simulated again, all if slow."""

from __future__ import annotations

import re

import numpy as np
import pytest

from sdbench.statistics import intervals
from tools import simulate_steps


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


@pytest.mark.parametrize(
    ("case", "num_steps", "least"),
    [("plain", 10, 0.95), ("correlated, 0.8", 20, 0.93), ("heavy-tailed", 50, 0.94)],
)
def test_the_page_has_the_coverage_of_the_intervals(page, case, num_steps, least):
    covered, *_, width = simulate_steps.find_coverage(case, num_steps)
    share, half_width = cell(page, "## Within-run", case, f"{num_steps} steps").split()
    assert_says(share, covered, least=least)
    assert half_width == f"({100 * width:.1f})"


def test_an_interval_covers_where_an_outlier_was_seen_and_not_where_none_was(page):
    _, without, seen, _ = simulate_steps.find_coverage("outliers", 50)
    row = cell(
        page,
        "Percent of the windows whose interval has the true rate in it: of",
        "outliers",
        "50 steps",
    )
    assert_says(row.split(" / ")[0], without, most=0.05)
    assert_says(row.split(" / ")[1], seen, least=0.95)


def test_a_precision_is_not_reached_by_missing_the_outliers(page):
    reached, length, covered = simulate_steps.find_precision("outliers")
    assert_says(
        cell(page, "## --target", "outliers", "reach it, % of the runs"), reached, most=0.05
    )
    assert cell(page, "## --target", "outliers", "median steps") == f"{length:.0f}"
    column = "interval has the true rate in it, %"
    assert_says(cell(page, "## --target", "outliers", column), covered, least=0.93)


@pytest.mark.parametrize("num_steps", [10, 20])
def test_few_windows_of_correlated_steps_are_called_drifting(page, num_steps):
    alarms = simulate_steps.find_alarms("correlated, 0.8", num_steps)
    assert_says(cell(page, "## Drift", "correlated, 0.8", f"{num_steps} steps"), alarms, most=0.13)


@pytest.mark.parametrize(("num_steps", "least"), [(50, 0.48), (100, 0.75)])
def test_a_drift_of_the_size_of_the_noise_is_found(page, num_steps, least):
    case = "plain, 3 % faster from end to end"
    found = simulate_steps.find_alarms(case, num_steps)
    share = cell(
        page, "Percent of the windows that are called drifting where", case, f"{num_steps} steps"
    )
    assert_says(share, found, least=least)


@pytest.mark.parametrize("num_steps", [10, 20])
def test_the_page_says_how_the_drift_of_steady_steps_varies(page, num_steps):
    windows = simulate_steps.simulate("plain", num_windows=1000, num_steps=num_steps)
    trends = [intervals.check_steady(list(window)).trend for window in windows]
    says = re.search(rf"(?:drift|that) of {num_steps}\b.*?by (\d\.\d) %", page, re.DOTALL)
    # The standard error of a standard deviation of 1,000 is 2.2 %.
    assert float(says[1]) == pytest.approx(100 * float(np.std(trends)), rel=0.07)


@pytest.mark.slow
def test_the_whole_page_is_what_the_simulation_gives(page):
    numbers = r"\d+(?:\.\d+)?"
    made = simulate_steps.make_page()
    assert re.sub(numbers, "0", made) == re.sub(numbers, "0", page)
    pairs = zip(re.findall(numbers, made), re.findall(numbers, page), strict=True)
    assert all(abs(float(one) - float(other)) <= 1 for one, other in pairs)
