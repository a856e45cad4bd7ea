"""A run repeated from its record, through the command line."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmark
import data as feed
from sdbench.cli import main
from sdbench.measure.hardware import Machine
from sdbench.plan.resolve import resolve
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import BENCHMARK, kind_of, load_record
from sdbench.settings.config import parse_request
from sdbench.settings.feed import FeedSettings
from sdbench.settings.request import parse
from tests.data.datasets import write_folder
from tests.refusals import refusal_of
from tests.runs import finished_run, follow_rate
from tests.train.written import read_losses

RUNS = Path(__file__).resolve().parents[2] / "results" / "runs"
SMALL = ("--model_name", "tiny", "--engine", "torch", "--no_measure_peak", "--num_threads", "1")
SHORT = ("--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "0")
FEED = ("--image_size", "64", "--batch_size", "2", "--num_workers", "0", "--num_batches", "3")

# What a record may not know.
LACKING = re.compile("started|a hash|the versions of|its commit\\b$|this version's", re.MULTILINE)


@pytest.fixture(autouse=True)
def in_the_checkout(repository, monkeypatch):
    monkeypatch.chdir(repository)
    for name in ("OMP_NUM_THREADS", "MALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def run_of_folder(tmp_path_factory):
    """The folder of a run of one rank on four pictures, and that of the pictures."""
    folder = tmp_path_factory.mktemp("rerun")
    pictures = folder / "pictures"
    write_folder(pictures, num_samples=4)
    argv = [*SMALL, *SHORT, "--remote", str(pictures), "--num_workers", "0", "--use_ema"]
    argv += ["--batch_size", "2", "--max_warmup_batches", "1", "--no_shuffle"]
    return finished_run(benchmark.main, *argv, results=folder / "runs"), pictures


def changed(run, tmp_path, **changes):
    """A copy of a record with values of its groups replaced, e.g. ``ranks={"world_size": 2}``."""
    record = json.loads((run / "record.json").read_text())
    for name, value in changes.items():
        record[name] = {**record[name], **value} if isinstance(value, dict) else value
    path = tmp_path / "record.json"
    path.write_text(json.dumps(follow_rate(record)))
    return path


def planned(capsys, *argv):
    """The words of the printed command, and the sentences before it."""
    capsys.readouterr()
    assert main(["rerun", *map(str, argv[:1]), "--dry_run", *argv[1:]]) == 0
    printed = capsys.readouterr()
    (line,) = printed.out.splitlines()
    return shlex.split(line), printed.err


@pytest.mark.slow
def test_a_run_is_repeated_from_its_record_alone(run_of_folder, tmp_path, capfd):
    run, _ = run_of_folder
    folder = tmp_path / "again"
    assert main(["rerun", str(run / "record.json"), "--folder", str(folder)]) == 0
    printed = capfd.readouterr()
    assert not LACKING.search(printed.err)
    before = load_record(run)
    (path,) = folder.glob("*/record.json")
    after = load_record(path)
    config = {**before["config"], "results_dir": str(folder)}
    assert after["config"] == config
    same = ("data", "versions", "other_versions", "environment", "ranks", "git")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert read_losses(path.parent) == read_losses(run) and len(read_losses(run)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("plain_replay")
def test_a_published_command_is_planned_with_the_settings_of_its_record(capsys):
    """On the machine of the record, as no other chooses the same; a sample of all."""
    facts = {field.name for field in dataclasses.fields(Machine)}
    records = {path: load_record(path) for path in sorted(RUNS.glob("*/record.json"))[::54]}
    of_benchmark = {
        path: record
        for path, record in records.items()
        if kind_of(record) == BENCHMARK and not record["config"]["remote"]
    }
    assert len(of_benchmark) >= 3
    num_lacking = 0
    for path, record in of_benchmark.items():
        words, told = planned(capsys, path)
        num_lacking += "The record does not say:\n" in told
        start = words.index("benchmark.py") + 1
        request = parse_request([*words[start:], "--no_check_memory"], description="", epilog="")
        machine = Machine(**{fact: record["machine"][fact] for fact in facts})
        num_ranks = record["ranks"]["world_size"]
        ranks = Ranks(rank=0, world_size=num_ranks, local_rank=0, local_world_size=num_ranks)
        config = vars(resolve(request, machine=machine, ranks=ranks).config)
        another = {"results_dir", "check_memory"}
        names = record["config"].keys() - another
        if "  settings, which have this version's values" in told:  # null may mean: not known
            names = {name for name in names if record["config"][name] is not None}
        for name in names:
            assert config[name] == record["config"][name], (path.parent.name, name)
    assert num_lacking >= 2  # the first ones


@pytest.mark.slow
def test_a_record_is_repeated_and_what_it_does_not_know_is_said(run_of_folder, tmp_path, capsys):
    run, _ = run_of_folder
    two = {"world_size": 2, "ranks_per_node": 2}
    changes = {"git": {"commit": None, "dirty": True}, "environment": {"OMP_NUM_THREADS": "1"}}
    record = changed(run, tmp_path, ranks=two, **changes)
    content = json.loads(record.read_text())
    content["ranks"]["launcher"] = content["config"]["dist_timeout"] = None
    content["other_versions"] = content["data"] = None
    record.write_text(json.dumps(content))
    words, told = planned(capsys, record)
    start = words.index("composer")
    assert words[start : start + 4] == ["composer", "-n", "2", "benchmark.py"]
    assert told.split("Here it is not")[0].splitlines() == [
        "The record does not say:",
        "  what started its ranks (2): composer is taken",
        "  settings, which have this version's values: dist_timeout",
        "  a hash of its data set",
        "  the versions of its other packages",
        "  its commit",
        "  the uncommitted changes that it ran with",
    ]


def test_what_is_not_as_in_the_record_is_said_before_the_run(run_of_folder, tmp_path, capsys):
    run, pictures = run_of_folder
    more = shutil.copytree(pictures, tmp_path / "more")
    shutil.copy(more / "000.png", more / "004.png")
    shutil.copy(more / "000.txt", more / "004.txt")
    torch = load_record(run)["versions"]["torch"]
    record = changed(
        run,
        tmp_path,
        git={"commit": "0" * 40},
        versions={"torch": "0.4.1"},
        other_versions={"no-such-package": "1.0"},
        environment={"OMP_NUM_THREADS": "3", "PATH": "/tmp", "BASH_ENV": "evil"},
        command=["evil.py"],
    )
    name = "two  blanks, 'quoted'"  # the printed command can be copied
    words, told = planned(capsys, record, "--", "--remote", str(more), "--wandb_name", name)
    start = words.index("python")
    # A stranger's record chooses no program, and only variables of speed.
    assert words[0] == "env" and "OMP_NUM_THREADS=3" in words[1:start]
    assert not [word for word in words[1:start] if word.startswith(("PATH=", "BASH_ENV="))]
    assert words[start : start + 2] == ["python", "benchmark.py"]
    assert words[-6:-2] == ["--remote", str(more), "--wandb_name", name]
    assert "  PATH=/tmp is not set: it does not change speed\n" in told
    assert f"  commit {'0' * 40} -> " in told
    assert "  no-such-package 1.0 -> None\n" in told
    assert f"  torch 0.4.1 -> {torch}\n" in told
    assert "  data set 8 files, " in told and " -> 10 files, " in told
    # A copy is the same one, and with another size it is not.
    copy = shutil.copytree(pictures, tmp_path / "copy")
    assert "data set" not in planned(capsys, run, "--", "--remote", str(copy))[1]
    (copy / "000.png").write_bytes((copy / "000.png").read_bytes() + b"x")
    assert "  data set 8 files, " in planned(capsys, run, "--", "--remote", str(copy))[1]


NO_PLACE = "a record does not say where --"
TARS = {"data_format": "webdataset"}
ON_RAY = {"engine": "ray", "ray_address": "there:6379"}
EIGHT = {"world_size": 8, "ranks_per_node": 8}
FOUR = {"world_size": 4, "num_nodes": 2, "ranks_per_node": 2}


@pytest.mark.parametrize(
    ("changes", "what", "value", "flag"),
    [
        *(
            ({"config": {"remote": place, **TARS}}, NO_PLACE, place, "--remote")
            for place in ("<remote>", "pipe:cat", "{p,p}ipe:touch evil", "\\pipe:touch evil")
        ),
        ({"config": {"remote": "nowhere"}}, "the data set ", "nowhere", "--remote or --local"),
        ({"config": {"model_name": "./none"}}, "the weights ", "./none", "--model_name"),
        ({"config": ON_RAY}, NO_PLACE, "there:6379", "--ray_address"),
        ({"machine": {"device_type": "cuda"}, "ranks": EIGHT}, "the run had", "0 GPUs", "RECORD"),
        ({"ranks": FOUR}, "the run had 4 ranks on several nodes", "2 nodes", "RECORD"),
    ],
)
def test_what_is_missing_is_named(run_of_folder, tmp_path, changes, what, value, flag):
    run, _ = run_of_folder
    error = refusal_of("rerun", changed(run, tmp_path, **changes), "--dry_run")
    assert error.what.startswith(what)
    assert (error.value, error.flag) == (value, flag)


def test_a_run_on_gpus_wants_as_many_and_one_on_a_cpu_hides_them(
    run_of_folder, tmp_path, monkeypatch, capsys
):
    """NVML is a stand-in: two GPUs."""
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100",
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=OSError, **answers))
    run, _ = run_of_folder
    words, _ = planned(capsys, run)
    assert words[0] == "env" and "CUDA_VISIBLE_DEVICES=" in words
    a100 = {"device_type": "cuda", "device_name": "NVIDIA A100"}
    two = {"world_size": 2, "ranks_per_node": 2, "launcher": "composer"}
    chosen = {"environment": {"CUDA_VISIBLE_DEVICES": "6,7"}}
    words, told = planned(capsys, changed(run, tmp_path, machine=a100, ranks=two, **chosen))
    assert not any(word.startswith("CUDA_VISIBLE_DEVICES") for word in words)
    assert "  CUDA_VISIBLE_DEVICES=6,7 is not set: it is the other machine's\n" in told
    assert "  GPU NVIDIA A100 -> NVIDIA H100\n" in told
    three = {**two, "world_size": 3, "ranks_per_node": 3}
    error = refusal_of("rerun", changed(run, tmp_path, machine=a100, ranks=three), "--dry_run")
    assert (error.value, error.flag) == ("2 GPUs", "RECORD")


def test_a_feed_is_repeated(run_of_folder, tmp_path, capsys):
    _, pictures = run_of_folder
    argv = [*FEED, "--remote", str(pictures), "--seed", "5"]
    run = finished_run(feed.main, *argv, results=tmp_path / "runs")
    words, told = planned(capsys, run)
    settings = words[words.index("data.py") + 1 :]
    config = vars(parse(FeedSettings, settings, description="", epilog="").config)
    assert config == {**load_record(run)["config"], "results_dir": config["results_dir"]}
    assert not LACKING.search(told)
    trainers = {"engine": "ray", "num_ray_workers": 2}
    words, _ = planned(capsys, changed(run, tmp_path, config=trainers))
    assert "--num_ray_workers=2" in words


def test_how_the_data_set_was_made_is_in_the_record_and_in_the_refusal(run_of_folder, tmp_path):
    _, pictures = run_of_folder
    made = tmp_path / "made"
    assert main(["convert", str(pictures), "--folder", str(made)]) == 0
    run = finished_run(feed.main, *FEED, "--remote", str(made), results=tmp_path / "runs")
    (made_by,) = load_record(run)["data"]["made_by"]
    # Of a path the name alone: the record may be published.
    expected = {"command": "convert", "source": "pictures", "from": "folder"}
    assert made_by.items() > expected.items()
    shutil.rmtree(made)
    error = refusal_of("rerun", run, "--dry_run")
    told = error.allowed.partition("; it was made by convert: ")[2]
    assert {"from folder", "num_samples 4", "source pictures"} < {*told.split(", ")}


def test_a_library_of_a_record_is_not_loaded(run_of_folder, tmp_path, capsys, monkeypatch):
    taken = {"MALLOC_CONF": "narenas:1", "NCCL_ALGO": "^Tree", "TORCH_NCCL_AVOID": "1"}
    left_out = {
        **{"LD_PRELOAD": "evil.so", "NCCL_NET_PLUGIN": "evil", "OMP_TOOL_LIBRARIES": "evil.so"},
        **{"NCCL_ALGO": "Tree/x", "TORCH_LOGS": "+evil", "MALLOC_CONF": "a b"},
    }
    for variables, is_taken in ((taken, True), (left_out, False)):
        record = changed(run_of_folder[0], tmp_path, environment=variables)
        words, told = planned(capsys, record)
        for name, value in variables.items():
            assert (f"{name}={value}" in words) == is_taken
            assert (f"  {name}={value} is not set: it is the other machine's\n" in told) != is_taken
    monkeypatch.setenv("OMP_TOOL_LIBRARIES", "./mine.so")
    record = changed(run_of_folder[0], tmp_path, environment={"OMP_TOOL_LIBRARIES": "./mine.so"})
    words, told = planned(capsys, record)
    assert "OMP_TOOL_LIBRARIES=./mine.so" in words and "OMP_TOOL_LIBRARIES" not in told


def test_a_training_that_went_on_begins_anew_and_leaves_its_copies_alone(tmp_path, capsys):
    run = RUNS / "20261123T004139Z_2-core-amd-epyc_small-128px-fast-dreambooth"
    kept = {"resume": "auto", "max_failures": 3, "ray_storage_path": "<ray_storage_path>"}
    config = {"engine": "ray", "num_ray_workers": 2, "run_name": "on-ray", **kept}
    words, _ = planned(capsys, changed(run, tmp_path, config=config))
    assert not [word for word in words for name in kept if word.startswith(f"--{name}")]
    assert {"--run_name=on-ray", "--num_ray_workers=2"} < {*words}


def test_flags_and_folders_that_a_rerun_does_not_take(run_of_folder, tmp_path, monkeypatch):
    assert refusal_of("rerun", run_of_folder[0], "--", "--results_dir", "x").flag == "--folder"
    assert refusal_of("rerun", run_of_folder[0], "--", "--batchsize", "3").flag == "--batch_size"
    monkeypatch.chdir(tmp_path)
    assert refusal_of("rerun", run_of_folder[0]).flag == "cd"
