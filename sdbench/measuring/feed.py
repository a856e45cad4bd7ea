"""The task of data.py: measure how fast a data source alone feeds a trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
from pathlib import Path
from typing import Any

from sdbench import data
from sdbench.base.errors import ConfigError
from sdbench.base.progress import Progress
from sdbench.base.units import counted
from sdbench.data.buckets import Mixture
from sdbench.data.convert.maker import read_encoded
from sdbench.data.formats.identity import describe_data_or_warn
from sdbench.data.source import SourceConfig
from sdbench.measure import hardware
from sdbench.measure.hardware import Machine
from sdbench.models.architecture import Architecture, is_beside_program
from sdbench.plan import describe
from sdbench.plan.draft import Draft
from sdbench.plan.resolve import find_model
from sdbench.ranks import ray_cluster
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import FEED, RunFolder
from sdbench.run.task import Run, Task
from sdbench.settings.buckets import AUTO, BucketSettings
from sdbench.settings.data import ONLINE
from sdbench.settings.feed import DEFAULT_BATCHES, MIN_BATCHES_PER_STORED_BATCH, FeedSettings
from sdbench.settings.ray import RAY
from sdbench.settings.request import Request
from sdbench.settings.rules import UnknownError

# The seeds' number of workers, where there are as many cores.
MAX_DEFAULT_WORKERS = 8
# Batches that wait at a trainer of Ray Data: the one it takes, and the next one.
NUM_AT_TRAINER = 2


class Feed(Task):
    """Measures a data source; its request is one of `FeedSettings`."""

    kind = FEED
    program = "data.py"
    request: Request[FeedSettings]
    _settings: FeedSettings
    _chosen: dict[str, str]
    _source: SourceConfig
    _machine: Machine
    _ranks: Ranks
    _num_samples: int | None
    _mixture: Mixture | None = None
    _architecture: Architecture  # of the encoders of Ray

    @property
    def is_distributed(self) -> bool:
        """With Ray, each emulated trainer is a rank."""
        return self.request.config.engine == RAY

    @property
    def timeout_s(self) -> float:
        """The flag --dist_timeout."""
        return self.request.config.dist_timeout

    def check_ahead(self, ranks: Any) -> None:
        """The contradictions of settings, the model, the batch and the warm-up."""
        settings = self.request.config
        data.check_ahead(settings)
        if is_beside_program(settings.model_name):
            _find_model(settings)
        with contextlib.suppress(UnknownError):
            _check_trainers(settings, ranks)
            _check_warmup(settings, num_stored=_count_stored(settings, ranks))

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Choose what was left open, and check the source."""
        self._machine, self._ranks = machine, ranks
        draft = _resolve(self.request, machine, ranks)
        self._settings, self._chosen = draft.config, draft.chosen
        place = self._settings.remote or self._settings.local
        inputs = read_encoded(place, width=self._settings.text_embedding_dim)
        options: dict[str, Any] = {"inputs": inputs}
        if self._settings.engine == RAY:
            architecture = self._architecture = _find_model(self._settings)
            architecture.family.check_encoder_dtype(self._settings.encoder_dtype)
            options = {
                "num_workers": 0,
                "rank": ranks.rank,
                "world_size": ranks.world_size,
                "inputs": architecture.inputs,
            }
        self._source = SourceConfig.from_settings(
            self._settings,
            shapes=draft.shapes,
            device_batch_size=self._settings.batch_size // ranks.world_size,
            pin_memory=machine.device_type == "cuda",
            **options,
        )
        self._num_samples = data.check(self._source)
        if draft.shapes is not None:
            self._mixture = data.open_mixture(self._source)
            self._source = dataclasses.replace(self._source, mixture=self._mixture)

    def printed_config(self) -> str | None:
        """The settings as a config file."""
        if not self.request.print_config:
            return None
        notes = self.request.translation.notes
        return describe.as_yaml(self.request, self._settings, chosen=self._chosen, notes=notes)

    def make_folder(self) -> Path:
        """Make a new folder in --results_dir."""
        name = f"feed-{self._source.data_format}-{self._source.image_size}px"
        if self._source.wants_latents:
            name += "-latents"
        results_dir = self._settings.results_dir
        return RunFolder.create(results_dir, machine=self._machine.slug, name=name)

    def for_person(self) -> str:
        """What the program chose, the source and the window."""
        settings, names = self._settings, [name for name in self._chosen if name != "data_format"]
        lines = [*self.request.translation.notes, self._source_and_window()]
        if self._mixture is not None:
            lines.append(self._mixture.describe(settings.batch_size))
        if names:
            values = ", ".join(f"{name}={getattr(settings, name)}" for name in names)
            lines.insert(0, f"Chosen, each by a flag of its name: {values}")
        given = self.request.config
        is_asked = given.use_synth_data or given.data_format != "auto"
        if settings.data_format == "synthetic" and not is_asked:
            lines.insert(0, "No --remote, --local or --streams: measuring synthetic data.")
        return "\n".join(lines)

    def _source_and_window(self) -> str:
        settings = self._settings
        place = settings.streams or settings.remote or settings.local
        where = f" from {place!r}" if place else ""
        window = f"{settings.num_warmup_batches} warm-up and {settings.num_batches} measured"
        if settings.engine == RAY:
            return (
                f"Ray Data reads {settings.data_format} images{where} and encodes them by "
                f"{settings.model_name} at {settings.image_size} px: num_decoders "
                f"{settings.num_decoders}, num_encoders {settings.num_encoders}; "
                f"{counted(self._source.world_size, 'emulated trainer')} of "
                f"{counted(self._source.device_batch_size, 'image')} a step; {window} steps"
            )
        kind = "latents" if self._source.wants_latents else "images"
        size = "" if self._num_samples is None else f" ({counted(self._num_samples, 'sample')})"
        return (
            f"Reading {settings.data_format} {kind}{where}{size} at {settings.image_size} px: "
            f"batch_size {settings.batch_size}, num_workers {settings.num_workers}, "
            f"prefetch_factor {settings.prefetch_factor}; {window} batches"
        )

    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """Settings and machine."""
        return {
            "config": dataclasses.asdict(self._settings),
            "machine": hardware.as_dict(self._machine),
            "data": None,
        }

    def work(self, run: Run) -> dict[str, Any]:
        """Measure the source, and describe its data."""
        measured = self._measure(run)
        is_first = self._ranks.rank == 0
        facts = describe_data_or_warn(self._settings) if is_first else None
        return {"summary": measured, "data": facts}

    def _measure(self, run: Run) -> dict[str, Any]:
        from sdbench.measure.feed import measure_feed, summarize_feed

        settings, ranks, is_on_ray = self._settings, self._ranks, self._settings.engine == RAY
        step_s = settings.emulate_step_seconds or 0.0
        num_batches, num_warmup = settings.num_batches, settings.num_warmup_batches
        if is_on_ray:
            from sdbench.measuring.ray_feed import OnlineFeed

            loader: Any = OnlineFeed(
                settings,
                self._source,
                architecture=self._architecture,
                num_stored=_count_stored(settings, ranks),
                ranks=ranks,
                heartbeat=run.heartbeat,
            )
        else:
            loader = data.build(self._source)
        num_images = (num_warmup + num_batches) * settings.batch_size
        with Progress(num_images, unit="image", enabled=ranks.rank == 0) as progress:
            feed = measure_feed(
                loader,
                num_warmup_batches=num_warmup,
                num_batches=num_batches,
                max_seconds=settings.max_seconds or math.inf,
                step_s=step_s,
                observe=lambda: progress.advance(settings.batch_size),
            )
        if is_on_ray:
            return loader.summarize(feed, folder=run.folder)
        return summarize_feed(
            feed,
            num_workers=settings.num_workers,
            num_cpu_cores=self._machine.num_cpu_cores,
            step_s=step_s,
            target_images_per_second=settings.target_images_per_second,
        )

    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """The result in words."""
        from sdbench.analysis.feed_table import format_feed

        config = content["config"]
        given = [name for name in ("remote", "local", "streams") if config[name] is not None]
        words = [word for name in given for word in (f"--{name}", config[name])] or [
            "--use_synth_data"
        ]
        for one in dataclasses.fields(BucketSettings):
            if config[one.name] != one.default:
                words += [f"--{one.name}", str(config[one.name])]
        if config["buckets"] in (None, AUTO):
            words += ["--image_size", str(config["image_size"])]
        if config["engine"] == RAY:
            words += ["--engine", RAY, "--online_preprocessing"]
        elif config["latents"] != ONLINE:
            words += ["--latents", config["latents"]]
        command = f"python -m sdbench benchmark {shlex.join(words)}"
        return f"{format_feed(content)}\n\nHow fast this machine trains on it: {command}"


def _resolve(request: Request[FeedSettings], machine: Machine, ranks: Ranks) -> Draft[FeedSettings]:
    """Choose what was left open."""
    draft = Draft.begin(request, machine=machine, ranks=ranks)
    draft.choose_format()
    draft.choose_shapes(None, default_size=(None, ""))
    settings = draft.config
    if settings.engine == RAY:
        if settings.buckets is not None:
            raise ConfigError(
                "Ray's encoders take squares",
                value=settings.buckets,
                allowed="--engine torch, or no buckets",
                flag="--buckets or --engine",
            )
        if ray_cluster.RAY_RESTARTS not in os.environ:
            raise ConfigError(
                "The trainers of data.py --engine ray are started by Ray Train alone",
                value=f"{ranks.world_size} ranks of another launcher",
                allowed="the same command without a launcher, and --num_ray_workers",
                flag="RANK (in the environment)",
            )
        _check_trainers(settings, ranks)
        num_stored = _count_stored(settings, ranks)
        # Ahead of the ranks there is no cluster, and an open type passes all checks.
        if settings.encoder_dtype is None and ray_cluster.is_connected():
            from sdbench.encoding.ray_stream import encoder_resources

            device_type = "cuda" if "GPU" in encoder_resources(settings) else "cpu"
            family = _find_model(settings).family
            fast = machine.fast_dtype(device_type, on_ray=True)
            dtype = family.encoder_dtype(fast, has_bf16=machine.has_fast_bf16)
            draft.choose("encoder_dtype", dtype, "the device of the encoders")
    else:
        num_workers = min(MAX_DEFAULT_WORKERS, machine.num_cpu_cores)
        draft.choose_if_open("num_workers", num_workers, "the cores")
        num_stored = draft.config.num_workers * settings.prefetch_factor
    num_batches = max(DEFAULT_BATCHES, MIN_BATCHES_PER_STORED_BATCH * num_stored)
    draft.choose_if_open("num_batches", num_batches, "the batches in store")
    draft.choose_if_open("num_warmup_batches", num_stored + 1, "the batches in store")
    _check_warmup(draft.config, num_stored=num_stored)
    return draft


def _find_model(settings: FeedSettings) -> Architecture:
    """The model of the encoders, which takes images of this size."""
    architecture = find_model(settings)
    architecture.check_image_size(settings.image_size)
    return architecture


def _check_warmup(settings: FeedSettings, *, num_stored: int) -> None:
    """Check that the warm-up takes all batches that are prepared in advance."""
    if settings.num_warmup_batches is not None and settings.num_warmup_batches < num_stored:
        raise ConfigError(
            f"{num_stored} batches are prepared in advance, and would count as measured work",
            value=settings.num_warmup_batches,
            allowed=f"at least {num_stored}",
            flag="--num_warmup_batches, --num_workers or --prefetch_factor",
        )


def _check_trainers(settings: FeedSettings, ranks: Ranks) -> None:
    """Check that the trainers can share a batch and end together."""
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


def _count_stored(settings: FeedSettings, ranks: Ranks) -> int:
    """Batches of Ray Data that may be ready or in flight before they are requested."""
    from sdbench.encoding.ray_stream import NUM_IN_FLIGHT

    num_actors = settings.num_decoders + settings.num_encoders
    num_rows = (settings.prefetch_factor + NUM_IN_FLIGHT) * num_actors
    return math.ceil(num_rows / ranks.world_size) + NUM_AT_TRAINER
