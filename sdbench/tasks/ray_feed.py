"""`data.py --engine ray` in each of its ranks: measure how fast Ray Data feeds emulated trainers.

The ranks take the batches of --online_preprocessing, each step together as gradient averaging
requires, and sleep instead of training.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.base.progress import Progress
from sdbench.data.source import SourceConfig
from sdbench.measure.feed import Feed, measure_feed, summarize_feed
from sdbench.measure.hardware import Machine
from sdbench.measure.summary import interval_for_record
from sdbench.models.architecture import Architecture, resolve_architecture
from sdbench.ranks import distributed, ray_cluster
from sdbench.ranks.distributed import Ranks
from sdbench.statistics.intervals import Interval, within_run_interval
from sdbench.tasks.encode.online import EncodeStage, OnlineLoader
from sdbench.tasks.encode.ray_stages import DecodeStage
from sdbench.tasks.encode.ray_stream import NUM_IN_FLIGHT, encoder_resources
from sdbench.tasks.training import RAY_DATA_NAME

if TYPE_CHECKING:
    from sdbench.run.task import Run
    from sdbench.settings.feed import FeedSettings

# Batches that wait at a trainer: the one it takes, and the next one.
NUM_AT_TRAINER = 2
# Parts of the window for an interval.
MAX_PARTS = 20


def check(settings: FeedSettings, ranks: Ranks) -> None:
    """Check that Ray Train started the ranks that the settings ask for."""
    if ray_cluster.RAY_RESTARTS not in os.environ:
        raise ConfigError(
            "The trainers of data.py --engine ray are started by Ray Train alone",
            value=f"{ranks.world_size} ranks of another launcher",
            allowed="the same command without a launcher, and --num_ray_workers",
            flag="RANK (in the environment)",
        )
    if settings.batch_size % ranks.world_size:
        raise ConfigError(
            "The images of a batch cannot be shared out among the trainers",
            value=settings.batch_size,
            allowed=f"a multiple of {ranks.world_size}",
            flag="--batch_size or --num_ray_workers",
        )
    if settings.max_seconds is not None and ranks.world_size > 1:
        raise ConfigError(
            "Several trainers end after the same batch, not after a time",
            value=settings.max_seconds,
            allowed="--num_batches, or one trainer",
            flag="--max_seconds or --num_ray_workers",
        )


def choose_encoder_dtype(settings: FeedSettings, machine: Machine) -> str:
    """The fastest type for the encoders."""
    ray_cluster.connect(settings.ray_address)
    on_gpu = "GPU" in encoder_resources(settings)
    return machine.fast_dtype("cuda" if on_gpu else "cpu", on_ray=True)


def count_stored_batches(settings: FeedSettings, *, num_trainers: int) -> int:
    """Batches that may be ready or in flight before they are requested."""
    num_actors = settings.num_decoders + settings.num_encoders
    num_rows = (settings.prefetch_factor + NUM_IN_FLIGHT) * num_actors
    return math.ceil(num_rows / num_trainers) + NUM_AT_TRAINER


def make_source(settings: FeedSettings, *, machine: Machine, ranks: Ranks) -> SourceConfig:
    """The pictures of this rank; a ConfigError refuses the model or the image size."""
    architecture = _architecture(settings)
    architecture.check_image_size(settings.image_size)
    return SourceConfig.from_settings(
        settings,
        num_workers=0,
        device_batch_size=settings.batch_size // ranks.world_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pin_memory=machine.device_type == "cuda",
        tokenizer_folder=architecture.tokenizer_folder,
        pad_token_id=architecture.tokenizer["pad_token_id"],
        text_embedding_dim=architecture.text_encoder["hidden_size"],
    )


def describe(settings: FeedSettings, source: SourceConfig) -> str:
    """What is about to be measured."""
    place = settings.remote or settings.local
    return (
        f"Ray Data reads {settings.data_format} images{f' from {place!r}' if place else ''} and "
        f"encodes them by {settings.model_name} at {settings.image_size} px: num_decoders "
        f"{settings.num_decoders}, num_encoders {settings.num_encoders}; {source.world_size} "
        f"emulated trainers of {source.device_batch_size} images a step; "
        f"{settings.num_warmup_batches} warm-up and {settings.num_batches} measured steps"
    )


def measure(
    settings: FeedSettings, source: SourceConfig, *, ranks: Ranks, run: Run
) -> dict[str, Any]:
    """Take batches as a trainer would; return the summary of all ranks.

    The folder of the run gets Ray Data's statistics of its stages.
    """
    num_warmup, num_batches = settings.num_warmup_batches, settings.num_batches
    num_stored = count_stored_batches(settings, num_trainers=ranks.world_size)
    ray_cluster.connect(settings.ray_address)
    loader = OnlineLoader(
        source,
        settings,
        architecture=_architecture(settings),
        weights_seed=settings.seed,
        ranks=ranks,
        # The stages have work until the last measured batch.
        num_batches=num_warmup + num_batches + num_stored,
    )
    in_step = _InStep(loader, ranks, sampled=_spread(num_warmup, num_batches))
    num_images = (num_warmup + num_batches) * settings.batch_size
    run.heartbeat.loop_begins()
    with Progress(num_images, unit="image", enabled=ranks.rank == 0) as progress:

        def observe() -> None:
            progress.advance(settings.batch_size)
            run.heartbeat.steps_taken(in_step.num_batches)

        feed = measure_feed(
            in_step,
            num_warmup_batches=num_warmup,
            num_batches=num_batches,
            max_seconds=settings.max_seconds or math.inf,
            step_s=settings.emulate_step_seconds or 0.0,
            observe=observe,
        )
    samples = in_step.samples()
    if ranks.rank == 0:
        (run.folder / RAY_DATA_NAME).write_text(loader.describe_stream() or "", encoding="utf-8")
    loader.close()
    return _summarize(settings, distributed.gather(feed, ranks), samples=samples)


def _spread(num_warmup: int, num_batches: int) -> set[int]:
    """Numbers of batches, from 1, after which the stages are sampled: the window in parts."""
    num_parts = min(MAX_PARTS, num_batches)
    return {num_warmup + num_batches * part // num_parts for part in range(num_parts + 1)}


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


class _InStep:
    """A loader that yields a batch when all ranks have theirs, and samples the stages meanwhile."""

    def __init__(self, loader: OnlineLoader, ranks: Ranks, *, sampled: Collection[int]) -> None:
        """Sample after the batches with these numbers, from 1."""
        self._loader = loader
        self._ranks = ranks
        self._sampled = sampled if ranks.rank == 0 else ()
        # In a thread: the answer takes time, for which no step should wait.
        self._thread = ThreadPoolExecutor(1)
        self._samples: list[Future[dict[str, StageTime]]] = []
        self.stats = loader.stats
        self.num_batches = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            distributed.maximum_on_hosts(0, self._ranks)  # waits for all
            self.num_batches += 1
            if self.num_batches in self._sampled:
                self._samples.append(self._thread.submit(self._sample))
            yield batch

    def _sample(self) -> dict[str, StageTime]:
        return read_stages(self._loader.describe_stream() or "")

    def samples(self) -> list[dict[str, StageTime]]:
        """The stages at the sampled batches, in order; on the first rank."""
        return [sample.result() for sample in self._samples]


def _summarize(
    settings: FeedSettings, feeds: Sequence[Feed], *, samples: Sequence[dict[str, StageTime]]
) -> dict[str, Any]:
    """The record's `summary` of all ranks."""
    stats = feeds[0].stats
    for other in feeds[1:]:
        stats.merge(other.stats)
    merged = Feed(
        # The slowest rank's, as they step together.
        step_times_s=tuple(map(max, zip(*(feed.step_times_s for feed in feeds), strict=True))),
        waits_s=tuple(map(max, zip(*(feed.waits_s for feed in feeds), strict=True))),
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
        rate, interval = _rate_of_one(
            [one[stage.__name__] for one in samples if stage.__name__ in one],
            images_per_row=settings.batch_size // len(feeds),
        )
        stages |= {
            f"num_{worker}s": getattr(settings, f"num_{worker}s"),
            f"images_per_second_per_{worker}": rate,
            f"images_per_second_per_{worker}_interval": interval_for_record(interval),
            f"num_{worker}s_for_target": math.ceil(target / rate) if target and rate else None,
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


def _rate_of_one(
    times: Sequence[StageTime], *, images_per_row: int
) -> tuple[float | None, Interval | None]:
    """Images/s of one busy actor in the window, with an interval; None if too little was made."""
    parts = [
        StageTime(later.num_rows - earlier.num_rows, later.busy_s - earlier.busy_s)
        for earlier, later in itertools.pairwise(times)
        if later.num_rows > earlier.num_rows
    ]
    if not parts:
        return None, None
    rate = images_per_row * sum(p.num_rows for p in parts) / sum(p.busy_s for p in parts)
    seconds_per_row = [part.busy_s / part.num_rows for part in parts]
    return rate, within_run_interval(seconds_per_row, images_per_step=images_per_row)


def _architecture(settings: FeedSettings) -> Architecture:
    return resolve_architecture(
        settings.model_name,
        revision=settings.model_revision,
        random_weights=settings.random_weights,
    )
