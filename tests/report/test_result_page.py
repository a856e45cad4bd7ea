"""The generated parts of the page of one result."""

from __future__ import annotations

from sdbench.analysis.result_page import fill
from tests.refusals import refused
from tests.report.results_folder import make_record

PAGE = """# A result

Measured by somebody <!-- begin generated: dates -->
<!-- end generated: dates -->

<!-- begin generated: runs {} -->
<!-- end generated: runs -->

## Versions

<!-- begin generated: versions -->
<!-- end generated: versions -->

A footnote.
"""


def make_page(tmp_path, *records, patterns="*"):
    return fill(PAGE.format(patterns), records, path=tmp_path / "page.md")


def test_only_the_runs_that_the_marker_names_are_on_the_page(tmp_path):
    records = [make_record(run_id="a-1"), make_record(run_id="b-1")]
    page = make_page(tmp_path, *records, patterns="a-*")
    assert "| a-1 |" in page and "| b-1 |" not in page
    with refused("--folder", value="2031*"):
        make_page(tmp_path, *records, patterns="a-* 2031*")


def test_where_the_time_goes_is_the_median_of_the_runs(tmp_path):
    def breakdown(backward_s):
        seconds = {"vae_encode": 1.0, "backward": backward_s, "other": 0.5}
        return {"num_steps": 2, "step_time_s": 1.5 + backward_s, "seconds": seconds}

    records = [
        make_record(run_id=f"{run}", summary__breakdown=breakdown(backward_s))
        for run, backward_s in enumerate((2.5, 3.5, 8.5))
    ]
    page = make_page(tmp_path, *records)
    assert "## Where the time goes\n\n**Table 5.**" in page
    # Of steps of 4, 5 and 10 s: 1 s is 25, 20 and 10 %, and the backward pass 62.5, 70 and 85 %.
    assert "| vae encode | 1 | 20 |" in page
    assert "| backward | 3.5 | 70 |" in page
