"""`OnlineFeed`: the batches of Ray Data that emulated trainers take in step, and its figures.

The ranks take the batches of --online_preprocessing, each step together as gradient averaging
requires, and sleep instead of training.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.data.source import SourceConfig
from sdbench.encoding.online import EncodeStage, OnlineLoader
from sdbench.encoding.ray_stages import DecodeStage
from sdbench.measure.feed import Feed, summarize_feed
from sdbench.measure.summary import estimate_interval
from sdbench.models.architecture import Architecture
from sdbench.ranks import distributed, ray_cluster
from sdbench.ranks.distributed import Ranks
from sdbench.ranks.heartbeat import Heartbeat
from sdbench.record.formulas import num_for_target
from sdbench.settings.feed import FeedSettings
from sdbench.training.training_task import end_loading

# Parts of the window for an interval.
MAX_PARTS = 20


class StageTime(NamedTuple):
    """Batches that the actors of a stage have made since the stream began, and their time."""

    num_rows: int
    busy_s: float


def read_stages(text: str) -> dict[str, StageTime]:
    """The stages, by class name, in Ray Data's statistics of a stream.

    They have the rows that a stage has made, and how many a single actor makes in a second. Actors
    that take turns are a stage each.
    """
    stages: dict[str, StageTime] = {}
    for part in re.split(r"^Operator ", text, flags=re.MULTILINE)[1:]:
        name = re.match(r"\d+ .*MapBatches\((\w+?)\d*\):", part)
        rows = re.search(r"Total output num rows: (\d+) rows", part)
        rate = re.search(r"Estimated single task throughput: ([0-9.e+-]+) rows/s", part)
        if name and rows and rate and float(rate[1]) > 0:
            before = stages.get(name[1], StageTime(0, 0.0))
            num_rows = int(rows[1])
            stages[name[1]] = StageTime(
                before.num_rows + num_rows, before.busy_s + num_rows / float(rate[1])
            )
    return stages


class OnlineFeed:
    """A loader that yields a batch when all ranks have theirs, and samples the stages meanwhile."""

    def __init__(
        self,
        settings: FeedSettings,
        source: SourceConfig,
        *,
        architecture: Architecture,
        num_stored: int,
        ranks: Ranks,
        heartbeat: Heartbeat,
    ) -> None:
        """Join the cluster; `num_stored` batches may be ready before they are requested."""
        ray_cluster.connect(settings.ray_address)
        num_warmup, num_batches = settings.num_warmup_batches, settings.num_batches
        self._loader = OnlineLoader(
            source,
            settings,
            architecture=architecture,
            weights_seed=settings.seed,
            ranks=ranks,
            # The stages have work until the last measured batch.
            num_batches=num_warmup + num_batches + num_stored,
        )
        self._settings, self._ranks, self._heartbeat = settings, ranks, heartbeat
        self.stats = self._loader.stats
        # After the batches with these numbers, from 1: the ends of the parts of the window.
        num_parts = min(MAX_PARTS, num_batches)
        self._sampled = {
            num_warmup + num_batches * part // num_parts for part in range(num_parts + 1)
        }
        # In a thread: the answer takes time, for which no step should wait.
        self._thread = ThreadPoolExecutor(1)
        self._samples: list[Future[dict[str, StageTime]]] = []
        self._num_batches = 0
        heartbeat.loop_begins()

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            distributed.maximum_on_hosts(0, self._ranks)  # waits for all
            self._num_batches += 1
            self._heartbeat.steps_taken(self._num_batches)
            if self._ranks.rank == 0 and self._num_batches in self._sampled:
                self._samples.append(self._thread.submit(self._sample))
            yield batch

    def _sample(self) -> dict[str, StageTime]:
        return read_stages(self._loader.describe_stream() or "")

    def summarize(self, feed: Feed, *, folder: Path) -> dict[str, Any]:
        """End the stream; return the record's `summary` of all ranks, on the first one.

        The folder gets Ray Data's statistics of its stages.
        """
        samples = [sample.result() for sample in self._samples]
        end_loading(self._loader, folder, ranks=self._ranks)
        settings, feeds = self._settings, distributed.gather(feed, self._ranks)
        stats = feeds[0].stats
        for other in feeds[1:]:
            stats.merge(other.stats)
        merged = Feed(
            # The slowest rank's, as they step together.
            step_times_s=tuple(map(max, zip(*(one.step_times_s for one in feeds), strict=True))),
            waits_s=tuple(map(max, zip(*(one.waits_s for one in feeds), strict=True))),
            stats=stats,
        )
        step_s = settings.emulate_step_seconds or 0.0
        num_decoders = settings.num_decoders
        summary = summarize_feed(
            merged, num_workers=num_decoders, num_cpu_cores=num_decoders, step_s=step_s
        )
        target = settings.batch_size / step_s if step_s else settings.target_images_per_second
        stages: dict[str, Any] = {}
        for worker, stage in (("decoder", DecodeStage), ("encoder", EncodeStage)):
            rate, interval = rate_of_one(
                [one[stage.__name__] for one in samples if stage.__name__ in one],
                images_per_row=settings.batch_size // len(feeds),
            )
            stages |= {
                f"num_{worker}s": getattr(settings, f"num_{worker}s"),
                f"images_per_second_per_{worker}": rate,
                f"images_per_second_per_{worker}_interval": interval,
                f"num_{worker}s_for_target": num_for_target(target, rate),
            }
        return summary | {
            # The cores of the decoders' nodes are not known here.
            "images_per_second_per_core": None,
            "ray": {
                "num_trainers": len(feeds),
                **stages,
                "target_images_per_second": target,
                "num_failed_blocks": stats.num_failed_blocks,
            },
        }


def rate_of_one(
    times: Sequence[StageTime], *, images_per_row: int
) -> tuple[float | None, dict[str, Any] | None]:
    """Images/s of one busy actor in the window, with an interval; None if too little was made."""
    parts = [
        StageTime(later.num_rows - earlier.num_rows, later.busy_s - earlier.busy_s)
        for earlier, later in itertools.pairwise(times)
        if later.num_rows > earlier.num_rows
    ]
    if not parts:
        return None, None
    num_rows = sum(part.num_rows for part in parts)
    row_s = sum(part.busy_s for part in parts) / num_rows
    # Parts have few rows or many, so the mean of their times per row is not the time of a row. The
    # times of a ratio estimator have that mean (Cochran, Sampling Techniques, 1977, chapter 6).
    mean_num_rows = num_rows / len(parts)
    times_s = [row_s + (part.busy_s - row_s * part.num_rows) / mean_num_rows for part in parts]
    return images_per_row / row_s, estimate_interval(times_s, images_per_step=images_per_row)
