"""The cause of a bad end, told to the program that started the command."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

import benchmark
from sdbench import cli
from sdbench.base.cause import VARIABLE, read_cause, report_cause
from sdbench.base.errors import ConfigError
from sdbench.ranks.distributed import is_about_connections
from tests.forked import exit_codes, forked_ranks, log_of

PLAIN = ("--model_name", "tiny", "--use_synth_data", "--num_workers", "0")


pytestmark = pytest.mark.usefixtures("plain_replay")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cause.json"))
    return tmp_path / "cause.json"


@pytest.mark.slow
def test_a_run_that_is_refused_for_memory_tells_the_class_of_the_error(file, tmp_path, monkeypatch):
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=2**28))
    sizes = ("--batch_size", "65536", "--device_train_microbatch_size", "65536")
    assert benchmark.main([*PLAIN, *sizes, "--results_dir", str(tmp_path / "runs")]) == 2
    assert read_cause(file)["error"] == "ConfigError"
    assert not (tmp_path / "runs").exists()


def test_a_command_tells_its_refusal_without_secrets(file, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    assert cli.main(["compare", "hf_0123456789.csv", "b.csv"]) == 2
    assert read_cause(file)["error"] == "ConfigError"
    assert read_cause(file)["message"] in capsys.readouterr().err
    assert "hf_0123456789" not in file.read_text()


def test_without_a_file_or_with_a_full_disk_only_the_error_is_printed(tmp_path, monkeypatch):
    assert read_cause(tmp_path / "cause.json") is None
    for path in ("/dev/full", str(tmp_path / "no" / "folder")):
        monkeypatch.setenv(VARIABLE, path)
        assert cli.main(["compare", "a.csv", "b.csv"]) == 2


def test_the_first_process_that_ends_badly_counts(file):
    report_cause("ValueError", "the cause")
    report_cause("Killed", "what followed from it")
    assert read_cause(file) == {"error": "ValueError", "message": "the cause"}


def test_an_error_that_nobody_foresaw_is_told(file, monkeypatch, tmp_path):
    monkeypatch.setattr("sdbench.measure.hardware.inspect_machine", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        benchmark.main(["--use_synth_data", "--results_dir", str(tmp_path / "runs")])
    assert read_cause(file)["error"] == "ZeroDivisionError"


def test_an_error_of_one_rank_ends_all_and_is_printed_once(tmp_path, monkeypatch):
    def refuse(machine):
        if os.environ["RANK"] == "1":
            raise ConfigError("no code", value="a GPU", allowed="another", flag="--x")

    monkeypatch.setattr("sdbench.measure.hardware.check_gpu_code", refuse)
    monkeypatch.setattr("sdbench.run.runner.let_first_rank_end", lambda ranks: None)
    argv = [*PLAIN, "--batch_size", "2", "--results_dir", str(tmp_path / "runs")]

    def program():
        os.environ[VARIABLE] = str(tmp_path / f"cause-of-{os.environ['RANK']}.json")
        return benchmark.main(argv)

    with forked_ranks(program, tmp_path) as ranks:
        assert exit_codes(ranks) == [2, 2]
    printed = [log_of(tmp_path, rank).read_text() for rank in range(2)]
    assert "error: no code: got 'a GPU'; allowed: another; change it with --x." in printed[0]
    assert "error" not in printed[1]
    assert read_cause(tmp_path / "cause-of-0.json")["error"] == "ConfigError"


@pytest.mark.parametrize(
    ("error", "is_about"),
    [
        (torch.distributed.DistNetworkError("broken pipe"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
    ],
)
def test_errors_of_connections_may_have_another_rank_as_their_cause(error, is_about):
    assert is_about_connections(error) == is_about
