"""Where the figures of train.py are shown: on the terminal, in Weights & Biases, in TensorBoard."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets import write_folder
from tests.score_networks import write_fid_network
from tests.train.written import read_events, read_steps, trained

SHORT = ("--model_name", "nano", "--use_synth_data", "--engine", "torch", "--batch_size", "2")
SHORT += ("--log_every_batches", "2", "--lr", "0.001")
SAMPLES = ("--sample_every_batches", "2", "--sample_steps", "1", "--sample_prompts", "prompts.txt")

SCORES = ("--score_every_batches", "2", "--num_score_images", "2", "--fid_network", "fid.pt")
SCORES += ("--validation_remote", "held-out")


def run(num_steps: int, *argv: str) -> list[dict[str, float]]:
    """Train, or go on with the run, to a step; the rows of steps.csv."""
    run = trained("one", num_steps, *SHORT, "--resume", "auto", *argv)
    return [{name: float(text) for name, text in row.items()} for row in read_steps(run)]


@pytest.mark.slow
def test_each_period_is_a_line(capsys):
    rows = run(5, "--save_every_batches", "3", "--lr_warmup_batches", "10")
    pattern = (
        r"step (\d)/5: mean loss ([\d.]+), ([\d.]+) images/s, learning rate ([\d.e-]+), "
        r"data wait ([\d.]+) %(?:, next checkpoint at step (\d))?, .*, about \d+ s left"
    )
    lines = re.findall(pattern, capsys.readouterr().out)
    # The save at step 3 ends a period, too.
    assert [step + save for step, *_, save in lines] == ["23", "35", "45", "5"]
    periods = ([0, 1], [2], [3], [4])
    for (_, loss, rate, learning_rate, wait, _), indices in zip(lines, periods, strict=True):
        period = [rows[index] for index in indices]
        assert loss == f"{np.mean([row['loss'] for row in period]):.4f}"
        assert float(learning_rate) == pytest.approx(period[-1]["learning_rate"], rel=1e-2)
        assert float(rate) == pytest.approx(period[0]["images_per_second"], rel=1e-2)
        assert float(wait) == pytest.approx(period[0]["data_wait_percent"], abs=0.1)


@pytest.mark.slow
def test_tensorboard_hides_the_steps_that_are_trained_again():
    from tensorboard.compat.proto.event_pb2 import SessionLog

    Path("prompts.txt").write_text("a red circle")
    write_folder(Path("held-out"))
    write_fid_network(Path("fid.pt"))
    run(2, "--tensorboard", *SAMPLES, *SCORES)
    rows = run(3, "--tensorboard")
    files = sorted(Path("runs/one/tensorboard").iterdir())
    events = [event for file in files for event in read_tensorboard(file)]
    values = [(event.step, value) for event in events for value in event.summary.value]
    losses = {step: value.simple_value for step, value in values if value.tag == "loss/train/total"}
    assert losses == {row["step"]: pytest.approx(row["loss"]) for row in rows}
    assert [step for step, value in values if value.tag == "samples"] == [2]
    (scores,) = read_events(Path("runs/one"), "scores")
    shown = [(step, value.simple_value) for step, value in values if value.tag == "scores/fid"]
    assert shown == [(2, pytest.approx(scores["fid"]))]
    # What is behind the start of a session in an older file is not shown.
    starts = [event.step for event in events if event.session_log.status == SessionLog.START]
    assert starts == [3]


def read_tensorboard(file: Path):
    """The events of a file: each has its length and a checksum before, and a checksum behind it."""
    from tensorboard.compat.proto.event_pb2 import Event

    content, events = file.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return events
