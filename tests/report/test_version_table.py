"""The table of versions: the same work before and after a change of packages or of the suite."""

from __future__ import annotations

from sdbench.analysis.version_table import make_version_table
from tests.report.results_folder import make_recipe, rows_of

HOURS = ("10", "11", "12", "13", "14", "15")


def run(rate, hour, *, torch="2.7.0", diffusers="0.39.0", commit="a" * 40, **settings):
    record = make_recipe(rate, **settings)
    record["versions"] |= {"torch": torch, "diffusers": diffusers}
    record["git"]["commit"] = commit
    record["started_utc"] = f"2026-11-01T{hour}:00:00+00:00"
    record["run_id"] = f"{torch} {commit[:1]} {hour}"
    record["summary"]["images_per_second_interval"] = None
    return record


def test_versions_that_take_turns_are_judged_and_only_changed_ones_are_named():
    old = [run(rate, hour) for rate, hour in zip((1.0, 1.01, 1.02), HOURS[::2], strict=True)]
    new = [
        run(rate, hour, torch="2.11.0")
        for rate, hour in zip((1.3, 1.31, 1.32), HOURS[1::2], strict=True)
    ]
    (row,) = rows_of(make_version_table([*new, *old]))
    assert row["change"] == "torch 2.7.0 -> 2.11.0"
    assert row["verdict"] == "faster"
    # 1.31 / 1.01, of geometric means.
    assert row["after over before"].startswith("1.297x (")


def test_other_settings_and_single_versions_are_no_change_of_versions():
    alone = [run(1.0, "10"), run(2.0, "11", precision="amp_bf16", torch="2.11.0")]
    assert not make_version_table(alone).rows
    one_each = [run(1.0, "10"), run(1.5, "14", commit="b" * 40, diffusers="0.42.0")]
    (row,) = rows_of(make_version_table(one_each))
    assert row["change"] == "diffusers 0.39.0 -> 0.42.0, this suite aaaaaaa -> bbbbbbb"
    assert row["verdict"] not in ("faster", "slower")
