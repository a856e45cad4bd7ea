"""The timer of a training run: periods of steps, without what is done between them."""

from __future__ import annotations

import pytest
import torch

from sdbench.measure.period_timer import Period, PeriodTimer


def test_a_period_has_its_steps_and_waits_and_no_pause():
    now_s = [100.0]
    timer = PeriodTimer(clock=lambda: now_s[0])
    for pause_s in (0.0, 50.0):
        now_s[0] += pause_s
        timer.start()
        for loss in (3.0, 2.0):
            timer.data_wait_begins()
            now_s[0] += 0.5
            timer.data_wait_ends()
            now_s[0] += 1.5
            timer.step_ends(loss=torch.tensor(loss))
        assert timer.end_period() == Period(2, 4.0, 1.0, (3.0, 2.0))
    assert timer.train_s == pytest.approx(8.0)
    assert timer.num_steps == 4
