"""The task of data.py: measure how fast a data source alone feeds a trainer."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench import data
from sdbench.base.errors import ConfigError
from sdbench.base.progress import Progress
from sdbench.data.source import SourceConfig
from sdbench.measure import hardware
from sdbench.measure.hardware import Machine
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import FEED, RunFolder
from sdbench.run.task import Run, Task
from sdbench.settings.config import (
    DATA,
    FIELDS,
    NOT_NEGATIVE,
    POSITIVE,
    SWITCH,
    Kind,
    add_switch,
    parse_value,
)

# The seeds' number of workers, where there are as many cores.
MAX_DEFAULT_WORKERS = 8
DEFAULT_BATCHES = 100
# What the workers have in store when the window begins is at most a tenth of it.
MIN_BATCHES_PER_STORED_BATCH = 10


class Flag(NamedTuple):
    """What a flag is.

    Attributes:
        kind: How its text becomes a value.
        default: Its value when it is not given; None means that nothing is set, or that the
            program chooses.
        help_text: What it does.
    """

    kind: Kind
    default: Any
    help_text: str


def _shared_flag(name: str, *, default: Any = None) -> Flag:
    """A flag of benchmark.py, which means the same here."""
    metadata = FIELDS[name].metadata
    default = FIELDS[name].default if default is None else default
    return Flag(metadata["kind"], default, metadata["help"])


NUMBER_ABOVE_0: Kind = FIELDS["data_timeout_s"].metadata["kind"]
FLAGS: dict[str, Flag] = {
    **{
        name: _shared_flag(name)
        for name, field in FIELDS.items()
        if field.metadata["group"] == DATA
    },
    "num_workers": Flag(
        NOT_NEGATIVE, None, "loader processes (default: 8, or the number of cores if smaller)"
    ),
    "image_size": _shared_flag("image_size", default=512),
    "batch_size": Flag(POSITIVE, 32, "images per batch"),
    "text_embedding_dim": Flag(
        POSITIVE, 1024, "width of the text embeddings beside latents (SD 2: 1024, SD 1: 768)"
    ),
    "seed": Flag(NOT_NEGATIVE, 17, "seed of order, crops, flips and noise"),
    "num_batches": Flag(
        POSITIVE,
        None,
        f"measured batches (default: {DEFAULT_BATCHES}, or "
        f"{MIN_BATCHES_PER_STORED_BATCH} x num_workers x prefetch_factor if larger)",
    ),
    "num_warmup_batches": Flag(
        NOT_NEGATIVE,
        None,
        "batches taken before (default: num_workers x prefetch_factor, which is the least, and "
        "one more)",
    ),
    "max_seconds": Flag(NUMBER_ABOVE_0, None, "end the measured window after so long"),
    "emulate_step_seconds": Flag(
        NUMBER_ABOVE_0, None, "sleep so long after each batch, and say how long a trainer waits"
    ),
    "target_images_per_second": Flag(
        NUMBER_ABOVE_0, None, "say whether the source feeds so much, and with how many workers"
    ),
    "results_dir": _shared_flag("results_dir"),
}


def parse_flags(argv: Sequence[str], *, description: str, epilog: str) -> dict[str, Any]:
    """The value of every flag.

    Args:
        argv: Command-line arguments.
        description: Text above the flags in `--help`.
        epilog: Text below them: the examples.

    Raises:
        ConfigError: A value is of the wrong kind.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, flag in FLAGS.items():
        help_text = flag.help_text.replace("%", "%%")
        if flag.kind is SWITCH:
            add_switch(parser, name, default=flag.default, help_text=help_text)
            continue
        if " | " in flag.kind.allowed:
            help_text += f"; {flag.kind.allowed}"
        if flag.default is not None:
            help_text += f" (default: {flag.default})"
        parser.add_argument(f"--{name}", metavar="X", help=help_text)
    given = vars(parser.parse_args(argv))
    return {
        name: flag.default
        if given[name] is None
        else parse_value(name, given[name], kind=flag.kind)
        for name, flag in FLAGS.items()
    }


class Feed(Task):
    """Measures a data source; its request maps each of `FLAGS` to a value."""

    kind = FEED
    program = "data.py"
    is_distributed = False
    _settings: dict[str, Any]
    _source: SourceConfig
    _machine: Machine
    _num_samples: int | None

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Fill in what was left open, and look at the source."""
        self._machine = machine
        self._settings = _resolve(self.request, machine)
        self._source = _make_source(self._settings, machine)
        self._num_samples = data.check(self._source)

    def make_folder(self) -> Path:
        """A new one in --results_dir."""
        name = f"feed-{self._source.data_format}-{self._source.image_size}px"
        if self._source.wants_latents:
            name += "-latents"
        results_dir = self._settings["results_dir"]
        return RunFolder.create(results_dir, machine=self._machine.slug, name=name)

    def for_person(self) -> str:
        """The source and the window."""
        return _describe(self._settings, num_samples=self._num_samples)

    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """Settings and machine."""
        return {"config": self._settings, "machine": hardware.as_dict(self._machine)}

    def work(self, run: Run) -> dict[str, Any]:
        """Measure."""
        return {"summary": _measure(self._settings, self._source, self._machine)}

    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """The result in words."""
        from sdbench.report.feed_table import format_feed

        return format_feed(content)


def _resolve(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Fill in what was left open, say it, and check what only fits together or not.

    Raises:
        ConfigError: Two values contradict each other.
    """
    if settings["emulate_step_seconds"] and settings["target_images_per_second"]:
        raise ConfigError(
            "With an emulated step the rate is that of the trainer, not what the source could do",
            value=settings["emulate_step_seconds"],
            allowed="one of both flags in a run",
            flag="--emulate_step_seconds or --target_images_per_second",
        )
    data_format = data.resolve_format(
        **{
            name: settings[name]
            for name in ("data_format", "use_synth_data", "remote", "local", "streams")
        }
    )
    if data_format == "synthetic" and not settings["use_synth_data"]:
        print("No --remote, --local or --streams: measuring synthetic data.")
    num_workers = settings["num_workers"]
    if num_workers is None:
        num_workers = min(MAX_DEFAULT_WORKERS, machine.num_cpu_cores)
    num_stored = num_workers * settings["prefetch_factor"]
    chosen = {
        "num_workers": num_workers,
        "num_batches": max(DEFAULT_BATCHES, MIN_BATCHES_PER_STORED_BATCH * num_stored),
        "num_warmup_batches": num_stored + 1,
    }
    chosen = {name: value for name, value in chosen.items() if settings[name] is None}
    if chosen:
        values = ", ".join(f"{name}={value}" for name, value in chosen.items())
        print(f"Chosen, each by a flag of its name: {values}")
    settings = {**settings, **chosen, "data_format": data_format}
    if settings["num_warmup_batches"] < num_stored:
        raise ConfigError(
            f"{num_workers} workers prepare {settings['prefetch_factor']} batches each in advance, "
            "which would pass for measured work",
            value=settings["num_warmup_batches"],
            allowed=f"at least {num_stored}",
            flag="--num_warmup_batches, --num_workers or --prefetch_factor",
        )
    return settings


def _make_source(settings: dict[str, Any], machine: Machine) -> SourceConfig:
    names = {field.name for field in dataclasses.fields(SourceConfig)} & settings.keys()
    return SourceConfig(
        **{name: settings[name] for name in names - {"filters"}},
        filters=settings["filters"] or {},
        device_batch_size=settings["batch_size"],
        pin_memory=machine.device_type == "cuda",
    )


def _describe(settings: dict[str, Any], *, num_samples: int | None) -> str:
    """What is about to be measured."""
    place = settings["streams"] or settings["remote"] or settings["local"]
    kind = "images" if settings["latents"] == "online" else "latents"
    size = "" if num_samples is None else f" ({num_samples} samples)"
    values = ", ".join(
        f"{name} {settings[name]}" for name in ("batch_size", "num_workers", "prefetch_factor")
    )
    return (
        f"Reading {settings['data_format']} {kind}{f' from {place!r}' if place else ''}{size} at "
        f"{settings['image_size']} px: {values}; "
        f"{settings['num_warmup_batches']} warm-up and {settings['num_batches']} measured batches"
    )


def _measure(settings: dict[str, Any], source: SourceConfig, machine: Machine) -> dict[str, Any]:
    """The figures of the measured window."""
    from sdbench.measure.feed import measure_feed, summarize_feed

    step_s = settings["emulate_step_seconds"] or 0.0
    num_batches, num_warmup = settings["num_batches"], settings["num_warmup_batches"]
    batch_size = settings["batch_size"]
    with Progress((num_warmup + num_batches) * batch_size, unit="image") as progress:
        feed = measure_feed(
            data.build(source),
            num_warmup_batches=num_warmup,
            num_batches=num_batches,
            max_seconds=settings["max_seconds"] or math.inf,
            step_s=step_s,
            observe=lambda: progress.advance(batch_size),
        )
    return summarize_feed(
        feed,
        num_workers=settings["num_workers"],
        num_cpu_cores=machine.num_cpu_cores,
        step_s=step_s,
        target_images_per_second=settings["target_images_per_second"],
    )
