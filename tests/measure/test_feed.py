"""The rate of a loader and the wait for it, on a fake clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sdbench.measure.feed import measure_feed, summarize_feed

PHASES = ("read", "decode", "transform", "tokenize", "collate")


class FakeLoader:
    """Epochs of three batches of 4; each takes 0.1 s, after a number of slow ones 1 s."""

    def __init__(self, *, num_slow=0):
        self.now_s = 0.0
        self.stats = SimpleNamespace(num_dropped_samples=3, reset=self.reset)
        self.reset()
        self.times_s = [1.0] * num_slow
        self.num_epochs = self.num_observed = 0

    def reset(self):
        vars(self.stats).update(num_images_delivered=0, num_bad_samples=0, bytes_read=0)
        self.stats.seconds = dict.fromkeys(PHASES, 0.0)

    def sleep(self, seconds):
        self.now_s += seconds

    def observe(self):
        self.num_observed += 1

    def __iter__(self):
        self.num_epochs += 1
        for _ in range(3):
            batch_s = self.times_s.pop() if self.times_s else 0.1
            self.sleep(batch_s)
            self.stats.num_images_delivered += 4
            self.stats.num_bad_samples += 1
            self.stats.bytes_read += 400_000
            self.stats.seconds["decode"] += 0.75 * batch_s
            self.stats.seconds["read"] += 0.25 * batch_s
            yield {}


def measure(loader, *, num_warmup_batches=0, **options):
    return measure_feed(
        loader,
        num_warmup_batches=num_warmup_batches,
        num_batches=20,
        observe=loader.observe,
        clock=lambda: loader.now_s,
        sleep=loader.sleep,
        **options,
    )


@pytest.mark.parametrize("num_warmup_batches", [0, 5])
def test_batches_of_4_in_a_tenth_of_a_second_are_40_images_a_second(num_warmup_batches):
    loader = FakeLoader(num_slow=num_warmup_batches)
    feed = measure(loader, num_warmup_batches=num_warmup_batches)
    summary = summarize_feed(feed, num_workers=0, num_cpu_cores=8)
    assert loader.num_observed == 20 + num_warmup_batches
    assert loader.num_epochs == -(-loader.num_observed // 3)
    assert summary["images_per_second"] == pytest.approx(40)
    interval = summary["images_per_second_interval"]
    assert (interval["low"], interval["high"]) == (pytest.approx(40), pytest.approx(40))
    assert (interval["kind"], interval["num_samples"]) == ("within-run", 20)
    assert summary["window_s"] == pytest.approx(2)
    assert (summary["num_measured_steps"], summary["num_images"]) == (20, 80)
    assert (summary["num_bad_samples"], summary["num_dropped_samples"]) == (20, 3)
    # 400 kB a batch, ten batches a second.
    assert summary["megabytes_per_second"] == pytest.approx(4)
    expected = {**dict.fromkeys(PHASES, 0), "read": 6.25, "decode": 18.75}
    assert summary["ms_per_image"] == pytest.approx(expected)
    assert summary["data_wait_percent"] is None


def test_a_trainer_of_three_tenths_waits_a_quarter_of_its_time():
    feed = measure(FakeLoader(), step_s=0.3, num_warmup_batches=2)
    summary = summarize_feed(feed, num_workers=0, num_cpu_cores=8, step_s=0.3)
    assert summary["data_wait_percent"] == pytest.approx(25)
    assert summary["images_per_second"] == pytest.approx(10)
    assert summary["images_per_second_per_core"] is None


def test_the_window_ends_when_its_time_is_over():
    feed = measure(FakeLoader(), max_seconds=0.45)
    assert feed.step_times_s == pytest.approx([0.1] * 5)
    summary = summarize_feed(feed, num_workers=0, num_cpu_cores=8)
    assert summary["images_per_second"] == pytest.approx(40)
    assert summary["images_per_second_interval"] is None


@pytest.mark.parametrize(
    ("num_workers", "num_cpu_cores", "per_process", "per_core", "num_needed"),
    [
        (0, 8, 40, 40, 3),
        (4, 8, 10, 10, 10),
        (8, 2, 5, 20, 5),  # eight workers on two cores do the work of two
    ],
)
def test_workers_for_95_images_a_second(
    num_workers, num_cpu_cores, per_process, per_core, num_needed
):
    summary = summarize_feed(
        measure(FakeLoader()),
        num_workers=num_workers,
        num_cpu_cores=num_cpu_cores,
        target_images_per_second=95,
    )
    assert summary["images_per_second_per_process"] == pytest.approx(per_process)
    assert summary["images_per_second_per_core"] == pytest.approx(per_core)
    assert summary["num_workers_for_target"] == num_needed
    assert summary["num_processes"] == max(num_workers, 1)
