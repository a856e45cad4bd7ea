"""How fast does a data source alone feed a trainer?

    python data.py --use_synth_data
    python data.py --remote my-mds-folder --num_workers 8
    python data.py --remote my-mds-folder --emulate_step_seconds 0.5
    python data.py --remote my-mds-folder --target_images_per_second 800

Also the place to import the data set classes from:
``from data import StreamingLAIONDataset, SyntheticImageCaptionDataset``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench import data
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.output import protected_output
from sdbench.base.refusal import report_refusal
from sdbench.data.source import SourceConfig
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

if TYPE_CHECKING:
    from sdbench.measure.hardware import Machine
    from sdbench.record.store import RunFolder

DATASETS = {
    "StreamingLAIONDataset": "sdbench.data.formats.mds",
    "SyntheticImageCaptionDataset": "sdbench.data.formats.synthetic",
}

DESCRIPTION = "Measure how many images a second a data source alone delivers, and record it."
EPILOG = """\
examples:
  python data.py --use_synth_data
      the most that handing over batches costs
  python data.py --remote data/pairs --image_size 512 --batch_size 32 --num_workers 8
      any data set that benchmark.py trains on
  python data.py --remote data/pairs --emulate_step_seconds 0.5
      would a trainer with such steps wait for its data?
  python data.py --remote data/pairs --target_images_per_second 800
      is it enough for 8 GPUs of 100 images/s, and how many workers does it take?

exit codes: 0 ok, 1 the run failed (its record says why), 2 bad input, 130 Ctrl-C
"""

# The seeds' number of workers, where there are as many cores.
MAX_DEFAULT_WORKERS = 8
DEFAULT_BATCHES = 100
# What the workers have in store when the window begins is at most a tenth of it.
MIN_BATCHES_PER_STORED_BATCH = 10
PLAIN_LINE_PERIOD_S = 5.0


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


def __getattr__(name: str) -> type:
    """Import a data set class when it is asked for: each needs torch, one needs streaming."""
    if name not in DATASETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(DATASETS[name]), name)


@protected_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the command line says, print and record the result.

    Args:
        argv: Command-line arguments; None takes those of the process.

    Returns:
        The exit code.
    """
    try:
        return _run(_parse(argv), command=list(sys.argv[1:] if argv is None else argv))
    except (ConfigError, RunError) as error:  # before there is a record
        print(f"error: {error}", file=sys.stderr)
        report_refusal(error)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _parse(argv: Sequence[str] | None) -> dict[str, Any]:
    """The value of every flag.

    Raises:
        ConfigError: A value is of the wrong kind.
    """
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
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


def _run(settings: dict[str, Any], *, command: list[str]) -> int:
    from sdbench.base.stop import stop_signals_raise
    from sdbench.measure.hardware import inspect_machine
    from sdbench.record.store import OutputLog, RunFolder

    log = OutputLog()
    with log.capture(), stop_signals_raise():
        machine = inspect_machine()
        settings = _resolve(settings, machine)
        source = _make_source(settings, machine)
        num_samples = data.check(source)
        name = f"feed-{source.data_format}-{source.image_size}px"
        if source.wants_latents:
            name += "-latents"
        path = RunFolder.create(settings["results_dir"], machine=machine.slug, name=name)
        log.move_to(path)
        print(_describe(settings, num_samples=num_samples), flush=True)
        folder = RunFolder(path)
        return _run_in_folder(settings, source, machine, folder, command=command)


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


def _run_in_folder(
    settings: dict[str, Any],
    source: SourceConfig,
    machine: Machine,
    folder: RunFolder,
    *,
    command: list[str],
) -> int:
    """Measure, and leave a record whatever happens."""
    from sdbench.measure import hardware
    from sdbench.record.store import FEED
    from sdbench.report.feed_table import format_feed
    from sdbench.run.outcome import RunRecord, explain

    described = {"config": settings, "machine": hardware.as_dict(machine)}
    record = RunRecord(folder, kind=FEED, program="data.py", command=command, described=described)
    record.write_unfinished()
    try:
        summary = _measure(settings, source, machine)
    except BaseException as error:  # also Ctrl-C: the record has to say why
        failure = explain(error)
        record.end_badly(failure)
        print(f"{failure.status}: {failure.reason}\nrecord: {folder.path}", file=sys.stderr)
        return failure.exit_code
    print(f"\n{format_feed(record.end_well(summary=summary))}\n\nrecord: {folder.path}")
    return 0


def _measure(settings: dict[str, Any], source: SourceConfig, machine: Machine) -> dict[str, Any]:
    """The figures of the measured window."""
    from sdbench.measure.feed import measure_feed, summarize_feed

    step_s = settings["emulate_step_seconds"] or 0.0
    num_batches, num_warmup = settings["num_batches"], settings["num_warmup_batches"]
    progress = Progress(num_batches=num_warmup + num_batches, batch_size=settings["batch_size"])
    try:
        feed = measure_feed(
            data.build(source),
            num_warmup_batches=num_warmup,
            num_batches=num_batches,
            max_seconds=settings["max_seconds"] or math.inf,
            step_s=step_s,
            observe=progress.batch_ends,
        )
    finally:
        progress.close()
    return summarize_feed(
        feed,
        num_workers=settings["num_workers"],
        num_cpu_cores=machine.num_cpu_cores,
        step_s=step_s,
        target_images_per_second=settings["target_images_per_second"],
    )


class Progress:
    """A bar on a terminal; elsewhere a plain line every five seconds."""

    def __init__(self, *, num_batches: int, batch_size: int) -> None:
        """Begin.

        Args:
            num_batches: Batches of the whole run.
            batch_size: Images in each.
        """
        self._num_batches = num_batches
        self._batch_size = batch_size
        self._num_done = 0
        self._num_done_at_line = 0
        self._line_s = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=num_batches * batch_size, unit=" images", dynamic_ncols=True)

    def batch_ends(self) -> None:
        """A batch has been taken."""
        self._num_done += 1
        if self._bar is not None:
            self._bar.update(self._batch_size)
            return
        since_line_s = time.perf_counter() - self._line_s
        if since_line_s < PLAIN_LINE_PERIOD_S:
            return
        batches_per_second = (self._num_done - self._num_done_at_line) / since_line_s
        self._line_s += since_line_s
        self._num_done_at_line = self._num_done
        remaining_s = (self._num_batches - self._num_done) / batches_per_second
        print(
            f"batch {self._num_done}/{self._num_batches}, "
            f"{batches_per_second * self._batch_size:.4g} images/s, about {remaining_s:.0f} s left",
            flush=True,
        )

    def close(self) -> None:
        """The last batch has been taken, or none will come."""
        if self._bar is not None:
            self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
