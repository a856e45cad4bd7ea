"""The page that answers which GPU, in a browser: what a person chooses, and what they are told."""

from __future__ import annotations

import json
import re

import pytest

from tests.report.test_page import in_browser, opened, seen_in_frames

# Chooses, and writes down the answer and the rows.
ASK = """<pre id="seen"></pre><script>
const asked = %s, told = [];
for (const question of asked) {
  for (const [name, value] of Object.entries(question)) form[name].value = value;
  form.dispatchEvent(new Event("input"));
  const rows = [...document.querySelectorAll("#rows tr")].map((row) => [
    ...[...row.cells].map((cell) => cell.firstChild.textContent), row.className]);
  told.push([document.getElementById("answer").textContent, rows]);
}
document.getElementById("seen").textContent = JSON.stringify(told);
</script>"""


@pytest.fixture
def page(repository, tmp_path):
    path = tmp_path / "which_gpu.html"
    path.write_bytes((repository / "results" / "which_gpu.html").read_bytes())
    return path


@pytest.fixture
def data(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def rows_of(data, num_gpus, *work):
    names = ("model", "image_size", "latents", "lora_rank")
    rows = [row for row in data if row["num_gpus"] == num_gpus]
    return [row for row in rows if tuple(row[name] for name in names) == work]


@in_browser
def test_three_questions_are_answered(page, data, tmp_path):
    questions = [
        # Who trains Stable Diffusion 2 on 10 million latents of 512 px for the least money?
        {"work": "sd2-base|512|precomputed|0", "num_gpus": 8, "images": 10},
        # And within a day?
        {"deadline": 0.06, "order": "days"},
        # Which GPU is fastest with LoRA on SDXL, where nobody published anything?
        {"work": "sdxl|1024|precomputed|16", "num_gpus": 1, "deadline": ""},
    ]
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"{ASK % json.dumps(questions)}</body>"))
    (cheapest, rows), (fastest, within), (new, _) = opened(page.as_uri(), tmp_path)
    known = rows_of(data, 8, "sd2-base", 512, "precomputed", None)
    priced = [row for row in known if row["usd_per_million"]]
    best = min(priced, key=lambda row: row["usd_per_million"])
    assert cheapest.startswith(f"Cheapest: 8 x {best['gpu']} ({best['kind']})")
    assert {row[1] for row in rows} == {"published", "predicted"}
    assert len(rows) == len(known)
    best = max(known, key=lambda row: row["images_per_second"] or 0)
    assert fastest.startswith(f"Fastest: 8 x {best['gpu']} ({best['kind']})")
    # 10 million images in 0.06 days are 1,929 images/s.
    slow = [row for row in known if (row["images_per_second"] or 0) < 1e7 / 0.06 / 86400]
    assert 0 < sum(row[-1] == "no" for row in within) == len(slow) < len(known)
    assert new.endswith("take them for ranges.")


@in_browser
def test_it_fits_a_phone_and_a_desk(page, tmp_path):
    script = """
      const root = page.documentElement;
      const right = [...page.querySelectorAll("#rows td")].map(
        (cell) => cell.getBoundingClientRect().right);
      return [root.scrollWidth <= root.clientWidth, Math.max(...right) <= root.clientWidth,
        page.querySelectorAll("#rows tr").length > 5];
    """
    for seen in seen_in_frames(page, script, tmp_path, sizes=[(1280, 720), (390, 844)]):
        assert seen == [True, True, True]


def test_no_prediction_is_called_measured(data):
    predicted = [row for row in data if row["kind"] == "predicted"]
    others = [row for row in data if row["kind"] != "predicted"]
    assert {row["kind"] for row in others} == {"measured", "published"}
    assert all("images_per_second_low" in row for row in predicted)
    assert not any("images_per_second_low" in row for row in others)
    assert {row["gpu"] for row in others if row["kind"] == "measured"} == {"NVIDIA H200"}
