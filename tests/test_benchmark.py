"""benchmark.py through its front door, on a miniature: figures, records, faults, exit codes."""

from __future__ import annotations

import csv
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmark
from sdbench.measure.timer import StepTimer
from sdbench.measure.watch import StepWatch
from sdbench.models.diffusion import DiffusionModel
from sdbench.record.row import make_row
from sdbench.training import pretrain
from tests.refusals import printed_refusal, refusal_of
from tests.report.results_folder import make_results
from tests.runs import only_record, run_and_load
from tests.schemas import validate
from tests.train.written import read_losses, read_steps

TINY = ("--model_name", "nano", "--use_synth_data", "--num_workers", "0", "--no_measure_peak")
# As many steps as the tests count: no profile, and no second window for one that has not settled.
EXACT = ("--profile_batches", "0", "--max_warmup_batches", "2")
SHORT = ("--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "0")
QUICK = (*TINY, *SHORT, "--engine", "torch")

pytestmark = pytest.mark.usefixtures("plain_replay")


def run(tmp_path, *argv):
    return run_and_load(benchmark.main, tmp_path / "runs", *argv)


def losses(tmp_path, record):
    return [float(loss) for loss in read_losses(tmp_path / "runs" / record["run_id"])]


def test_a_run_leaves_all_that_is_needed_to_repeat_it(tmp_path, capsys):
    argv = (*TINY, "--device_train_microbatch_size", "2", "--batch_size", "4")
    argv += ("--measure_batches", "10")
    record, exit_code = run(tmp_path, *argv, "--warmup_batches", "2", *EXACT)
    output = capsys.readouterr().out
    assert exit_code == 0
    validate(record)
    assert (record["status"], record["reason"]) == ("ok", None)
    assert record["config"]["batch_size"] == 4
    assert record["origin"]["batch_size"] == "flag"
    assert record["chosen"]["image_size"] == "default of nano"
    assert record["workload"]["num_images"] == 12 * 4
    assert record["command"][:3] == ["benchmark.py", "--model_name", "nano"]
    assert record["versions"]["torch"] and record["machine"]["num_cpu_cores"] >= 1

    summary = record["summary"]
    assert summary["num_measured_steps"] == 10
    assert summary["images_per_second"] == pytest.approx(40 / summary["window_s"])
    interval = summary["images_per_second_interval"]
    # A step that the machine slowed down is no block of its own.
    num_blocks = 10 - summary["num_outliers"]
    assert interval["kind"] == "within-run" and num_blocks <= interval["num_samples"] <= 10
    assert interval["low"] < summary["images_per_second"]
    of_others = ("mfu_percent", "gpu_utilization_percent", "breakdown", "bottleneck")
    assert [summary[name] for name in of_others] == [None] * 4
    said = "none seen; pauses rarer than 1 step in 3 may have been missed"
    if summary["num_outliers"]:
        said = f"{summary['num_outliers']} of the measured steps, kept"
    assert re.search(rf"^  outliers +{said}$", output, re.MULTILINE)

    folder = tmp_path / "runs" / record["run_id"]
    steps = read_steps(folder)
    assert [step["phase"] for step in steps] == ["warmup"] * 2 + ["measured"] * 10
    measured_s = sum(float(step["step_time_s"]) for step in steps[2:])
    assert measured_s == pytest.approx(summary["window_s"], rel=1e-3)
    assert (folder / "stdout.log").read_text() == output

    assert "Model has" in output and "images/s" in output and str(folder) in output
    assert "No GPU here. Chosen for this machine" in output
    assert "step 12/12" in output and "s left" in output
    assert re.search(
        r"^  how sure +(within|with no upper bound) .*: repeat it$", output, re.MULTILINE
    )
    assert "\n\nNext:\n  python -m sdbench repeat 5 -- python " in output
    with (tmp_path / "runs" / "runs.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["images_per_second"]) == summary["images_per_second"]
    assert (row["status"], row["kind"], row["micro_batch"]) == ("ok", "measured", "2")


@pytest.mark.slow
def test_the_result_for_a_program_is_all_that_is_on_stdout(tmp_path, capfd, monkeypatch):
    argv = (*QUICK, "--batch_size", "2", "--json")
    record, exit_code = run(tmp_path, *argv)
    captured = capfd.readouterr()
    row = json.loads(captured.out)
    folder = str(tmp_path / "runs" / record["run_id"])
    assert row == {**make_row(record), "record": folder} and exit_code == 0
    assert row["images_per_second"] == record["summary"]["images_per_second"]
    assert row["gpu"] is None and row["ema"] is False
    assert "images/s" in captured.err and captured.err in Path(folder, "stdout.log").read_text()

    monkeypatch.setattr(pretrain, "_loss", fail)
    record, exit_code = run(tmp_path, *argv)
    captured = capfd.readouterr()
    row = json.loads(captured.out)
    assert (exit_code, row["status"], row["reason"]) == (1, "failed", record["reason"])
    assert row["images_per_second"] is None and "failed: " in captured.err

    assert benchmark.main([*argv, "--batch_size", "0"]) == 2
    assert capfd.readouterr().out == ""
    assert benchmark.main([*argv, "--print_config"]) == 2


@pytest.mark.slow
def test_two_ranks_print_one_result(tmp_path, repository):
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    argv = [*QUICK, "--num_threads", "1", "--results_dir", str(tmp_path), "--json"]
    done = subprocess.run([*ranks, "benchmark.py", *argv], cwd=repository, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["num_devices"] == 2


def fail(*_, **__):
    raise RuntimeError("as asked")


def test_a_window_grows_until_it_is_precise_or_at_its_bound(tmp_path):
    argv = (*TINY, "--engine", "torch", "--batch_size", "1")
    argv += ("--warmup_batches", "0", "--max_warmup_batches", "0")
    window = ("--measure_batches", "10", "--profile_batches", "0")
    # 20 independent steps are worth half of the precision that nothing reaches.
    bounded = ("--target_precision", "0.001%", "--max_measure_batches", "25")
    record, _ = run(tmp_path, *argv, *window, *bounded)
    summary = record["summary"]
    assert (summary["num_warmup_steps"], summary["num_measured_steps"]) == (0, 25)
    assert "precision_not_reached" in summary["flags"]
    assert record["workload"]["num_images"] == record["workload"]["num_steps"] == 25
    assert record["config"]["target_precision"] == pytest.approx(1e-5)


@pytest.mark.slow
def test_another_seed_gives_other_losses(tmp_path):
    # That the same seed gives the same losses is seen in tests/test_switches.py.
    one, other = (losses(tmp_path, run(tmp_path, *QUICK, "--seed", seed)[0]) for seed in "12")
    assert len({*one, *other}) == 6


def test_tasks_of_srun_are_refused_unless_each_knows_its_rank(capsys, monkeypatch):
    argv = ["--model_name", "nano", "--use_synth_data", "--print_config"]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert benchmark.main(argv) == 2
    assert printed_refusal(capsys.readouterr().err).value == "2 tasks without RANK"
    monkeypatch.setenv("RANK", "0")  # as a launcher sets it, or a user for runs of their own
    assert benchmark.main(argv) == 0
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert benchmark.main(argv) == 0


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_is_an_invalid_run(tmp_path, capsys):
    record, exit_code = run(tmp_path, *TINY, "--lr", "1e30", "--measure_batches", "10")
    assert exit_code == 1
    validate(record)
    assert record["status"] == "invalid"
    assert "rank 0: the loss is nan at step" in record["reason"]
    assert record["summary"] is None
    assert capsys.readouterr().err.startswith(f"invalid: {record['reason']}\n")
    results = make_results(tmp_path / "results", quoted=False)
    refusal = refusal_of("publish", tmp_path / "runs" / record["run_id"], "--folder", results)
    assert (refusal.flag, refusal.value) == ("RUN", "invalid")


def test_out_of_memory_is_told_as_such(tmp_path, monkeypatch):
    def loss(output):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(pretrain, "_loss", loss)
    record, exit_code = run(tmp_path, *QUICK)
    assert (record["status"], exit_code) == ("oom", 1)
    assert "CUDA out of memory" in record["reason"]


@pytest.mark.slow
def test_wandb_gets_each_loss_under_its_step(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    logged, summary, statuses = {}, {}, []

    def finish():
        statuses.append(only_record(tmp_path / "runs")["status"])

    fake = SimpleNamespace(
        log=lambda values, step: logged.update({step: values["loss/train/total"]}),
        summary=summary,
        finish=finish,
    )
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    record, _ = run(tmp_path, *QUICK, "--wandb_name", "n")
    assert statuses == ["ok"]  # it may wait for its server: the record is written by then
    assert list(logged.items()) == list(enumerate(losses(tmp_path, record)))
    assert summary["loss_last"] == logged[2]


@pytest.mark.parametrize("engine", ["composer", "torch"])
def test_a_run_that_ends_badly_keeps_the_steps_before(tmp_path, monkeypatch, engine):
    wandb = pytest.importorskip("wandb")
    calls, logged = itertools.count(1), {}

    def log(values, step):
        status = only_record(tmp_path / "runs")["status"]
        logged[step] = (values["loss/train/total"], status)

    def loss(output):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return DiffusionModel.loss(*output)

    monkeypatch.setattr(wandb, "init", lambda **_: SimpleNamespace(log=log))
    monkeypatch.setattr(pretrain, "_loss", loss)
    record, exit_code = run(tmp_path, *TINY, *SHORT, "--wandb_name", "n", "--engine", engine)
    assert (record["status"], exit_code) == ("interrupted", 130)
    kept = losses(tmp_path, record)
    assert len(kept) == 2
    assert [logged[step][0] for step in range(2)] == kept
    assert logged[1][1] == "interrupted"  # reading a loss may hang: the record is written by then


def test_steps_that_cannot_be_read_leave_the_end_as_it_is(tmp_path, monkeypatch, capsys):
    def interrupt(watch, *, loss):
        raise KeyboardInterrupt

    monkeypatch.setattr(StepWatch, "step_ends", interrupt)
    monkeypatch.setattr(StepTimer, "steps", lambda timer: 1 / 0)
    record, exit_code = run(tmp_path, *TINY, *SHORT, "--engine", "torch")
    assert (record["status"], exit_code) == ("interrupted", 130)
    assert "warning: the steps could not be written" in capsys.readouterr().err


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_wandb_that_is_missing_or_raises_costs_a_warning(
    tmp_path, monkeypatch, capsys, is_missing
):
    wandb = pytest.importorskip("wandb")
    if is_missing:
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        monkeypatch.setattr(wandb, "init", lambda **_: 1 / 0)
    record, exit_code = run(tmp_path, *QUICK, "--wandb_name", "n")
    assert (record["status"], exit_code) == ("ok", 0)
    told = "import of wandb" if is_missing else "division by zero"
    assert f"Weights & Biases is off for this run: {told}" in capsys.readouterr().err


@pytest.mark.slow
def test_bad_samples_are_counted_and_told(tmp_path, picture_folder, capsys):
    (picture_folder / "3.png").write_bytes(b"no picture")
    argv = ("--model_name", "nano", "--remote", str(picture_folder), "--on_bad_sample", "skip")
    argv += ("--batch_size", "2", "--engine", "torch", "--no_measure_peak")
    argv += ("--warmup_batches", "1", "--measure_batches", "4", "--profile_batches", "0")
    record, code = run(tmp_path, *argv, "--max_bad_fraction", "0.1")
    assert code == 0
    assert record["config"]["data_format"] == "folder"
    assert record["workload"]["num_images"] == 10
    assert record["workload"]["num_bad_samples"] == 1
    output = capsys.readouterr()
    assert re.search(r"bad samples +1, replaced by others", output.out)
    assert "Skipped a bad sample: " in output.err and "3.png: the image cannot" in output.err
