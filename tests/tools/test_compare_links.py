"""The page about limited links says what its record does, and predicts by the law."""

from __future__ import annotations

import json
from pathlib import Path

from sdbench.report.tables import to_markdown
from tools.compare_links import summarize

RESULTS = Path(__file__).resolve().parents[2] / "results"


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
