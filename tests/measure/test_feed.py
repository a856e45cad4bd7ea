"""The rate of a loader and the wait for it, on a clock that only moves when it is told."""

from __future__ import annotations

import pytest

from sdbench.measure.feed import measure_feed, summarize_feed

PHASES = ("read", "decode", "transform", "tokenize", "collate")


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


class FakeStats:
    def __init__(self):
        self.num_dropped_samples = 3
        self.reset()

    def reset(self):
        self.num_images_delivered = self.num_bad_samples = self.bytes_read = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)


class FakeLoader:
    """Epochs of three batches of 4; each takes 0.1 s, after a number of slow ones 1 s."""

    def __init__(self, clock, *, num_slow=0, batch_s=0.1):
        self.clock = clock
        self.stats = FakeStats()
        self.times_s = [1.0] * num_slow
        self.batch_s = batch_s
        self.num_epochs = 0

    def __iter__(self):
        self.num_epochs += 1
        for _ in range(3):
            batch_s = self.times_s.pop() if self.times_s else self.batch_s
            self.clock.sleep(batch_s)
            self.stats.num_images_delivered += 4
            self.stats.num_bad_samples += 1
            self.stats.bytes_read += 400_000
            self.stats.seconds["decode"] += 0.75 * batch_s
            self.stats.seconds["read"] += 0.25 * batch_s
            yield {}


def measure(loader, *, num_batches=20, num_warmup_batches=0, **options):
    return measure_feed(
        loader,
        num_warmup_batches=num_warmup_batches,
        num_batches=num_batches,
        clock=loader.clock,
        sleep=loader.clock.sleep,
        **options,
    )


def test_batches_of_4_in_a_tenth_of_a_second_are_40_images_a_second():
    loader = FakeLoader(Clock())
    summary = summarize_feed(measure(loader), num_workers=0, num_cpu_cores=8)
    assert loader.num_epochs == 7
    assert summary["images_per_second"] == pytest.approx(40)
    interval = summary["images_per_second_interval"]
    assert (interval["low"], interval["high"]) == (pytest.approx(40), pytest.approx(40))
    assert (interval["kind"], interval["num_samples"]) == ("within-run", 20)
    assert summary["window_s"] == pytest.approx(2)
    assert (summary["num_measured_steps"], summary["num_images"]) == (20, 80)
    assert (summary["num_bad_samples"], summary["num_dropped_samples"]) == (20, 3)
    # 400 kB a batch, ten batches a second.
    assert summary["megabytes_per_second"] == pytest.approx(4)
    assert summary["ms_per_image"] == {
        **dict.fromkeys(PHASES, 0),
        "read": pytest.approx(6.25),
        "decode": pytest.approx(18.75),
    }
    assert summary["data_wait_percent"] is None


def test_warm_up_leaves_no_trace():
    loader = FakeLoader(Clock(), num_slow=5)
    summary = summarize_feed(measure(loader, num_warmup_batches=5), num_workers=2, num_cpu_cores=8)
    assert summary["images_per_second"] == pytest.approx(40)
    assert summary["num_images"] == 80
    assert sum(summary["ms_per_image"].values()) == pytest.approx(25)


def test_a_trainer_of_three_tenths_waits_a_quarter_of_its_time():
    feed = measure(FakeLoader(Clock()), step_s=0.3, num_warmup_batches=2)
    summary = summarize_feed(feed, num_workers=0, num_cpu_cores=8, step_s=0.3)
    assert summary["data_wait_percent"] == pytest.approx(25)
    assert summary["images_per_second"] == pytest.approx(10)
    assert summary["images_per_second_per_core"] is None


def test_the_window_ends_when_its_time_is_over():
    feed = measure(FakeLoader(Clock()), max_seconds=0.45)
    assert feed.step_times_s == pytest.approx([0.1] * 5)
    summary = summarize_feed(feed, num_workers=0, num_cpu_cores=8)
    assert summary["images_per_second"] == pytest.approx(40)
    assert summary["images_per_second_interval"] is None


def test_the_observer_sees_every_batch():
    seen = []
    measure(FakeLoader(Clock()), num_warmup_batches=2, observe=lambda: seen.append(1))
    assert len(seen) == 22


@pytest.mark.parametrize(
    ("num_workers", "num_cpu_cores", "per_process", "per_core", "num_needed"),
    [
        (0, 8, 40, 40, 3),
        (1, 8, 40, 40, 3),
        (4, 8, 10, 10, 10),
        (8, 2, 5, 20, 5),  # eight workers on two cores do the work of two
    ],
)
def test_workers_for_95_images_a_second(
    num_workers, num_cpu_cores, per_process, per_core, num_needed
):
    summary = summarize_feed(
        measure(FakeLoader(Clock())),
        num_workers=num_workers,
        num_cpu_cores=num_cpu_cores,
        target_images_per_second=95,
    )
    assert summary["images_per_second_per_process"] == pytest.approx(per_process)
    assert summary["images_per_second_per_core"] == pytest.approx(per_core)
    assert summary["num_workers_for_target"] == num_needed
    assert summary["num_processes"] == max(num_workers, 1)
