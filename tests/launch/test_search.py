"""The search for a micro-batch, through the command line, on a benchmark that knows its bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdbench.cli import main
from sdbench.launch import child
from sdbench.settings.compiling import NUM_GRAPH_STEPS
from sdbench.settings.config import parse_request
from tests.refusals import refusal_of

FAKE = str(Path(__file__).with_name("fake_benchmark.py"))


@pytest.fixture(autouse=True)
def starts(tmp_path, monkeypatch):
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    return tmp_path / "starts"


def search(tmp_path, *argv, command=("python", FAKE)):
    folder = tmp_path / "search"
    code = main(["search", "--folder", str(folder), *argv, "--", *command])
    file = folder / "search.json"
    return code, json.loads(file.read_text()) if file.exists() else None


def test_doubling_and_halving_find_the_largest_that_fits(tmp_path, starts, capsys):
    # 8 and more run out of memory; with multiples of 1, 7 is the largest, and the fastest.
    code, found = search(tmp_path, "--multiple_of", "1")
    assert code == 0
    assert (found["largest_micro_batch"], found["fastest_micro_batch"]) == (7, 7)
    assert [probe["micro_batch"] for probe in found["probes"]] == [1, 2, 4, 6, 7, 8]
    assert found["probes"][-1]["status"] == "oom" and found["is_bounded_by_memory"]
    # 10 (1 - 0.5 / 7), measured again with the settings of the command alone.
    assert found["images_per_second"] == pytest.approx(10 * (1 - 0.5 / 7))
    lines = starts.read_text().splitlines()
    assert len(lines) == 7 and lines[-1] == "--device_train_microbatch_size 7"
    assert "largest micro-batch that fits: 7\n" in capsys.readouterr().out


def test_between_powers_of_two_only_multiples_are_tried(tmp_path):
    _, found = search(tmp_path)
    assert [probe["micro_batch"] for probe in found["probes"]] == [1, 2, 4, 8]
    assert found["largest_micro_batch"] == 4


def test_a_bound_of_the_users_is_said(tmp_path, capsys):
    _, found = search(tmp_path, "--max_micro_batch", "3")
    assert found["largest_micro_batch"] == 3 and not found["is_bounded_by_memory"]
    assert "fits: 3 (the largest that was tried)" in capsys.readouterr().out


def test_the_share_of_a_rank_in_the_global_batch_is_a_bound(tmp_path):
    _, found = search(tmp_path, command=("python", FAKE, "--batch_size", "5"))
    assert found["largest_micro_batch"] == 5


def test_a_probe_that_hangs_is_no_finding(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(child.run_guarded.__kwdefaults__, "grace_s", 0.2)
    code, found = search(tmp_path, "--timeout_s", "1", command=("python", FAKE, "--seed", "2"))
    assert (code, found) == (1, None)
    assert "another reason than memory: timeout" in capsys.readouterr().err


def test_probes_are_short_whatever_the_command_asks_for(tmp_path, starts):
    flags = ("--target_precision", "1%", "--max_duration=50ba")
    search(tmp_path, "--max_micro_batch", "1", command=("python", FAKE, *flags))
    probe, winner = starts.read_text().splitlines()
    assert not any(text in probe for text in ("--target_precision", "1%", "--max_duration"))
    assert winner.startswith("--target_precision 1% --max_duration=50ba")


def test_probes_have_the_warm_up_that_a_cuda_graph_needs(tmp_path, starts):
    search(tmp_path, "--max_micro_batch", "1")
    probe = parse_request(starts.read_text().split("\n")[0].split(), description="", epilog="")
    assert probe.config.warmup_batches >= NUM_GRAPH_STEPS


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "mine").touch()
    error = refusal_of("search", "--folder", tmp_path / "search", "--", "python", FAKE)
    assert (error.flag, error.value) == ("--folder", str(tmp_path / "search"))
    assert search(tmp_path) == (2, None)


def test_a_refusal_for_memory_is_a_bound(tmp_path):
    code, found = search(tmp_path, command=("python", FAKE, "--seed", "7"))
    assert (code, found["largest_micro_batch"], found["is_bounded_by_memory"]) == (0, 4, True)


@pytest.mark.parametrize("seed", ["4", "8"], ids=["bad input", "lost rank"])
def test_another_failure_than_memory_stops_the_search(tmp_path, capsys, seed):
    code, found = search(tmp_path, command=("python", FAKE, "--seed", seed))
    assert (code, found) == (1, None)
    assert "ended for another reason than memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "command", "flag", "value"),
    [
        ([], [], "COMMAND", ""),
        (
            [],
            ["python", FAKE, "--device_train_microbatch_size", "4"],
            "COMMAND",
            "--device_train_microbatch_size",
        ),
        ([], ["python", FAKE, "--results_dir=x"], "COMMAND", "--results_dir"),
        (["--multiple_of", "0"], ["python", FAKE], "--multiple_of", "0"),
        (["--timeout_s", "-5"], ["python", FAKE], "--timeout_s", "-5"),
        ([], ["./no/such/program"], "COMMAND", "./no/such/program"),
    ],
)
def test_wrong_input_is_refused(tmp_path, argv, command, flag, value):
    error = refusal_of("search", "--folder", tmp_path / "search", *argv, "--", *command)
    assert (error.flag, error.value) == (flag, value)
