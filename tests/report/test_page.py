"""The page in a browser."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess

import pytest

from sdbench.report.report import rebuild
from tests.report.results_folder import HOSTILE, make_gpu_record, make_record, make_results

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
# What a person does: sort the seed's table by its fifth column, downwards, and hide quoted rows.
# Then the page writes down whether its pictures were drawn, and how wide it is in a frame as wide
# as a phone (a window of this browser is never narrower than 500).
ACTIONS = """<script>
const heading = document.querySelectorAll("#p4de-p5 thead button")[4];
heading.click(); heading.click();
document.querySelector("#kinds input[value=quoted]").click();
const frame = document.createElement("iframe");
frame.style = "width: 360px; height: 800px; border: 0";
frame.srcdoc = document.documentElement.outerHTML.replaceAll("<script", "<template");
addEventListener("load", () => {
  const inside = frame.contentDocument.documentElement;
  document.body.dataset.width = `${inside.scrollWidth} of ${inside.clientWidth}`;
  document.body.dataset.drawn = [...document.images].every((image) => image.naturalWidth > 0);
  frame.remove();
});
document.body.append(frame);
</script>"""


class Tables(html.parser.HTMLParser):
    """Cells of the rows that are shown, and the headings' order, by table."""

    def __init__(self):
        super().__init__()
        self.rows, self.orders, self.body = {}, {}, {}
        self._table, self._row, self._is_cell = None, None, False

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "body":
            self.body = attributes
        elif tag == "table":
            self._table = attributes["id"]
            self.rows[self._table], self.orders[self._table] = [], []
        elif tag == "th":
            self.orders[self._table].append(attributes["aria-sort"])
        elif tag == "tr" and "hidden" not in attributes:
            self._row = []
        elif tag == "td" and self._row is not None:
            self._row.append("")
        self._is_cell = tag == "td" and self._row is not None

    def handle_endtag(self, tag):
        self._is_cell = False
        if tag == "tr" and self._row:
            self.rows[self._table].append(self._row)
        if tag == "tr":
            self._row = None

    def handle_data(self, data):
        if self._is_cell:
            self._row[-1] += data


@pytest.fixture
def page(tmp_path):
    runs = [
        make_gpu_record(summary__images_per_second=90.0, machine__device_name=HOSTILE),
        make_gpu_record(summary__images_per_second=1000.0, ranks__world_size=16),
        make_record(),
    ]
    results = make_results(tmp_path / "results", *runs)
    rebuild(results)
    return results / "index.html"


def test_the_page_loads_nothing(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"""\b(?:src|href|action|srcset)=["']?([^"'\s>]+)""", text)
    assert links
    assert [link for link in links if not link.startswith(("#", "data:image/svg+xml;"))] == []
    assert "url(" not in text and "@import" not in text
    # And the browser is told to refuse, whatever a name may smuggle in.
    assert "default-src 'none'; img-src data:" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "@media (prefers-color-scheme: dark)" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_sorts_filters_and_needs_no_sideways_scrolling(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"{ACTIONS}</body>"), encoding="utf-8")
    address = f"{page.as_uri()}#sort=512px-online:5:descending"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address]
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    tables = Tables()
    tables.feed(process.stdout)

    # By a click on its heading: P5 from the fastest to the slowest.
    rates = [float(row[4]) for row in tables.rows["p4de-p5"]]
    assert rates == [385.31, 361.15, 358.68, 353.81, 329.55, 289.19, 189.28]
    assert tables.orders["p4de-p5"][:6] == [*["none"] * 4, "descending", "none"]
    # By the address: 1000 before 90, as numbers; quoted rows are hidden, the name is unharmed.
    shown = tables.rows["512px-online"]
    assert [row[0] for row in shown] == ["measured", "measured"]
    assert [row[1] for row in shown] == ["NVIDIA H200", HOSTILE]
    assert tables.orders["512px-online"].count("descending") == 1
    assert [row[0] for row in tables.rows["256px-online"]] == ["measured"]
    assert tables.rows["512px-precomputed"] == []
    assert tables.body["data-width"] == "360 of 360"
    assert tables.body["data-drawn"] == "true"
