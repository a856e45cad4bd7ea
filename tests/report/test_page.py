"""The page in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sdbench.analysis.report import rebuild
from tests.report.results_folder import HOSTILE, make_gpu_record, make_record, make_results

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)


def in_browser(test):
    """Mark a test that opens a page in Chromium."""
    needs_it = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
    return pytest.mark.browser(needs_it(test))


# What a person does: sort the seed's table by its sixth column, downwards, and hide quoted rows.
# Then the page writes down what it shows, and how wide it is in a frame as wide as a phone (a
# window of this browser is never narrower than 500).
ACTIONS = """<pre id="seen"></pre><script>
const heading = document.querySelectorAll("#p4de-p5 thead button")[5];
heading.click(); heading.click();
document.querySelector("#kinds input[value=quoted]").click();
const frame = document.createElement("iframe");
frame.style = "width: 360px; height: 800px; border: 0";
frame.srcdoc = document.documentElement.outerHTML.replaceAll("<script", "<template");
const texts = (cells) => [...cells].map((cell) => cell.textContent);
addEventListener("load", () => {
  const inside = frame.contentDocument.documentElement;
  const seen = {width: [inside.scrollWidth, inside.clientWidth], rows: {}, orders: {}};
  frame.remove();
  for (const table of document.querySelectorAll("main table")) {
    const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden);
    seen.rows[table.id] = shown.map((row) => texts(row.cells));
    const headings = [...table.tHead.rows[0].cells];
    seen.orders[table.id] = headings.map((cell) => cell.getAttribute("aria-sort"));
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
document.body.append(frame);
</script>"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    runs = [
        make_gpu_record(summary__images_per_second=90.0, machine__device_name=HOSTILE),
        make_gpu_record(summary__images_per_second=1000.0, ranks__world_size=16),
        make_record(config__engine="torch"),
    ]
    results = make_results(tmp_path_factory.mktemp("made") / "results", *runs)
    rebuild(results)
    return results / "index.html"


@pytest.fixture
def page(made, tmp_path):
    """The page of three runs, to be changed."""
    return Path(shutil.copy(made, tmp_path))


def test_the_page_loads_nothing(page):
    text = page.read_text(encoding="utf-8")
    pattern = r"""<(\w+)\b[^>]*?\s(?:xlink:)?(?:src|href|action|srcset)=["']?([^"'\s>]+)"""
    links = re.findall(pattern, text)
    assert {"a", "use"} <= {element for element, _ in links}
    loaded = [link for element, link in links if element != "a"]  # a person has to click the others
    assert [link for link in loaded if not link.startswith("#")] == []
    assert "url(" not in text.replace("url(#", "") and "@import" not in text
    # And the browser is told to refuse, whatever a name may smuggle in.
    assert "default-src 'none'; img-src data:" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "@media (prefers-color-scheme: dark)" in text


def opened(address, tmp_path):
    """What a page has written down as JSON once a browser has loaded it."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address]
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return json.loads(html.unescape(re.findall(r'<pre id="seen">(.*?)</pre>', process.stdout)[-1]))


@pytest.mark.slow
@in_browser
def test_a_browser_sorts_filters_and_needs_no_sideways_scrolling(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"{ACTIONS}</body>"), encoding="utf-8")
    seen = opened(f"{page.as_uri()}#sort=sd2-base-512px-online:5:descending", tmp_path)
    rows, orders = seen["rows"], seen["orders"]

    # By a click on its heading: P5 from the fastest to the slowest.
    rates = [float(row[5]) for row in rows["p4de-p5"]]
    assert rates == [385.31, 361.15, 358.68, 353.81, 329.55, 289.19, 189.28]
    assert orders["p4de-p5"][:7] == [*["none"] * 5, "descending", "none"]
    # By the address: 1000 before 90, as numbers; quoted rows are hidden, the name is unharmed.
    shown = rows["sd2-base-512px-online"]
    assert [row[0] for row in shown] == ["measured", "measured"]
    assert [row[1] for row in shown] == ["NVIDIA H200", HOSTILE]
    assert orders["sd2-base-512px-online"].index("descending") == 4
    assert [row[0] for row in rows["sd2-base-256px-online"]] == ["measured"]
    assert rows["source-9-sd2-base-512px-precomputed"] == []
    assert seen["width"] == [360, 360]


def seen_in_frames(page, script, tmp_path, *, sizes):
    """What a script finds in the page in frames of these sizes; it returns what JSON can hold."""
    source = html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(
        f'<iframe srcdoc="{source}" width="{width}" height="{height}" style="border: 0"></iframe>'
        for width, height in sizes
    )
    outside = tmp_path / "frames.html"
    outside.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'>{frames}<pre id='seen'></pre><script>"
        f"function look(view) {{ const page = view.document; {script} }}\n"
        "addEventListener('load', () => { document.getElementById('seen').textContent = "
        "JSON.stringify([...document.querySelectorAll('iframe')].map((frame) => {"
        "  const seen = look(frame.contentWindow); frame.remove(); return seen; })); });</script>",
        encoding="utf-8",
    )
    return opened(outside.as_uri(), tmp_path)


@in_browser
def test_the_question_is_in_the_first_screen_and_a100_against_h100_follows(page, tmp_path):
    script = """
      const cells = [...page.querySelectorAll("#p4de-p5 tbody td:nth-child(4)")];
      const answer = page.getElementById("answer").getBoundingClientRect();
      return [answer.height > 0, Math.round(answer.bottom), cells.map((cell) => cell.textContent),
        Math.max(...cells.map((cell) => Math.round(cell.getBoundingClientRect().right))),
        [...page.querySelectorAll("h2")].map((heading) => heading.textContent)];
    """
    sizes = [(1366, 768), (1920, 1080), (390, 844)]
    seen = seen_in_frames(page, script, tmp_path, sizes=sizes)
    for (width, height), (is_there, bottom, ratios, right, headings) in zip(
        sizes, seen, strict=True
    ):
        assert is_there and bottom <= height
        assert ratios == ["1.33x", "1.66x", "1.78x", "1.83x", "1.82x", "1.82x", "1.89x"]
        assert right <= width
        assert headings[:2] == ["Which GPU?", "A100 against H100"]


@in_browser
def test_rows_are_found_columns_chosen_two_rows_compared_and_points_told(page, tmp_path):
    script = """
      const type = (input, value, kind) => {
        input.value = value;
        input.dispatchEvent(new view.Event(kind, {bubbles: true}));
      };
      const seen = {};
      const table = page.getElementById("sd2-base-512px-online");
      const headings = [...table.tHead.rows[0].cells];
      const heading = (name) => headings.find((cell) => cell.textContent === name);
      // Columns: the command is hidden until it is chosen.
      seen.command = [heading("command").offsetWidth > 0];
      const choice = table.parentElement.nextElementSibling;
      [...choice.querySelectorAll("label")].find((label) => label.textContent === " command")
        .querySelector("input").click();
      seen.command.push(heading("command").offsetWidth > 0);
      // Two rows beside each other.
      const rows = [...table.tBodies[0].rows];
      rows.forEach((row) => row.querySelector("input").click());
      const panel = page.getElementById("compare");
      seen.ratio = panel.querySelector("b").textContent;
      seen.differences = [...panel.querySelectorAll("tr")].map((row) => row.cells[0].textContent);
      seen.devices = [...panel.querySelectorAll("tr")]
        .filter((row) => row.cells[0].textContent === "devices")
        .map((row) => [row.cells[1].textContent, row.cells[2].textContent]);
      panel.querySelector("button").click();
      seen.closed = panel.hidden && !page.querySelector("tr.chosen");
      // A point of the seed's chart.
      const point = page.querySelector("#sd_p4de_p5-1 use");
      const place = point.getBoundingClientRect();
      point.closest("svg").dispatchEvent(new view.PointerEvent("pointermove", {
        bubbles: true, clientX: place.x + place.width / 2 + 9, clientY: place.y + place.height / 2,
      }));
      seen.note = page.getElementById("note").textContent;
      // Search: both words in one row, whatever their column.
      type(page.getElementById("search"), "mlperf GB200 v5.0", "input");
      seen.found = page.getElementById("found").textContent;
      seen.tables = [...page.querySelectorAll("main table")]
        .filter((table) => !table.parentElement.hidden).map((table) => table.id);
      seen.isOpen = [...page.querySelectorAll("details.fold[open] > summary")]
        .map((summary) => summary.textContent.slice(0, 20));
      seen.headings = [...page.querySelectorAll("section:not([hidden]) > h2")]
        .map((heading) => heading.textContent);
      // Words of the caption and of the source find the rows of their table: the comparison (7),
      // the H100 of section 1.5 (7) and section 2.2.7 (12); 32, 329.55 and 1.32x of the comparison.
      // A run by torch is a row of its own and the best of its machine. The first view has two
      // H100 of AWS, and a run with its engine and its version of torch.
      seen.byTable = ["aws h100", "reproduced a100 32", "engine torch"].map((words) => {
        type(page.getElementById("search"), words, "input");
        return page.getElementById("found").textContent;
      });
      type(page.getElementById("search"), "", "input");
      seen.all = page.querySelectorAll("main tr[hidden]:not([data-unasked])").length;
      // Only kinds of which there are rows.
      seen.kinds = [...page.querySelectorAll("#kinds label")].filter((label) => label.offsetParent)
        .map((label) => label.textContent.trim());
      return seen;
    """
    (seen,) = seen_in_frames(page, script, tmp_path, sizes=[(1280, 720)])
    assert seen["command"] == [False, True]
    assert seen["ratio"] == "B / A: 11.1 times the images/s. "
    assert seen["devices"] == [["8", "16"]]
    assert "precision" not in seen["differences"]
    assert seen["closed"]
    assert seen["note"].splitlines() == [
        "A100-SXM4-80GB (p4de.24xlarge), EMA, global batch 2048, quoted",
        "micro-batch 4: 142.69 images/s",
        "AWS (2024) MosaicML Stable Diffusion section 1.5",
    ]
    assert (seen["found"], seen["tables"]) == ("3 rows", ["source-11-sd2-base-512px-precomputed"])
    assert seen["isOpen"] == ["MLPerf Training v5.0"]
    assert seen["headings"] == ["Figures of others"]
    assert seen["byTable"] == ["28 rows", "3 rows", "3 rows"]
    assert seen["all"] == 0
    assert seen["kinds"] == ["measured", "quoted"]


@pytest.mark.slow
@in_browser
def test_what_scrolls_sideways_says_so_and_charts_fit_a_phone(page, tmp_path):
    script = """
      const tables = [...page.querySelectorAll("main .box:has(> table)")]
        .filter((box) => box.offsetParent);
      const seen = tables.map((box) => {
        box.style.contentVisibility = "visible";
        box.dispatchEvent(new view.Event("scroll"));  // as a change of its size
        const sign = view.getComputedStyle(box.querySelector("caption"), "::after").content;
        return [box.scrollWidth > box.clientWidth + 1, sign.includes("scroll sideways")];
      });
      const charts = [...page.querySelectorAll("figure")].map((figure) => {
        const place = figure.querySelector("svg").getBoundingClientRect();
        return [place.left >= 0, place.right <= view.innerWidth, place.width > 250];
      });
      return [seen, charts];
    """
    sizes = [(1280, 720), (390, 844)]
    for tables, charts in seen_in_frames(page, script, tmp_path, sizes=sizes):
        assert tables and all(goes_on == is_said for goes_on, is_said in tables)
        assert charts and all(map(all, charts))
    assert any(goes_on for goes_on, _ in tables)


@in_browser
def test_a_chart_is_no_higher_than_a_printed_sheet(page, tmp_path):
    """In a window as wide as a sheet, with the rules for print applied to the screen."""
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("@media print", "@media screen"), encoding="utf-8")
    script = """
      return [...page.querySelectorAll("figure")].map((figure) => {
        const place = figure.getBoundingClientRect();
        const rules = view.getComputedStyle(figure).breakInside;
        return [rules, place.height / 96 * 25.4, place.width / 96 * 25.4];
      });
    """
    (charts,) = seen_in_frames(page, script, tmp_path, sizes=[(1032, 703)])  # A4 without margins
    assert charts
    for rules, height_mm, width_mm in charts:
        assert (rules, height_mm < 186, 80 < width_mm < 273) == ("avoid", True, True)


@in_browser
def test_rows_are_ticked_where_the_first_column_is_folded(tmp_path):
    runs = [make_record(config__image_size=size) for size in (256, 512)]
    results = make_results(tmp_path / "results", *runs, quoted=False)
    rebuild(results)
    script = """
      const rows = [...page.querySelectorAll("#headlines tbody tr")];
      const ticks = rows.map((row) => row.querySelector("input"));
      const widths = [rows[0].cells[0].offsetWidth, ...ticks.map((tick) => tick.offsetWidth)];
      ticks.forEach((tick) => tick.click());
      const panel = page.getElementById("compare");
      return [widths, panel.hidden, panel.querySelector("b").textContent];
    """
    ((widths, hidden, verdict),) = seen_in_frames(
        results / "index.html", script, tmp_path, sizes=[(1280, 720)]
    )
    assert widths[0] == 0 and all(widths[1:])  # all rows are of one machine
    assert not hidden
    # 256 px against 512: other work, so no ratio.
    assert verdict == "No ratio: this is not the same work. The rows differ in work. "
