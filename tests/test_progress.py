"""The progress display: lines without a terminal, a bar on one."""

from __future__ import annotations

import time

import pytest

from sdbench.base import progress
from sdbench.base.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """The present time, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_lines_tell_pace_and_time_left_of_what_is_left(clock, capsys):
    with Progress(100, unit="image", num_done=20) as shown:
        for _ in range(11):
            clock[0] += 2.0
            shown.advance(4, note=lambda: "fine")
    assert capsys.readouterr().out.splitlines() == [
        "image 40/100: fine, 2 images/s, about 30 s left",
        "image 60/100: fine, 2 images/s, about 20 s left",
    ]


def test_a_slow_first_step_is_forgotten(clock, capsys):
    shown = Progress(30, unit="step")
    clock[0] = 1000.0
    shown.advance()
    assert capsys.readouterr().out == "step 1/30, 1e+03 s/step, about 483 min left\n"
    for _ in range(10):
        clock[0] += 5.0
        shown.advance()
    assert capsys.readouterr().out.splitlines()[-1] == "step 11/30, 5 s/step, about 95 s left"
    assert shown.rate == pytest.approx(0.2)


def test_what_was_left_out_is_no_part_of_the_pace_but_of_the_time_left(clock, capsys):
    shown = Progress(40, unit="step")
    for _ in range(20):
        clock[0] += 1.0
        shown.count(1)
    clock[0] += 40.0
    shown.leave_out(40.0)
    shown.show(lambda: "fine")
    # 20 steps of 1 s, and 2 s of something else for each.
    assert capsys.readouterr().out == "step 20/40: fine, 1 s/step, about 60 s left\n"
    clock[0] += 1.0
    shown.count(1)
    assert shown.rate == pytest.approx(1.0)


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    figures = "mean loss 1.0594, 3.61 images/s, learning rate 0.0001, data wait 0.0 %"
    with Progress(8, unit="image") as shown:
        shown.advance(4)
        shown.show(lambda: figures)
        shown.advance(4)
    captured = capsys.readouterr()
    assert "8/8" in captured.err and captured.out == ""
    # Whole parts of the figures, as many as half of the terminal has room for.
    assert captured.err.rstrip().endswith(", mean loss 1.0594, 3.61 images/s]")


def test_each_result_is_a_line_and_another_rank_is_silent(clock, capsys):
    with Progress(2, unit="run") as shown, Progress(2, unit="step", enabled=False) as silent:
        clock[0] = 3.0
        shown.report("ok")
        clock[0] = 60.0
        silent.advance()
    assert capsys.readouterr() == ("run 1/2: ok, 3 s/run, about 3 s left\n", "")
