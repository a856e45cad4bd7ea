"""`python -m sdbench report RUN`: the page of one run."""

from __future__ import annotations

import base64
import copy
import csv
import html
import io
import json
import re

import pytest
from PIL import Image

from sdbench.cli import main
from sdbench.record.history import HISTORY_NAME, TRAIN_STEP_COLUMNS
from sdbench.record.store import UNFINISHED_REASON, load_record
from sdbench.report.training_run import MAX_GRIDS, encode_grids, read_run
from tests.refusals import refusal_of
from tests.report.results_folder import BREAKDOWN, RESULTS, make_record, write_run
from tests.report.test_training_times import PUBLISHED

NUM_STEPS = 4000


def rows_of(page, name):
    """Texts of the cells of a table's rows; empty ones are left out."""
    table = page.partition(f'<table id="{name}">')[2].partition("</table>")[0]
    body = table.partition("<tbody>")[2]
    rows = re.findall(r"<tr.*?</tr>", body, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>([^<]+)", row)] for row in rows]


def make_steps(num_steps):
    """Losses that fall from 1 and swing by 0.2 around their mean, at 8 images/s."""
    return [(n, 1 / n**0.5 + 0.2 * (-1) ** n, 1e-4, 8.0, 0.5) for n in range(1, num_steps + 1)]


def event(name, step, **facts):
    return {"time_utc": "2026-11-22T10:00:00+00:00", "event": name, "step": step, **facts}


def validation(step, by_timestep, **facts):
    return event(
        "validation", step, seconds=3.0, by_timestep=by_timestep, timesteps=[100, 300], **facts
    )


def save(step, error=None):
    return event("save", step, seconds=2.0, stall_s=0.5, num_bytes=2**30, error=error)


def make_run(folder, *, steps=(), events=(), status="failed", reason=UNFINISHED_REASON):
    """The folder of a run with global batch 4 of 5,000 steps."""
    folder.mkdir()
    record = copy.deepcopy(PUBLISHED)
    record |= {"status": status, "reason": reason, "duration_s": None, "summary": None}
    record["config"] |= {"max_duration": "5000ba", "save_every_batches": 1000, "batch_size": 4}
    record["workload"]["num_steps"] = 5000
    (folder / "record.json").write_text(json.dumps(record))
    with (folder / "steps.csv").open("w", newline="") as file:
        csv.writer(file).writerows([TRAIN_STEP_COLUMNS, *steps])
    (folder / HISTORY_NAME).write_text("".join(f"{json.dumps(one)}\n" for one in events))
    return folder


@pytest.fixture
def run(tmp_path):
    """A run that has been killed once, whose newest event and step are cut off."""
    events = [
        event("begin", 0, num_lost_steps=0, lost_s=0.0, down_s=0.0, passed_over=[]),
        validation(1000, [0.9, 0.1], loss=0.5, ema_loss=0.6),
        event("samples", 1000, seconds=4.0, file="samples/step_00001000.png", num_pictures=1),
        save(1000),
        save(2000, error="No space <left>"),
        event(
            "begin",
            1000,
            num_lost_steps=1020,
            lost_s=510.0,
            down_s=300.0,
            passed_over=["A byte is another one (<file>)"],
        ),
        validation(2000, [0.7, 0.1], loss=0.4, ema_loss=0.3),
        event("scores", 2000, seconds=5.0, num_pictures=64, clip_score=21.5, clip_score_error=0.5),
        event("scores", 3000, seconds=6.0, num_pictures=64, clip_score=22.5, clip_score_error=0.25),
        validation(3000, [0.8, 0.1], loss=0.45, ema_loss=0.2),
    ]
    folder = make_run(tmp_path / "first", steps=make_steps(NUM_STEPS), events=events)
    for name, cut_off in ((HISTORY_NAME, '{"time_utc": "2026-'), ("steps.csv", "4001,0.5")):
        with (folder / name).open("a") as file:
            file.write(cut_off)
    (folder / "samples").mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / "samples" / "step_00001000.png")
    return folder


def test_the_page_tells_where_the_run_is(run):
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert re.search(r"State at 20[0-9-]{8}T[0-9:]{8} UTC", page)
    state = dict(rows_of(page, "state"))
    assert (
        state
        | {
            "state": "running, or killed",
            "steps": "4,000 of 5,000",
            "learning rate": "0.0001",
            "images/s": "8",
            "data wait": "0.5 %",
            "trained": "0:41:50",  # 4,000 and 1,020 steps of half a second
            "left to train": "0:08:20",
            "validation loss, newest": "0.4500 at step 3,000",
            "validation loss, lowest": "0.4000 at step 2,000",
            "validating": "0:00:09",
            "drawing pictures": "0:00:04",
            "scoring pictures": "0:00:11",
            "waiting for checkpoints": "0:00:01",
            "restarts": "1",
            "lost by them": "1,020 steps, 0:08:30 of training; stood still for 0:05:00",
        }
        == state
    )
    # The swing of the losses is gone: their mean falls as 1 / sqrt(n).
    assert float(state["training loss, smoothed"]) == pytest.approx(NUM_STEPS**-0.5, abs=0.002)
    assert rows_of(page, "validation") == [
        ["3000", "0.45", "0.2", "0.8", "0.1"],
        ["2000", "0.4", "0.3", "0.7", "0.1"],
        ["1000", "0.5", "0.6", "0.9", "0.1"],
    ]
    assert all(f"t = {timestep}<" in page for timestep in (100, 300))
    assert rows_of(page, "scores") == [
        ["3000", "64", "22.5", "0.25"],
        ["2000", "64", "21.5", "0.5"],
    ]
    assert [row[1:] for row in rows_of(page, "events")] == [
        [
            "1000",
            "restart",
            "1,020 steps, 0:08:30 of training; stood still for 0:05:00; "
            "passed over: A byte is another one (<file>)",
        ],
        ["2000", "checkpoint", "not saved: No space <left>"],
        ["1000", "checkpoint", "1 GiB in 2 s; training waited 0.5 s"],
        ["0", "start"],
    ]
    # It is one file, with curves and pictures.
    links = re.findall(r"""\b(?:src|href|action|srcset)=["']?([^"'\s>]+)""", page)
    pictures = [link for link in links if not link.startswith("#")]
    assert [link.partition(";")[0] for link in pictures] == ["data:image/png"]
    (grid,) = (base64.b64decode(link.partition(",")[2]) for link in pictures)
    chart = page[page.index("<svg") : page.index("</svg>")]
    labels = ("training, smoothed", "validation, averaged weights", "restart", "checkpoint")
    assert all(f">{label}<" in chart for label in labels)
    assert len(chart) < 500_000  # however many steps there are
    assert grid == (run / "samples" / "step_00001000.png").read_bytes()


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    run = make_run(tmp_path / "new")
    assert main(["report", str(run)]) == 0
    state = rows_of((run / "report.html").read_text(), "state")
    assert [row for row in state if row[0] not in ("command", "work")] == [
        ["state", "running, or killed"],
        ["steps", "0 of 5,000"],
        ["restarts", "0"],
    ]


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("small-128px-fast-dreambooth", ["steps", "400"]),
        ("feed-mds-512px", ["samples", "images"]),
    ],
)
def test_the_page_of_a_published_run_has_the_figures_of_its_record(tmp_path, name, figure):
    folder, out = min(RESULTS.glob(f"runs/*_{name}")), tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    state = rows_of(out.read_text(), "state")
    assert state[0] == ["state", "ok"] and figure in state
    assert not (folder / "report.html").exists()


def test_the_page_of_a_benchmark_has_its_charts_or_why_there_is_none(tmp_path, capsys):
    record = make_record(summary__breakdown=BREAKDOWN, summary__peak_memory_gib=12.34)
    run = write_run(tmp_path / "run", record)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert ["peak memory", "12.3 GiB per rank"] in rows_of(page, "state")
    charts = re.findall("<figcaption>([^:,]*)", page)
    assert charts == ["Where the time of a step goes", "Step times"]
    (run / "steps.csv").write_text("index,phase\n")
    assert main(["report", str(run)]) == 1
    assert "left out: " in capsys.readouterr().err
    failed = make_record(status="oom", reason="no memory", summary=None)
    run = write_run(tmp_path / "failed", failed)
    assert main(["report", str(run)]) == 0
    state = rows_of((run / "report.html").read_text(), "state")
    assert state[0] == ["state", "oom: no memory"]


def test_a_run_that_has_made_all_of_its_steps_has_none_left_to_train(tmp_path):
    steps = [(n, 1.0, 1e-4, 0.5, 0.5) for n in range(1, 5001)]  # of 8 seconds each
    folder = make_run(tmp_path / "run", steps=steps)
    assert main(["report", str(folder)]) == 0
    state = dict(rows_of((folder / "report.html").read_text(), "state"))
    assert (state["steps"], state["left to train"]) == ("5,000 of 5,000", "0:00:00")


def test_an_infinite_loss_is_not_part_of_the_mean(tmp_path):
    losses = ("inf", "1e308", 0.5)
    run = make_run(tmp_path / "run", steps=[(n, loss, 0, 8, 0) for n, loss in enumerate(losses, 1)])
    assert main(["report", str(run)]) == 0
    state = rows_of((run / "report.html").read_text(), "state")
    assert ["training loss, smoothed", "0.5000"] in state


@pytest.mark.slow
def test_the_page_of_a_long_run_has_few_grids_of_small_size_and_the_newest_rows(tmp_path):
    names = {step: f"samples/step_{step:08d}.png" for step in range(10, 210, 10)}
    events = [event("samples", step, seconds=1.0, file=file) for step, file in names.items()]
    events += [validation(step, [0.9, 0.1], loss=0.5) for step in names]
    run = make_run(tmp_path / "long", events=events)
    (run / "samples").mkdir()
    for file in names.values():
        Image.new("RGB", (8, 8)).save(run / file)
    Image.effect_noise((3000, 2000), 100).save(run / names[200])
    grids = encode_grids(read_run(run, load_record(run)))
    steps = [step for step, _ in grids]
    assert len(steps) == MAX_GRIDS and steps == sorted(steps, reverse=True)
    assert (steps[0], steps[-1]) == (200, 10)
    kind, _, content = grids[0][1].partition(",")
    assert kind == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(content))).size == (1400, 933)
    # And of each table the newest rows.
    assert main(["report", str(run)]) == 0
    rows = rows_of((run / "report.html").read_text(), "validation")
    assert [row[0] for row in rows] == [f"{step}" for step in range(200, 80, -10)]


def test_steps_that_no_training_writes_are_refused(tmp_path):
    run = make_run(tmp_path / "run", steps=make_steps(1))
    header = ",".join(TRAIN_STEP_COLUMNS)
    for content in ("index,phase\n0,warmup\n", f"{header}\n1,1,1,8,-1\n", f"{header}\n1,1,1,0,1\n"):
        (run / "steps.csv").write_text(content)
        assert refusal_of("report", run).value == str(run / "steps.csv")
    assert refusal_of("report", tmp_path / "nowhere").value == str(tmp_path / "nowhere")
