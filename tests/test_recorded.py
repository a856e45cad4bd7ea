"""A record as the settings file of benchmark.py, train.py and data.py."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmark
import data as feed
from sdbench.base.errors import ConfigError
from sdbench.cli import main
from sdbench.measure.hardware import Machine
from sdbench.plan.resolve import resolve
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import BENCHMARK, FEED, TRAIN, kind_of, load_record
from sdbench.run.recorded import parse_recorded
from sdbench.settings.request import Request
from tests.data.datasets import write_folder
from tests.refusals import printed_refusal, refusal_of
from tests.runs import finished_run, follow_rate
from tests.train.written import read_losses

RUNS = Path(__file__).resolve().parents[1] / "results" / "runs"
SMALL = ("--model_name", "tiny", "--engine", "torch", "--no_measure_peak", "--num_threads", "1")
SHORT = ("--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "0")
SHORT_FEED = ("--image_size", "64", "--batch_size", "2", "--num_workers", "0", "--num_batches", "3")

# What a record may not know.
LACKING = re.compile("started|a hash|the versions of|its commit\\b$|this version's", re.MULTILINE)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def run_of_folder(tmp_path_factory):
    """The folder of a run of one rank on four pictures, and that of the pictures."""
    folder = tmp_path_factory.mktemp("recorded")
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


def read(record: Path, *argv: str, kind: str = BENCHMARK) -> Request:
    """What a program asks for that is given a record of its kind and flags."""
    return parse_recorded(kind, ["--config", str(record), *argv], description="", epilog="")


def notes_of(record: Path, *argv: str) -> tuple[list[str], str]:
    """The words of the command that started the run of a record, and the other notes."""
    told, _, start = "\n".join(read(record, *argv).translation.notes).partition(
        "The run of the record was started so: "
    )
    return shlex.split(start), told


@pytest.mark.slow
def test_a_run_is_repeated_from_its_record_alone(run_of_folder, tmp_path, capsys, monkeypatch):
    run, _ = run_of_folder
    before = load_record(run)
    for name, value in before["environment"].items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "again"
    argv = ["--config", str(run / "record.json"), "--results_dir", str(folder)]
    assert benchmark.main(argv) == 0
    assert not LACKING.search(capsys.readouterr().out)
    (path,) = folder.glob("*/record.json")
    after = load_record(path)
    config = {**before["config"], "results_dir": str(folder)}
    assert after["config"] == config
    same = ("data", "versions", "other_versions", "environment", "ranks", "git")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert read_losses(path.parent) == read_losses(run) and len(read_losses(run)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("plain_replay")
def test_a_published_record_is_planned_with_its_settings():
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
        request = read(path, "--no_check_memory")
        told = "\n".join(request.translation.notes)
        num_lacking += "The record does not say:\n" in told
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
def test_what_a_record_does_not_know_is_said(run_of_folder, tmp_path):
    run, _ = run_of_folder
    two = {"world_size": 2, "ranks_per_node": 2}
    changes = {"git": {"commit": None, "dirty": True}, "environment": {"OMP_NUM_THREADS": "1"}}
    record = changed(run, tmp_path, ranks=two, **changes)
    content = json.loads(record.read_text())
    content["ranks"]["launcher"] = content["config"]["dist_timeout"] = None
    content["other_versions"] = content["data"] = None
    record.write_text(json.dumps(content))
    words, told = notes_of(record)
    assert words == ["composer", "-n", "2", "benchmark.py", "--config", str(record)]
    assert told.split("Here it is not")[0].splitlines() == [
        "The record does not say:",
        "  settings, which have this version's values: dist_timeout",
        "  what started its ranks",
        "  a hash of its data set",
        "  the versions of its other packages",
        "  its commit",
        "  the uncommitted changes that it ran with",
    ]


def test_what_is_not_as_in_the_record_is_said(run_of_folder, tmp_path):
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
        environment={"OMP_NUM_THREADS": "3", "LD_PRELOAD": "evil.so"},
        command=["evil.py"],
        ranks={"launcher": "torchrun"},
    )
    name = "two  blanks, 'quoted'"  # the printed command can be copied
    words, told = notes_of(record, "--remote", str(more), "--wandb_name", name)
    assert words[:4] == ["torchrun", "--nproc_per_node", "1", "benchmark.py"]
    assert words[-4:] == ["--remote", str(more), "--wandb_name", name]
    # A stranger's record chooses no program, and its variables are not set.
    assert "  LD_PRELOAD evil.so -> None\n  OMP_NUM_THREADS 3 -> None\n" in told
    assert "LD_PRELOAD" not in os.environ and "evil.py" not in told
    assert f"  commit {'0' * 40} -> " in told
    assert "  no-such-package 1.0 -> None\n" in told
    assert f"  torch 0.4.1 -> {torch}\n" in told
    assert "  data set 8 files, " in told and " -> 10 files, " in told
    # A copy is the same one, and with another size it is not.
    copy = shutil.copytree(pictures, tmp_path / "copy")
    assert "data set" not in notes_of(run, "--remote", str(copy))[1]
    (copy / "000.png").write_bytes((copy / "000.png").read_bytes() + b"x")
    assert "  data set 8 files, " in notes_of(run, "--remote", str(copy))[1]


NO_PLACE = "a record does not say where --"
TARS = {"data_format": "webdataset"}
ON_RAY = {"engine": "ray", "ray_address": "there:6379"}
EIGHT = {"world_size": 8, "ranks_per_node": 8}


@pytest.mark.parametrize(
    ("changes", "what", "value", "flag"),
    [
        *(
            ({"config": {"remote": place, **TARS}}, NO_PLACE, place, "--remote")
            for place in ("<remote>", "pipe:cat", "{p,p}ipe:touch evil", "\\pipe:touch evil")
        ),
        ({"config": {"remote": "nowhere"}}, "the data set ", "nowhere", "--remote or --local"),
        ({"config": ON_RAY}, NO_PLACE, "there:6379", "--ray_address"),
        ({"machine": {"device_type": "cuda"}, "ranks": EIGHT}, "the run had", "0 GPUs", "--config"),
    ],
)
def test_what_is_missing_is_named(run_of_folder, tmp_path, changes, what, value, flag):
    with pytest.raises(ConfigError) as refusal:
        read(changed(run_of_folder[0], tmp_path, **changes))
    error = refusal.value
    assert error.what.startswith(what)
    assert (error.value, error.flag) == (value, flag)


def test_weights_that_are_not_here_are_named(run_of_folder, tmp_path, capsys):
    record = changed(run_of_folder[0], tmp_path, config={"model_name": "./none"})
    assert benchmark.main(["--config", str(record), "--print_config"]) == 2
    error = printed_refusal(capsys.readouterr().err)
    assert (error.value, error.flag) == ("./none", "--model_name")


def test_a_record_of_another_program_is_refused_with_its_name(run_of_folder, capsys):
    record = str(run_of_folder[0])
    assert feed.main(["--config", record]) == 2
    error = printed_refusal(capsys.readouterr().err)
    assert (error.value, error.allowed) == ("benchmark", f"benchmark.py --config {record}")
    assert refusal_of("repeat", 2, "--", "sdbench", "data", "--config", record).value == "benchmark"
    (precomputed,) = RUNS.glob("*_precompute-mds-512px/record.json")
    assert benchmark.main(["--config", str(precomputed)]) == 2
    error = printed_refusal(capsys.readouterr().err)
    assert (error.value, error.allowed) == ("precompute", "a record of benchmark.py")


def test_flags_replace_settings_of_a_record_and_nothing_in_it_is_a_reference(
    run_of_folder, tmp_path
):
    run, _ = run_of_folder
    texts = {"wandb_name": "\\${oc.env:HOME}", "wandb_project": "${seed}"}
    request = read(changed(run, tmp_path, config=texts), "seed=5", "--batch_size", "4")
    config = {**load_record(run)["config"], **texts, "seed": 5, "batch_size": 4}
    assert vars(request.config) == {**config, "results_dir": "runs"}
    assert (request.origin["seed"], request.origin["use_ema"]) == ("flag", "file")
    with pytest.raises(ConfigError, match="replaced as a whole.*--filters"):
        read(run, "filters.a='>=5'")


def test_ranks_on_several_nodes_are_told(run_of_folder, tmp_path, monkeypatch):
    four = {"world_size": 4, "num_nodes": 2, "ranks_per_node": 2, "launcher": None}
    record = changed(run_of_folder[0], tmp_path, ranks=four)
    told = "The run of the record had 4 ranks on 2 nodes: see multi-node/README.md"
    assert told in read(record).translation.notes
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert told not in read(record).translation.notes


def test_a_run_on_gpus_wants_as_many_and_one_on_a_cpu_tells_of_them(
    run_of_folder, tmp_path, monkeypatch
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
    assert "  GPU None -> NVIDIA H100\n" in notes_of(run)[1]
    a100 = {"device_type": "cuda", "device_name": "NVIDIA A100"}
    two = {"world_size": 2, "ranks_per_node": 2, "launcher": "composer"}
    chosen = {"environment": {"CUDA_VISIBLE_DEVICES": "6,7"}}
    words, told = notes_of(changed(run, tmp_path, machine=a100, ranks=two, **chosen))
    assert words[:4] == ["composer", "-n", "2", "benchmark.py"]
    assert "  CUDA_VISIBLE_DEVICES 6,7 -> None\n" in told
    assert "  GPU NVIDIA A100 -> NVIDIA H100\n" in told
    three = {**two, "world_size": 3, "ranks_per_node": 3}
    with pytest.raises(ConfigError, match="got '2 GPUs'"):
        read(changed(run, tmp_path, machine=a100, ranks=three))


def test_a_feed_is_repeated(run_of_folder, tmp_path):
    _, pictures = run_of_folder
    argv = [*SHORT_FEED, "--remote", str(pictures), "--seed", "5"]
    run = finished_run(feed.main, *argv, results=tmp_path / "runs")
    request = read(run, kind=FEED)
    assert vars(request.config) == {**load_record(run)["config"], "results_dir": "runs"}
    assert not LACKING.search("\n".join(request.translation.notes))
    trainers = {"engine": "ray", "num_ray_workers": 2}
    config = read(changed(run, tmp_path, config=trainers), kind=FEED).config
    assert config.num_ray_workers == 2


def test_how_the_data_set_was_made_is_in_the_record_and_in_the_refusal(run_of_folder, tmp_path):
    _, pictures = run_of_folder
    made = tmp_path / "made"
    assert main(["convert", str(pictures), "--folder", str(made)]) == 0
    run = finished_run(feed.main, *SHORT_FEED, "--remote", str(made), results=tmp_path / "runs")
    (made_by,) = load_record(run)["data"]["made_by"]
    # Of a path the name alone: the record may be published.
    expected = {"command": "convert", "source": "pictures", "from": "folder"}
    assert made_by.items() > expected.items()
    shutil.rmtree(made)
    with pytest.raises(ConfigError) as refusal:
        read(run, kind=FEED)
    told = refusal.value.allowed.partition("; it was made by convert: ")[2]
    assert {"from folder", "num_samples 4", "source pictures"} < {*told.split(", ")}


def test_a_training_that_went_on_begins_anew_and_leaves_its_copies_alone(tmp_path):
    run = RUNS / "20261123T004139Z_2-core-amd-epyc_small-128px-fast-dreambooth"
    kept = {"resume": "auto", "max_failures": 3, "ray_storage_path": "<ray_storage_path>"}
    config = {"engine": "ray", "num_ray_workers": 2, "run_name": "on-ray", **kept}
    taken = read(changed(run, tmp_path, config=config), kind=TRAIN).config
    assert (taken.resume, taken.max_failures, taken.ray_storage_path) == ("never", 0, None)
    assert (taken.run_name, taken.num_ray_workers) == ("on-ray", 2)
