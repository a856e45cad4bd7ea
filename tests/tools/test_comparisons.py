"""The report on engines has medians and ratios, and the page about links what its record says."""

from __future__ import annotations

import json
import math

from scipy import stats

from sdbench.launch.child import Outcome
from sdbench.report.tables import to_markdown
from tests.report.results_folder import RESULTS
from tools.compare_engines import format_report, launcher_of
from tools.compare_links import summarize
from tools.comparison import in_turn

STEPS_S = {"torch": (1.0, 1.1, 1.2), "ray": (1.02, 1.13, 1.22)}


def make_outcome(step_time_s: float) -> Outcome:
    """A run of 10 steps of 8 images in a command of 100 s."""
    summary = {
        "images_per_second": 8 / step_time_s,
        "step_time_p50_s": step_time_s,
        "data_wait_percent": 0.0,
        "startup": {"total_s": 30.0},
        "window_s": 10 * step_time_s,
    }
    record = {"summary": summary, "config": {"num_threads": 2}}
    return Outcome("ok", None, 0, 100.0, None, f"run-{step_time_s}", record)


def test_the_report_has_medians_and_ratios_with_intervals():
    runs = {name: [make_outcome(step_s) for step_s in steps_s] for name, steps_s in STEPS_S.items()}
    text = format_report(runs, flags=["--model_name", "small"])
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    (torch,) = (row for row in cells if row[0] == "torch")
    ray, ratios = (row for row in cells if row[0] == "ray")
    assert torch[1:4] == ["3", "7.273 (6.667 to 8)", "1.1 (1 to 1.2)"]
    assert ray[3] == "1.13 (1.02 to 1.22)"
    assert torch[6] == "89 (88 to 90)"
    # Welch's interval on the logarithms.
    logs = [[math.log(value) for value in STEPS_S[name]] for name in ("ray", "torch")]
    interval = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    ratio = math.exp(sum(logs[0]) / 3 - sum(logs[1]) / 3)
    low, high = math.exp(interval.low), math.exp(interval.high)
    assert ratios[2] == f"{ratio:.3f} ({low:.3f} to {high:.3f})"
    assert "- ray, 2 threads: run-1.13" in text


def test_each_side_is_first_in_its_turn():
    repeats = [(1, name) for name in "abc"] + [(2, name) for name in "bca"]
    assert list(in_turn("abc", repeats=2)) == repeats


def test_ranks_are_started_by_what_belongs_to_the_engine():
    assert launcher_of(["--engine", "ray"], 2)[-2:] == ["--num_ray_workers", "2"]
    assert "torch.distributed.run" in launcher_of(["--engine", "torch"], 2)
    assert "torch.distributed.run" not in launcher_of(["--engine", "torch"], 1)


def test_what_a_link_adds_is_set_against_the_prediction():
    steps_s = {"2 free": [0.1, 0.2, 0.3], "2 100": [1.1, 1.4, 1.6]}
    result = {
        "work": {"tiny": {"device_batch": 3}},
        "gradient_bytes": {"tiny": 10_000_000},
        "step_time_p50_s": {"tiny": steps_s},
    }
    free, slow = [[cell.text for cell in row] for row in summarize(result).rows]
    assert free == ["tiny", "2", "no limit", "0.2 (0.1 to 0.3)", "30", "", "", ""]
    # 6 images in 1.4 s. 1/2 of 20 MB are 0.8 s at 100 Mbit/s, and 1.2 s were added.
    assert slow[2:] == ["100 Mbit/s", "1.4 (1.1 to 1.6)", "4.29", "1.2", "0.8", "1.5"]


def test_the_page_has_the_table_of_its_record():
    result = json.loads((RESULTS / "comparisons/2-core-cpu_links.json").read_text())
    assert to_markdown(summarize(result)) in (RESULTS / "scaling.md").read_text()
