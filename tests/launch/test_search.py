"""The search for a micro-batch, through the command line, on a benchmark that knows its bounds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sdbench.cli import main
from sdbench.launch import search as search_module
from sdbench.settings.computing import NUM_GRAPH_STEPS
from sdbench.settings.config import parse_request
from tests.refusals import refusal_of

FAKE = str(Path(__file__).with_name("fake_benchmark.py"))
SIZE = "--device_train_microbatch_size"
pytestmark = pytest.mark.usefixtures("starts")


def search(tmp_path, *flags):
    """The exit code, and the micro-batch of each short run with its status."""
    folder = tmp_path / "search"
    code = main(["search", "--folder", str(folder), "--", "python", FAKE, *flags])
    probes = {}
    for path in folder.glob("probe-*"):
        (record,) = [*path.glob("*/record.json")] or [None]
        status = None if record is None else json.loads(record.read_text())["status"]
        probes[int(path.name.removeprefix("probe-"))] = status
    return code, probes


def test_doubling_and_halving_find_the_largest_that_fits(tmp_path, starts, capsys, monkeypatch):
    # 8 and more run out of memory; with multiples of 1, 7 is the largest, and the fastest.
    monkeypatch.setattr(search_module, "MULTIPLE", 1)
    code, probes = search(tmp_path)
    assert code == 0
    assert probes == {**dict.fromkeys((1, 2, 4, 6, 7), "ok"), 8: "oom"}
    lines = starts.read_text().splitlines()
    assert len(lines) == 7 and lines[-1] == f"{SIZE} 7"
    output = capsys.readouterr().out
    assert "largest micro-batch that fits: 7\n" in output
    # 10 (1 - 0.5 / 7), measured again with the settings of the command alone.
    assert re.search(r"^fastest: 7, ok, 9\.2[89].* images/s", output, flags=re.MULTILINE)
    error = refusal_of("search", "--folder", tmp_path / "search", "--", "python", FAKE)
    assert (error.flag, error.value) == ("--folder", str(tmp_path / "search"))


@pytest.mark.parametrize(
    ("most", "flags", "probed", "largest"),
    [
        (256, (), [1, 2, 4, 8], 4),  # between powers of two only multiples of 4
        (3, (), [1, 2, 3], 3),
        (256, ("--batch_size", "5"), [1, 2, 4, 5], 5),  # the share of a rank in the global batch
        (256, ("--seed", "7"), [1, 2, 4, 8], 4),  # an estimate refuses 8
    ],
)
def test_memory_or_a_limit_bounds_the_search(
    tmp_path, capsys, monkeypatch, most, flags, probed, largest
):
    monkeypatch.setattr(search_module, "MAX_MICRO_BATCH", most)
    code, probes = search(tmp_path, *flags)
    assert (code, sorted(probes)) == (0, probed)
    bound = "" if 8 in probed else " (the largest that was tried)"
    assert f"fits: {largest}{bound}\n" in capsys.readouterr().out


def test_another_failure_than_memory_stops_the_search(tmp_path, capsys):
    assert search(tmp_path, "--seed", "8") == (1, {1: "failed"})
    assert "ended for another reason than memory: failed" in capsys.readouterr().err


def test_probes_are_short_whatever_the_command_asks_for(tmp_path, starts, monkeypatch):
    monkeypatch.setattr(search_module, "MAX_MICRO_BATCH", 1)
    search(tmp_path, "--target_precision", "1%", "--max_duration=50ba")
    probe, winner = starts.read_text().splitlines()
    assert not any(text in probe for text in ("--target_precision", "1%", "--max_duration"))
    # The warm-up that a CUDA graph needs.
    config = parse_request(probe.split(), description="", epilog="").config
    assert config.warmup_batches >= NUM_GRAPH_STEPS
    assert winner.startswith("--target_precision 1% --max_duration=50ba")


@pytest.mark.parametrize("flag", [SIZE, "--results_dir"])
def test_what_the_search_says_itself_is_refused(tmp_path, flag):
    command = ("python", FAKE, f"{flag}=4")
    error = refusal_of("search", "--folder", tmp_path / "search", "--", *command)
    assert (error.flag, error.value) == ("COMMAND", flag)
