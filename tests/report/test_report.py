"""The command report: what it makes, its reproducibility, its speed and hostile names."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from sdbench.analysis.report import rebuild
from sdbench.analysis.throughput_plots import MICRO_BATCH, OTHER_MICRO_BATCHES, SCALING, SPEED_UP
from sdbench.cli import main
from tests.report.results_folder import (
    BREAKDOWN,
    DRIFTING,
    HOSTILE,
    RESULTS,
    make_gpu_record,
    make_record,
    make_results,
)

REPOSITORY = RESULTS.parent
SVG = "{http://www.w3.org/2000/svg}"


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def texts_of(results, name):
    """Every piece of text in a drawing, which has to be well-formed for that."""
    drawing = ElementTree.parse(results / "plots" / f"{name}.svg")
    return ["".join(text.itertext()).strip() for text in drawing.iter(f"{SVG}text")]


def micro_batch_run(micro_batch, rate, **changes):
    return make_gpu_record(
        config__device_train_microbatch_size=micro_batch, summary__images_per_second=rate, **changes
    )


def make_failed_record(status, reason):
    return make_record(status=status, reason=reason, summary=None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Five runs on GPUs, one that failed, and quoted figures, one with an interval."""
    runs = [micro_batch_run(4, 300.0), micro_batch_run(8, 400.0)]
    runs += [micro_batch_run(4, 600.0, ranks__world_size=16)]
    runs += [micro_batch_run(size, 500.0, config__latents="precomputed") for size in (4, 8)]
    runs += [make_failed_record("oom", "no memory")]
    results = make_results(tmp_path_factory.mktemp("made") / "mine", *runs)
    (results / "quoted" / "p5.csv").write_text(
        "source,gpu,num_gpus,image_size,latents,images_per_second,images_per_second_low,"
        "images_per_second_high,read_by\n"
        "somebody,H100,1024,512,online,9000,8000,10000,eye\n"
    )
    summary, _ = rebuild(results)
    return results, summary


def test_every_run_and_every_quoted_figure_is_a_row_with_its_kind(made):
    results, summary = made
    rows = read_csv(results / "throughput.csv")
    kinds = [row["kind"] for row in rows]
    assert kinds == ["measured"] * 6 + ["quoted"] * 114
    assert (rows[0]["status"], rows[5]["status"], rows[5]["reason"]) == ("ok", "oom", "no memory")
    assert rows[-1]["read_by"] == "eye"
    submitters = {row["submitter"] for row in rows}
    assert {"NVIDIA", "HPE", "Google Cloud"} <= submitters
    readme = (results / "README.md").read_text()
    assert "<summary>somebody: 1 figure, H100</summary>" in readme
    assert "| quoted | H100 | 1024 | 9000 (8000 to 10000) |" in readme
    assert "from 6 runs and 114 figures of others" in summary
    assert "not drawn, for want of data: time_breakdown" in summary


def test_without_data_there_is_no_plot_and_an_old_one_goes(tmp_path, capsys):
    results = make_results(tmp_path, quoted=False)
    (results / "plots").mkdir()
    for name in (f"{SCALING}.svg", f"{SCALING}-3.png", "page.png"):
        (results / "plots" / name).write_text("of an earlier time")
    assert main(["report", "--folder", str(results)]) == 0
    assert [path.name for path in (results / "plots").iterdir()] == ["page.png"]
    assert capsys.readouterr().out.splitlines()[1] == (
        "not drawn, for want of data: micro_batches, p5-model-scaling-stable-diff, "
        "p5-model-scaling-stable-diff-throughput, sd_p4de_p5, step_times, time_breakdown"
    )
    assert "No runs yet." in (results / "README.md").read_text()


def test_measured_figures_are_drawn_beside_the_seeds_and_other_work_on_axes_of_its_own(made):
    results, _ = made
    texts = texts_of(results, MICRO_BATCH)
    assert "sd2-base, 512 px, the encoders run in the step (online), 8" in texts
    assert "NVIDIA H200, EMA, fast, amp_bf16, global batch 2048, measured [1]" in texts
    assert "A100-SXM4-80GB (p4de.24xlarge), no EMA, global batch 2048, quoted [2]" in texts
    assert any(text.startswith("[1] mine/runs; [2] AWS (2024) MosaicML") for text in texts)
    for name in (SPEED_UP, SCALING):
        texts = texts_of(results, name)
        (label,) = [text for text in texts if text.startswith("NVIDIA H200")]
        assert label == "NVIDIA H200, EMA, fast, amp_bf16, micro-batch 4, global batch 2048,"
        assert texts[texts.index(label) + 1] == "measured [1]"
    assert "ideal" in texts_of(results, SPEED_UP)
    assert "speed-up over 8 GPUs" in texts_of(results, SPEED_UP)
    titles = {
        OTHER_MICRO_BATCHES: "sd2-base, 512 px, the encoders run in the step (online), 1",
        f"{OTHER_MICRO_BATCHES}-2": "sd2-base, 512 px, latents and text embeddings made beforehand",
    }
    for name, title in titles.items():
        assert title in texts_of(results, name)
    assert not (results / "plots" / f"{MICRO_BATCH}-2.svg").exists()


def test_growing_batches_are_told_from_a_constant_one(tmp_path):
    runs = [
        micro_batch_run(4, 100.0 * number, ranks__world_size=number, config__batch_size=32 * number)
        for number in (8, 16)
    ]
    results = make_results(tmp_path, *runs, quoted=False)
    rebuild(results)
    assert "32 images per GPU and step" in " ".join(texts_of(results, SCALING))


def test_runs_are_drawn_with_their_phases_warm_up_and_flags(tmp_path):
    profiled = make_record(summary__breakdown=BREAKDOWN, **DRIFTING)
    results = make_results(tmp_path, make_record(), profiled, quoted=False)
    rebuild(results)
    assert {"warm-up", "fast (drift)"} <= set(texts_of(results, "step_times"))
    texts = texts_of(results, "time_breakdown")
    # Of 4 s: VAE 0.5, U-Net forward 0.9, backward 1.6, communication 0.2, optimizer 0.3.
    labels = texts.index("share of a step, %") + 1
    assert texts[labels : labels + 5] == ["12", "22", "40", "5", "8"]
    assert {"data wait", "host to device", "EMA", "other"} <= set(texts)
    assert "fast: 4 s" in texts
    assert any(
        text.startswith("1 x Intel Xeon Processor, 2 cores, sd2-base, 256") for text in texts
    )


@pytest.mark.slow
def test_bars_and_traces_say_in_what_they_differ(tmp_path):
    changes = [
        {"config__attention": "eager", "origin__attention": "flag"},
        {"config__engine": "torch"},
        {},
        {"config__weight_decay": 0.5, "git__commit": "abcdef12" * 5},
        {"config__latents": "precomputed"},
    ]
    runs = [make_record(summary__breakdown=BREAKDOWN, **change) for change in changes]
    results = make_results(tmp_path, *runs, quoted=False)
    rebuild(results)
    bars = [
        text
        for name in ("time_breakdown", "time_breakdown-2")
        for text in texts_of(results, name)
        if text.endswith(": 4 s")
    ]
    assert sorted(bars) == [
        "engine composer, attention eager: 4 s",
        "engine composer, code 977fb62: 4 s",
        "engine composer, code abcdef1: 4 s",
        "engine torch: 4 s",
        "fast: 4 s",  # the only one on latents
    ]
    # A bar is told by its id, which no other panel has.
    ids = re.findall(r'\bid="(time_breakdown[^"]+)"', (results / "index.html").read_text())
    assert "time_breakdown-2-1" in ids and len(ids) == len(set(ids))
    names = ("step_times", "step_times-2", "step_times-3", "step_times-4")
    traces = [text for name in names for text in texts_of(results, name) if "engine" in text]
    assert len(set(traces)) == 4


@pytest.mark.slow
def test_hostile_names_and_secrets_harm_no_output(tmp_path, monkeypatch):
    secrets = {
        name: f"marker-of-{name}" for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    names = {
        "machine__device_name": HOSTILE,
        "workload__architecture": HOSTILE,
        "config__preset": HOSTILE,
        "origin__attention": "flag",
        "config__attention": HOSTILE,
        "summary__breakdown": BREAKDOWN,
    }
    runs = [micro_batch_run(size, 100.0 * size, **names) for size in (4, 8)]
    runs += [micro_batch_run(4, 600.0, ranks__world_size=16, **names)]
    runs.append(make_failed_record("failed", HOSTILE))
    results = make_results(tmp_path, *runs, quoted=False)
    (results / "quoted").mkdir()
    with (results / "quoted" / "hostile.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "gpu", "num_gpus", "image_size", "latents", "images_per_second"])
        writer.writerow([HOSTILE, f"+{HOSTILE}", 8, 512, HOSTILE, 100.5])
    rebuild(results)

    rows = read_csv(results / "throughput.csv")
    (quoted,) = [row for row in rows if row["images_per_second"] == "100.5"]
    assert (rows[0]["gpu"], rows[3]["reason"]) == (f"'{HOSTILE}", f"'{HOSTILE}")
    assert (quoted["source"], quoted["gpu"]) == (f"'{HOSTILE}", f"'+{HOSTILE}")
    assert not [
        cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@"))
    ]

    readme = (results / "README.md").read_text()
    assert "<b>" not in readme
    table = readme[readme.index("| machine |") :].split("\n\n")[0].splitlines()
    bars = {line.replace("\\|", "").count("|") for line in table if line.startswith("| ")}
    assert len(bars) == 1, "a name broke out of its cell"

    page = (results / "index.html").read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;&#34;x&#34;&lt;/b&gt;" in page
    for name in (OTHER_MICRO_BATCHES, SPEED_UP, SCALING, "time_breakdown", "step_times"):
        hostile = [text for text in texts_of(results, name) if "=cmd()|<b>" in text]
        assert hostile and all("`a` $x^2$" in text for text in hostile)

    for path in (path for path in results.rglob("*") if path.is_file()):
        assert not [value for value in secrets.values() if value.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_report_needs_no_torch(tmp_path):
    results = make_results(tmp_path, make_record(), quoted=False)
    program = (
        "import sys; from sdbench.cli import main; code = main(sys.argv[1:]); "
        "print(*sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "report", "--folder", str(results)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "sdbench.analysis.report" in modules
    assert not modules & {"torch", "pandas", "composer"}
