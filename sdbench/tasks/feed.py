"""The task of data.py: measure how fast a data source alone feeds a trainer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from sdbench import data
from sdbench.base.errors import ConfigError
from sdbench.base.progress import Progress
from sdbench.data.identity import describe_data_or_warn
from sdbench.data.source import SourceConfig
from sdbench.measure import hardware
from sdbench.measure.hardware import Machine
from sdbench.plan.draft import Draft
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import FEED, RunFolder
from sdbench.run.task import Run, Task
from sdbench.settings.feed import (
    DEFAULT_BATCHES,
    MIN_BATCHES_PER_STORED_BATCH,
    FeedSettings,
)
from sdbench.settings.ray import RAY
from sdbench.settings.request import Request

# The seeds' number of workers, where there are as many cores.
MAX_DEFAULT_WORKERS = 8


class Feed(Task):
    """Measures a data source; its request is one of `FeedSettings`."""

    kind = FEED
    program = "data.py"
    _settings: FeedSettings
    _source: SourceConfig
    _machine: Machine
    _ranks: Ranks
    _num_samples: int | None

    @property
    def is_distributed(self) -> bool:
        """With Ray, each emulated trainer is a rank."""
        return self.request.config.engine == RAY

    @property
    def timeout_s(self) -> float:
        """The flag --dist_timeout."""
        return self.request.config.dist_timeout

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Choose what was left open, and check the source."""
        self._machine, self._ranks = machine, ranks
        self._settings = _resolve(self.request, machine, ranks)
        if self._settings.engine == RAY:
            from sdbench.tasks import ray_feed

            self._source = ray_feed.make_source(self._settings, machine=machine, ranks=ranks)
        else:
            self._source = SourceConfig.from_settings(
                self._settings,
                device_batch_size=self._settings.batch_size,
                pin_memory=machine.device_type == "cuda",
            )
        self._num_samples = data.check(self._source)

    def make_folder(self) -> Path:
        """A new one in --results_dir."""
        name = f"feed-{self._source.data_format}-{self._source.image_size}px"
        if self._source.wants_latents:
            name += "-latents"
        results_dir = self._settings.results_dir
        return RunFolder.create(results_dir, machine=self._machine.slug, name=name)

    def for_person(self) -> str:
        """The source and the window."""
        if self._settings.engine == RAY:
            from sdbench.tasks import ray_feed

            return ray_feed.describe(self._settings, self._source)
        settings = self._settings
        place = settings.streams or settings.remote or settings.local
        kind = "latents" if self._source.wants_latents else "images"
        size = "" if self._num_samples is None else f" ({self._num_samples} samples)"
        return (
            f"Reading {settings.data_format} {kind}{f' from {place!r}' if place else ''}{size} at "
            f"{settings.image_size} px: batch_size {settings.batch_size}, num_workers "
            f"{settings.num_workers}, prefetch_factor {settings.prefetch_factor}; "
            f"{settings.num_warmup_batches} warm-up and {settings.num_batches} measured batches"
        )

    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """Settings and machine."""
        return {
            "config": dataclasses.asdict(self._settings),
            "machine": hardware.as_dict(self._machine),
        }

    def work(self, run: Run) -> dict[str, Any]:
        """Measure."""
        if self._settings.engine == RAY:
            from sdbench.tasks import ray_feed

            measured = ray_feed.measure(self._settings, self._source, ranks=self._ranks, run=run)
        else:
            measured = _measure(self._settings, self._source, self._machine)
        is_first = self._ranks.rank == 0
        facts = describe_data_or_warn(self._settings) if is_first else None
        return {"summary": measured, "data": facts}

    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """The result in words."""
        from sdbench.analysis.feed_table import format_feed

        return format_feed(content)


def _resolve(request: Request, machine: Machine, ranks: Ranks) -> FeedSettings:
    """Choose what was left open, and print it."""
    draft = Draft.begin(request, machine=machine, ranks=ranks)
    draft.choose_format()
    settings = draft.config
    if settings.data_format == "synthetic" and request.config.data_format == "auto":
        print("No --remote, --local or --streams: measuring synthetic data.")
    draft.chosen.pop("data_format", None)
    if settings.engine == RAY:
        from sdbench.tasks import ray_feed

        ray_feed.check(settings, ranks)
        if settings.encoder_dtype is None:
            dtype = ray_feed.choose_encoder_dtype(settings, machine)
            draft.choose("encoder_dtype", dtype, "the device of the encoders")
        num_stored = ray_feed.count_stored_batches(settings, num_trainers=ranks.world_size)
    else:
        num_workers = min(MAX_DEFAULT_WORKERS, machine.num_cpu_cores)
        draft.choose_if_open("num_workers", num_workers, "the cores")
        num_stored = draft.config.num_workers * settings.prefetch_factor
    num_batches = max(DEFAULT_BATCHES, MIN_BATCHES_PER_STORED_BATCH * num_stored)
    draft.choose_if_open("num_batches", num_batches, "the batches in store")
    draft.choose_if_open("num_warmup_batches", num_stored + 1, "the batches in store")
    settings = draft.config
    if draft.chosen and ranks.rank == 0:
        values = ", ".join(f"{name}={getattr(settings, name)}" for name in draft.chosen)
        print(f"Chosen, each by a flag of its name: {values}")
    if settings.num_warmup_batches < num_stored:
        raise ConfigError(
            f"{num_stored} batches are prepared in advance, which would pass for measured work",
            value=settings.num_warmup_batches,
            allowed=f"at least {num_stored}",
            flag="--num_warmup_batches, --num_workers or --prefetch_factor",
        )
    return settings


def _measure(settings: FeedSettings, source: SourceConfig, machine: Machine) -> dict[str, Any]:
    """The figures of the measured window."""
    from sdbench.measure.feed import measure_feed, summarize_feed

    step_s = settings.emulate_step_seconds or 0.0
    num_batches, num_warmup = settings.num_batches, settings.num_warmup_batches
    num_images = (num_warmup + num_batches) * settings.batch_size
    with Progress(num_images, unit="image") as progress:
        feed = measure_feed(
            data.build(source),
            num_warmup_batches=num_warmup,
            num_batches=num_batches,
            max_seconds=settings.max_seconds or math.inf,
            step_s=step_s,
            observe=lambda: progress.advance(settings.batch_size),
        )
    return summarize_feed(
        feed,
        num_workers=settings.num_workers,
        num_cpu_cores=machine.num_cpu_cores,
        step_s=step_s,
        target_images_per_second=settings.target_images_per_second,
    )
