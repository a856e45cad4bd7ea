"""The first view of the page of results, in a browser: a question, and the GPUs that answer it."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from sdbench.analysis.which_gpu import PREDICTIONS, SOURCES
from sdbench.cli import main
from tests.report.results_folder import make_results
from tests.report.test_page import in_browser, opened, seen_in_frames
from tools.picture_page import PICTURE, hash_first_view, read_hash

SIZES = [(1366, 768), (1920, 1080), (390, 844)]
# Written into the head: what a console would show.
LISTEN = """<script>
const told = window.told = [];
addEventListener("error", (event) => told.push(event.message));
addEventListener("securitypolicyviolation", (event) => told.push(event.violatedDirective));
for (const name of ["error", "warn"]) console[name] = (...words) => told.push(words.join(" "));
</script>"""
# Asks one question after another, and writes down the answer and the rows that are shown.
ASK = """
  const asked = %s;
  const ask = page.getElementById("ask");
  const headings = [...page.querySelectorAll("#gpus thead th")].map((cell) => cell.textContent);
  const seen = asked.map((question) => {
    for (const name of ["gpu", "images", "budget", "days"]) ask[name].value = question[name] ?? "";
    for (const name of ["model", "px", "trained", "count"]) {
      ask[name].value = question[name] ?? "";
      ask.dispatchEvent(new view.Event("input"));  // which offers what is left to choose
    }
    const rows = [...page.querySelectorAll("#gpus tbody tr")].filter((row) => !row.hidden);
    return {
      answer: page.getElementById("answer").textContent,
      rows: rows.map((row) => Object.fromEntries([...row.cells]
        .map((cell, index) => [headings[index], cell]).filter(([, cell]) => cell.offsetParent)
        .concat([["kind", row.querySelector(".kind")]])
        .map(([name, cell]) => [name, cell.innerText.trim()]))),
      right: Math.max(...rows.flatMap((row) => [...row.cells])
        .map((cell) => cell.getBoundingClientRect().right)),
      told: view.told,
      hash: view.location.hash,
    };
  });
  return seen;
"""
A100_OR_H100 = {
    "model": "sd2-base",
    "px": "512",
    "trained": "all weights, encoders in the step",
    "count": "8",
    "gpu": "A100 or H100",
}
SDXL = {"model": "sdxl", "px": "1024", "budget": "50,000", "days": "14"}
ONE_H200 = {"count": "1", "gpu": "H200", "budget": "200", "days": "1"}


class Rows(html.parser.HTMLParser):
    """The attributes of the rows of the first table, and all links."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.links, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "tr" and "data-gpu" in found:
            self.rows.append({name.removeprefix("data-"): text for name, text in found.items()})
        if tag == "a":
            self.links.append(found["href"])
        if "id" in found:
            self.ids.add(found["id"])


@pytest.fixture(scope="module")
def committed():
    return (Path(__file__).resolve().parents[2] / "results" / "index.html").read_text("utf-8")


@pytest.fixture(scope="module")
def known(committed):
    return Rows(committed)


@pytest.fixture
def page(committed, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(committed.replace("<head>", f"<head>{LISTEN}"), encoding="utf-8")
    return path


def asked(page, tmp_path, *questions, sizes=SIZES):
    """What the page tells of these questions, by its size."""
    return seen_in_frames(page, ASK % json.dumps(questions), tmp_path, sizes=sizes)


def number(text):
    return float(text.split("\n")[0].replace(",", ""))


def about(value):
    return pytest.approx(value, rel=0.006)  # three figures are shown


@in_browser
def test_three_questions_are_answered_at_every_width_and_without_a_fault(page, known, tmp_path):
    told = asked(page, tmp_path, A100_OR_H100, SDXL, ONE_H200)
    told += asked_on_paper(page, tmp_path, A100_OR_H100, SDXL, ONE_H200)
    for (width, _), (a100_or_h100, sdxl, one_h200) in zip([*SIZES, (1032, 703)], told, strict=True):
        check_a100_or_h100(a100_or_h100)
        check_sdxl(sdxl, known)
        check_one_h200(one_h200)
        for seen in (a100_or_h100, sdxl, one_h200):
            assert seen["told"] == []
            if width == 390:
                assert seen["right"] <= width


def asked_on_paper(page, tmp_path, *questions):
    """The same in a window as wide as a sheet, with the rules for print applied to the screen."""
    text = page.read_text(encoding="utf-8").replace("@media print", "@media screen")
    paper = tmp_path / "paper.html"
    paper.write_text(text, encoding="utf-8")
    return asked(paper, tmp_path, *questions, sizes=[(1032, 703)])


def check_a100_or_h100(seen):
    answer, rows = seen["answer"], seen["rows"]
    fastest = re.search(r"Known, fastest: 8 x (\S+).*? \(published\), ([\d.]+) images/s", answer)
    assert (fastest[1], fastest[2]) == ("H100", "385")
    cheapest = re.search(r"cheapest: 8 x (\S+) \(published\), ([\d.]+) images/s", answer)
    assert (cheapest[1], cheapest[2]) == ("A100-SXM4-80GB", "204")
    assert {row["kind"] for row in rows} == {"published", "predicted"}
    assert all("A100" in row["GPU"] or "H100" in row["GPU"] for row in rows)
    rates = [number(row["images/s"]) for row in rows]
    assert rates == sorted(rates, reverse=True)
    for row in rows:
        usd = 1e6 / number(row["images/s"]) * 8 / 3600
        assert "to" in row["USD per million"] or row["kind"] == "published"
        assert 1.5 < number(row["USD per million"]) / usd < 5.2  # dollars for a GPU-hour
        assert re.search(r"\d{4}.*, (torch|not run)", row["source, date, torch, settings"])


def check_sdxl(seen, known):
    """Nobody published it, and such predictions are guesses: no interval, no verdict."""
    answer = seen["answer"]
    assert "neither measured nor published (median error 75.4 %" in answer
    for trained in ("all weights", "LoRA of rank 16"):
        rows = [row for row in known.rows if row["model"] == "sdxl" and "rate" in row]
        rows = [row for row in rows if row["trained"].startswith(trained)]
        most = max(images_for(row, usd=50_000, days=14) for row in rows)
        told = re.search(
            rf"{trained}, [^:]*, most images: [^:]*: a guess\), ([\d.,]+) million in", answer
        )
        assert number(told[1]) == about(most / 1e6)
    for row in seen["rows"]:
        assert row["kind"] == "predicted: a guess" or "does not fit its memory" in row["how sure"]
        assert not re.search(r"\d to \d", " ".join(row.values()))


def images_for(row, *, usd, days):
    if "price" not in row:
        return 0
    seconds = min(days * 86400, usd / float(row["price"]) / float(row["count"]) * 3600)
    return float(row["rate"]) * seconds


def check_one_h200(seen):
    answer = seen["answer"]
    work = "sd2-base, 512 px, all weights, latents made beforehand"
    assert f"{work}, most images: 1 x H200 (measured), 11.5 million" in answer
    assert answer.count("in 1 day and 133 USD") == len({row["work"] for row in seen["rows"]})
    assert all(row["GPU"].startswith("1 x H200 ") for row in seen["rows"])
    assert {row["work"].split(",")[0] for row in seen["rows"]} >= {"sd2-base", "sdxl", "sd3-medium"}
    for row in seen["rows"]:
        images = number(row["images, millions"])
        assert images == about(number(row["images/s"]) * 86400 / 1e6)
        assert (number(row["days"]), number(row["USD"])) == (1, about(24 * 5.55))


@in_browser
def test_a_gpu_fits_by_its_interval_and_a_guess_never_does(page, known, tmp_path):
    """10 million images, with as many days as the point of a row takes: its slow end does not."""
    work = {"model": "sd2-base", "px": "512", "count": "8"}
    work["trained"] = "all weights, latents made beforehand"
    (row,) = (
        row
        for row in known.rows
        if row["kind"] == "predicted"
        and row["gpu"] == "B200"
        and all(row[name] == value for name, value in work.items())
    )
    question = {**work, "gpu": "B200", "images": "10"}
    days = [1e7 / float(row[end]) / 86400 for end in ("low", "rate", "high")]
    limits = [1.01 * days[0], 1.01 * days[1], 0.99 * days[2]]
    questions = [{**question, "days": f"{limit:.6f}"} for limit in limits]
    money = days[1] * 24 * 8 * float(row["price"])
    questions.append({**question, "budget": f"{1.01 * money:.2f}"})
    guess = {"model": "sdxl", "px": "1024", "gpu": "B200", "count": "8", "images": "0.001"}
    questions.append({**guess, "days": "1000"})
    (seen,) = asked(page, tmp_path, *questions, sizes=SIZES[:1])

    def verdicts(one, kind):
        return {row["fits"] for row in one["rows"] if row["kind"].startswith(kind)}

    assert [verdicts(one, "predicted") for one in seen[:4]] == [{"yes"}, {"may"}, {"no"}, {"may"}]
    # A published figure has no interval, and is never more than a figure.
    assert verdicts(seen[0], "published") <= {"by its figure, no interval", "no"}
    assert verdicts(seen[4], "predicted") == {"not told: a guess"}
    assert "cheapest that has no verdict" in seen[4]["answer"]


@in_browser
def test_nonsense_has_no_answer(page, tmp_path):
    for_days = [{**ONE_H200, "days": text} for text in ("-1", "soon", "0", "1e400", "--")]
    nowhere = {**A100_OR_H100, "gpu": "abacus"}
    (seen,) = asked(page, tmp_path, *for_days, nowhere, ONE_H200, sizes=SIZES[:1])
    for one in seen[:-2]:
        assert (one["rows"], one["answer"]) == ([], "The days must be a number above 0.")
    assert seen[-2]["rows"] == [] and seen[-2]["answer"].startswith("No figure and no prediction")
    assert seen[-1]["rows"]


@in_browser
def test_the_address_has_the_question_and_a_price_is_of_all_rows_of_its_gpu(page, tmp_path):
    script = """<pre id="seen"></pre><script>{
    const prices = () => gpuRows.filter((row) => row.dataset.gpu === "H200")
      .map((row) => row.querySelector(".price").value);
    const usd = () => [...gpuTable.querySelectorAll("tbody tr:not([hidden])")]
      .map((row) => row.cells[COLUMNS.indexOf("USD per million")].firstChild.textContent);
    const seen = [textOf(document.getElementById("answer")), ask.budget.value, usd(), prices()];
    const field = gpuTable.querySelector("tbody tr:not([hidden]) .price");
    for (const text of ["11.1", "-3"]) {
      field.value = text;
      field.dispatchEvent(new Event("input", { bubbles: true }));
      field.dispatchEvent(new Event("change", { bubbles: true }));
      seen.push(usd(), prices(), location.hash);
    }
    document.getElementById("seen").textContent = JSON.stringify(seen);
    }</script>"""
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    question = "model=sd2-base&px=512&trained=&count=1&gpu=H200&budget=200&days=1&price+H200=2.775"
    seen = opened(f"{page.as_uri()}#{question}", tmp_path)
    answer, budget, usd, prices, dearer, new_prices, address, none, _, _ = seen
    assert (budget, set(prices), set(new_prices)) == ("200", {"2.775"}, {"11.1"})
    assert "66.6 USD" in answer  # 24 hours
    assert len(usd) > 3 and [number(one) for one in dearer] == [about(4 * number(o)) for o in usd]
    assert "price+H200=11.1" in address and "budget=200" in address
    assert set(none) == {"n/a"}


@pytest.mark.slow
@in_browser
def test_links_of_the_page_end_below_the_bar(page, tmp_path):
    script = """
      const bar = page.getElementById("controls");
      return [...page.querySelectorAll("nav a[href^='#']")].map((link) => {
        page.getElementById(link.getAttribute("href").slice(1)).scrollIntoView();
        const target = page.querySelector(link.getAttribute("href")).getBoundingClientRect();
        const over = bar.getBoundingClientRect();
        const isOver = link.hash !== "#controls" && over.top <= target.top;
        const hidden = isOver && view.getComputedStyle(bar).position === "sticky" ? over.bottom : 0;
        return [link.hash, target.top - hidden];
      });
    """
    for seen in seen_in_frames(page, script, tmp_path, sizes=SIZES):
        assert len(seen) > 5
        assert [hash for hash, below in seen if below < -1] == []


CONTRAST = """
  const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = (rgb) => rgb.map((part) => linear(part / 255))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = parts(view.getComputedStyle(one).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const poor = new Set();
  for (const element of page.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const isField = element.matches("input:not([type=checkbox]), select");
    if (!(own || isField) || element.closest("svg, script, [hidden]")) continue;
    const style = view.getComputedStyle(element);
    const [a, b] = [light(parts(style.color).slice(0, 3)), light(behind(element))].sort();
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const isPoor = ratio < 4.5 || style.opacity < 1;
    if (isPoor) poor.add(`${element.tagName} ${element.className} ${ratio}`);
  }
  return [...poor, page.body.childElementCount > 3];
"""


@pytest.mark.slow
@in_browser
def test_every_text_is_readable_in_both_schemes(page, tmp_path):
    seen = seen_in_frames(page, CONTRAST, tmp_path, sizes=SIZES[:1])
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("(prefers-color-scheme: dark)", "screen"), encoding="utf-8")
    seen += seen_in_frames(page, CONTRAST, tmp_path, sizes=SIZES[:1])
    assert seen == [[True], [True]]


def test_every_link_resolves_and_every_row_has_one(committed, known):
    results = Path(__file__).resolve().parents[2] / "results"
    inside = [link[1:] for link in known.links if link.startswith("#")]
    assert set(inside) <= known.ids
    local = {link for link in known.links if not link.startswith(("#", "https://"))}
    assert [link for link in local if not (results / unquote(link)).exists()] == []
    assert {"README.md", "ladder.md", "predictions.md", "runs/", "../docs/results.md"} <= local
    rows = re.findall(r'<tr data-kind="\w+" data-gpu.*?</tr>', committed, re.DOTALL)
    assert len(rows) == len(known.rows) > 300
    assert [row for row in rows if "<a href=" not in row] == []
    assert sum("/record.json" in row for row in rows if 'data-kind="measured"' in row) == sum(
        row["kind"] == "measured" for row in known.rows
    )


def test_no_prediction_is_called_measured_and_no_guess_has_an_interval(known):
    by_kind = {row["kind"] for row in known.rows}
    assert by_kind == {"measured", "quoted", "predicted"}
    assert {row["gpu"] for row in known.rows if row["kind"] == "measured"} == {"H200"}
    for row in known.rows:
        assert ("low" in row) == (row["kind"] == "measured") or row["kind"] == "predicted"
        assert not ("guess" in row and "low" in row)
    assert {row["model"] for row in known.rows if "guess" not in row} == {
        "sd2-base",
        "flux-schnell",
    }


def test_the_picture_in_the_readme_shows_the_page_as_it_is(committed):
    assert read_hash(PICTURE) == hash_first_view(committed), "make results"


def test_a_table_of_predictions_without_its_columns_is_left_out(tmp_path, capsys):
    results = make_results(tmp_path, quoted=False)
    for name, header in ((PREDICTIONS, "gpu,num_gpus"), (SOURCES, "source")):
        (results / name).write_text(f"{header}\n")
    assert main(["report", "--folder", str(results)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [name in line for name, line in zip((PREDICTIONS, SOURCES), errors, strict=True)] == [
        True,
        True,
    ]
    assert "Which GPU?" not in (results / "index.html").read_text()
