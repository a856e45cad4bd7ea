"""The timer of steps on a fake clock, against exact answers."""

from __future__ import annotations

import pytest
import torch

from sdbench.base.errors import RunError
from sdbench.measure.summary import Measurements, merge_measurements, summarize
from sdbench.measure.timer import (
    CLOSE,
    NUM_AT_FIRST,
    WARM_UP,
    Losses,
    Period,
    PeriodTimer,
    StepTimer,
    WindowPolicy,
    merge_ranks,
)


class FakeClock:
    """A clock that moves when told."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds


class FakeDevice:
    """A device that lags behind the host: work takes device time, a synchronisation host time."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.busy_until_s = clock()
        self.num_synchronizations = 0

    def run(self, seconds: float) -> None:
        self.busy_until_s = max(self.busy_until_s, self.clock()) + seconds

    def synchronize(self) -> None:
        self.num_synchronizations += 1
        self.clock.now_s = max(self.clock.now_s, self.busy_until_s)

    def mark(self) -> float:
        return max(self.busy_until_s, self.clock())

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


def run_steps(step_times_s, *, data_waits_s=(), clock=None, **options):
    """Time steps of known lengths on a host clock, each beginning with its data waits."""
    clock = clock or FakeClock()
    timer = StepTimer(clock=clock, **options)
    timer.start()
    for index, step_time_s in enumerate(step_times_s):
        for data_wait_s in data_waits_s:
            timer.data_wait_begins()
            clock.pass_time(data_wait_s)
            timer.data_wait_ends()
        clock.pass_time(step_time_s - sum(data_waits_s))
        timer.step_ends(loss=torch.tensor(float(index)))
    return timer.timings()


def test_the_window_on_a_cpu_is_the_sum_of_its_steps_however_long_a_reading_takes():
    class SlowerAndSlower(FakeClock):
        pause_s = 0.0

        def __call__(self) -> float:
            self.pause_s += 0.25
            self.now_s += self.pause_s
            return self.now_s

    clock = SlowerAndSlower()
    timings = run_steps([1.0] * 5, clock=clock, num_warmup_steps=2, num_measured_steps=3)
    measured = [step.step_time_s for step in timings.steps if step.phase == "measured"]
    assert len(measured) == 3 and timings.window_s == sum(measured)


def summarize_ranks(timings, *, images_per_step):
    """Summarise as benchmark.py does."""
    measurements = [
        Measurements(timings=rank, num_images=1, peak_memory_gib=2.0) for rank in timings
    ]
    return summarize(
        merge_measurements(measurements),
        config={"batch_size": images_per_step},
        num_devices=len(timings),
        flops_per_image=2e12,
        peak_tflops=100.0,
    )


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_twenty_images_per_second_are_twenty(num_ranks):
    # A step takes as long as 20 images/s allow: 8 ranks x 8 images in 3.2 s.
    images_per_step = num_ranks * 8
    step_time_s = images_per_step / 20
    rank = run_steps([50.0, *[step_time_s] * 10], num_warmup_steps=1, num_measured_steps=10)
    summary = summarize_ranks([rank] * num_ranks, images_per_step=images_per_step)
    assert summary["images_per_second"] == pytest.approx(20.0, rel=1e-12)
    assert summary["images_per_second_per_device"] == pytest.approx(20.0 / num_ranks, rel=1e-12)
    assert summary["step_time_p50_s"] == pytest.approx(step_time_s, rel=1e-12)
    # 20 images/s x 2 TFLOP = 40 TFLOP/s over the devices, each with a peak of 100.
    assert summary["mfu_percent"] == pytest.approx(40 / num_ranks, rel=1e-12)


def test_the_rate_is_images_over_time_of_the_window():
    with pytest.raises(RunError, match="after 2 of 4 steps"):
        run_steps([1.0, 1.0], num_warmup_steps=1, num_measured_steps=3)
    timings = run_steps([9.0, 1.0, 3.0, 7.0], num_warmup_steps=1, num_measured_steps=2)
    assert timings.window_s == pytest.approx(4.0)
    assert [step.phase for step in timings.steps] == ["warmup", "measured", "measured", "after"]
    assert [step.step_time_s for step in timings.steps] == pytest.approx([9.0, 1.0, 3.0, 7.0])
    assert [step.loss for step in timings.steps] == [0.0, 1.0, 2.0, 3.0]
    # Steps of 1 s and 3 s with 6 images each: 12 images in 4 s are 3/s; the mean of the rates is 4.
    assert summarize_ranks([timings], images_per_step=6)["images_per_second"] == pytest.approx(3.0)


@pytest.mark.parametrize("num_waits", [1, 2])  # two at the end of an epoch
def test_data_wait_is_measured_apart(num_waits):
    options = {"num_warmup_steps": 2, "num_measured_steps": 2, "data_waits_s": [0.25] * num_waits}
    timings = run_steps([2.0] * 4, **options)
    assert [step.data_wait_s for step in timings.steps] == pytest.approx([0.25 * num_waits] * 4)
    summary = summarize_ranks([timings], images_per_step=1)
    assert summary["data_wait_percent"] == pytest.approx(12.5 * num_waits)


def test_the_slowest_rank_makes_the_step():
    quick = run_steps([1.0, 1.0, 5.0], num_warmup_steps=1, num_measured_steps=2)
    slow = run_steps([1.0, 3.0, 1.0], num_warmup_steps=1, num_measured_steps=2)
    merged = merge_ranks([quick, slow])
    assert merged.window_s == pytest.approx(6.0)
    # The window's steps end at 1 and 6 s, and at 3 and 4 s: the run's at 3 and at 6 s.
    assert [step.step_time_s for step in merged.steps] == pytest.approx([1.0, 3.0, 3.0])


def test_a_device_that_lags_is_synchronised_at_the_edges_only():
    # The host hands over 2 s of work per step in 0.1 s. Without a synchronisation at the edges it
    # would call 3 steps 0.3 s; with one in every step the count would be 5.
    clock = FakeClock()
    device = FakeDevice(clock)
    timer = StepTimer(num_warmup_steps=1, num_measured_steps=3, clock=clock, device=device)
    timer.start()
    for _ in range(4):
        clock.pass_time(0.1)
        device.run(2.0)
        timer.step_ends(loss=torch.tensor(0.0))
    assert device.num_synchronizations == 2
    timings = timer.timings()
    # The first measured step waits 0.1 s for the host to hand over its work.
    assert timings.window_s == pytest.approx(6.1)
    assert [step.step_time_s for step in timings.measured] == pytest.approx([2.1, 2.0, 2.0])


@pytest.mark.parametrize(
    ("decision", "windows", "phases", "window_s"),
    [
        (
            WARM_UP,
            [([5.0, 3.0], 1), ([2.0, 2.0], 3)],
            ["warmup"] * 3 + ["measured"] * 2 + ["profiled"],
            4.0,
        ),
        (
            4,
            [([5.0, 3.0], 1), ([5.0, 3.0, 2.0, 2.0], 1)],
            ["warmup"] + ["measured"] * 4 + ["profiled"],
            12.0,
        ),
    ],
)
def test_the_policy_decides_on_a_full_window_and_costs_no_step(decision, windows, phases, window_s):
    clock, decisions, seen = FakeClock(), iter([decision, CLOSE]), []

    def policy(step_times_s, num_warmup_steps):
        seen.append((list(step_times_s), num_warmup_steps))
        clock.pass_time(1000.0)
        return next(decisions)

    step_times_s = [9.0, 5.0, 3.0, 2.0, 2.0, 4.0]
    lengths = {"num_warmup_steps": 1, "num_measured_steps": 2, "num_profiled_steps": 1}
    timings = run_steps(step_times_s, policy=policy, clock=clock, **lengths)
    assert seen == windows
    assert [step.phase for step in timings.steps] == phases
    assert [step.step_time_s for step in timings.steps] == step_times_s
    assert timings.window_s == window_s


def make_policy(*, other_ranks=(), **options):
    values = {"max_warmup_steps": 10, "max_measured_steps": 10, "target_precision": None}
    return WindowPolicy(**{**values, **options}, gather=lambda value: [value, *other_ranks])


DRIFTING = [2.0 - 0.05 * index for index in range(20)]


def test_the_policy_asks_for_more_warm_up_until_the_bound():
    assert make_policy(max_warmup_steps=23)(DRIFTING, 3) == WARM_UP
    assert make_policy(max_warmup_steps=22)(DRIFTING, 3) == CLOSE
    assert make_policy(max_warmup_steps=23)([1.0, 1.01] * 10, 3) == CLOSE
    # The slowest rank of each step counts.
    assert make_policy(max_warmup_steps=23, other_ranks=[DRIFTING])([1.0] * 20, 3) == WARM_UP
    assert make_policy(max_warmup_steps=23, other_ranks=[[3.0] * 20])(DRIFTING, 3) == CLOSE


def test_the_policy_doubles_the_window_until_it_is_precise_or_at_its_bound():
    policy = make_policy(target_precision=0.05, max_measured_steps=100)
    # Steps of 0.8 and 1.2 s in turn: whole pairs are all alike, and 5 % take 3 / 0.05 = 60 steps.
    assert policy([0.8, 1.2] * 10, 1) == 40
    assert policy([0.8, 1.2] * 20, 1) == 80
    assert policy([0.8, 1.2] * 40, 1) == CLOSE
    # Eighty even steps of 0.1 s have not lasted 30 s.
    assert policy([0.1] * 80, 1) == 100
    assert policy([0.1] * 100, 1) == CLOSE


def test_losses_are_what_was_added_whatever_becomes_of_the_tensors():
    losses, one = Losses(), torch.zeros(1)
    for index in range(2 * NUM_AT_FIRST + 1):
        one.fill_(index / 3)
        losses.add(one)
        if index == 5:
            assert losses.at(2) == float(torch.tensor(2 / 3))
    assert len(losses) == 2 * NUM_AT_FIRST + 1
    assert losses.read() == (torch.arange(2 * NUM_AT_FIRST + 1) / 3).tolist()
    assert losses.first_not_finite is None


def test_the_first_loss_that_is_not_finite_is_found_when_it_is_read():
    losses = Losses()
    for loss in (1.0, 2.0):
        losses.add(torch.tensor(loss))
    losses.read()
    for loss in (3.0, float("inf"), float("nan")):
        losses.add(torch.tensor(loss))
    assert losses.first_not_finite is None
    assert losses.at(4) != losses.at(4)
    losses.add(torch.tensor(float("nan")))
    losses.read()
    assert losses.first_not_finite == 3
    losses.forgive()
    assert losses.first_not_finite is None
    losses.add(torch.tensor(float("inf")))
    losses.read()
    assert losses.first_not_finite == 6


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
