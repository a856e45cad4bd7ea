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


def test_the_page_says_who_when_what_on_which_hardware_how_and_with_which_versions(tmp_path):
    page = make_page(tmp_path, make_record(), make_record(started_utc="2026-11-22T01:02:03+00:00"))
    assert page.startswith("# A result\n\nMeasured by somebody <!-- begin generated: dates -->\n")
    assert "in 2 runs that began between 2026-11-21 05:52 and 2026-11-22 01:02 UTC." in page
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == [
        "## Models",
        "## Hardware",
        "## How it was measured",
        "## Throughput",
        "## Versions",
    ]
    captions = [line[:9] for line in page.splitlines() if line.startswith("**Table")]
    assert captions == [f"**Table {number}" for number in range(1, 5)]
    assert "| sd2-base | 1,289,952,427 | 865,910,724 | random | 857 | 256 | in the step |" in page
    assert "2 warm-up steps, then 10 measured ones, of 2 images each" in page
    assert "| device | 1 x Intel Xeon Processor |" in page
    assert "| this suite, commit | 977fb620dc92d88a0127d5b2eb82d7f799245125 |" in page
    assert page.endswith("<!-- end generated: versions -->\n\nA footnote.\n")


def test_only_the_runs_that_the_marker_names_are_on_the_page(tmp_path):
    records = [make_record(run_id="a-1"), make_record(run_id="b-1")]
    page = make_page(tmp_path, *records, patterns="a-*")
    assert "| a-1 |" in page and "| b-1 |" not in page
    with refused("--folder", value="2031*"):
        make_page(tmp_path, *records, patterns="a-* 2031*")


def test_settings_that_differ_between_configurations_are_a_table(tmp_path):
    page = make_page(tmp_path, make_record(), make_record(config__precision="fp32"))
    assert "| setting | (a) | (b) |" in page
    assert "| precision | amp\\_bf16 | fp32 |" in page
    assert "| image\\_size |" not in page


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
