"""How fast does a data source alone feed a trainer?

Also the place to import the data set classes from:
``from data import StreamingImageCaptionDataset, SyntheticImageCaptionDataset``.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module

from sdbench import sources
from sdbench.errors import ConfigError, RunError
from sdbench.sources.config import SourceConfig

DATASETS = {
    "StreamingImageCaptionDataset": "sdbench.sources.mds",
    "SyntheticImageCaptionDataset": "sdbench.sources.synthetic",
}

EPILOG = """\
examples:
  python data.py --use_synth_data
  python data.py --remote data/pairs --image_size 512 --batch_size 32 --num_workers 8
"""


def __getattr__(name: str) -> type:
    """Import a data set class when it is asked for: each needs torch, one needs streaming."""
    if name not in DATASETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(DATASETS[name]), name)


def main(argv: list[str] | None = None) -> int:
    """Measure as the command line says, print the rate, and return the exit code."""
    flags = _parse(argv)
    try:
        config = _make_config(flags)
        images_per_second = measure_rate(
            config, num_warmup_batches=flags.num_warmup_batches, num_batches=flags.num_batches
        )
    except (ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(
        f"{config.data_format}: {images_per_second:.1f} images/s over {flags.num_batches} batches "
        f"of {flags.batch_size} at {flags.image_size} px with {flags.num_workers} workers, after "
        f"{flags.num_warmup_batches} warm-up batches"
    )
    return 0


def measure_rate(config: SourceConfig, *, num_warmup_batches: int, num_batches: int) -> float:
    """Images per second of a loader whose consumer does nothing.

    Args:
        config: Which source, and how.
        num_warmup_batches: Batches taken before the clock starts; they include starting the
            workers. Batches that the workers prepare meanwhile count as measured: keep
            `num_batches` well above num_workers x prefetch_factor.
        num_batches: Batches over which the clock runs; epochs follow each other as needed.
    """
    batches = _repeat(sources.build(config))
    for _ in range(num_warmup_batches):
        next(batches)
    started_s = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return num_batches * config.device_batch_size / (time.perf_counter() - started_s)


def _repeat(loader):
    while True:
        yield from loader


def _make_config(flags: argparse.Namespace) -> SourceConfig:
    for name, lowest in (
        ("image_size", 8),
        ("batch_size", 1),
        ("num_workers", 0),
        ("num_batches", 1),
    ):
        value = getattr(flags, name)
        if value < lowest:
            raise ConfigError(
                "Too small", value=value, allowed=f"{lowest} or more", flag=f"--{name}"
            )
    data_format = sources.resolve_format(
        data_format="auto",
        use_synth_data=flags.use_synth_data,
        remote=flags.remote,
        local=flags.local,
    )
    if data_format == "synthetic" and not flags.use_synth_data:
        print("No --remote or --local: measuring synthetic data.")
    return SourceConfig(
        data_format=data_format,
        image_size=flags.image_size,
        device_batch_size=flags.batch_size,
        seed=flags.seed,
        num_workers=flags.num_workers,
        remote=flags.remote,
        local=flags.local,
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure how many images a second a data source alone delivers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--use_synth_data", action="store_true", help="noise made in memory")
    parser.add_argument("--remote", help="folder or URL of an MDS data set")
    parser.add_argument("--local", help="folder of an MDS data set, or the cache of --remote")
    parser.add_argument("--image_size", type=int, default=512, help="pixels (default: 512)")
    parser.add_argument("--batch_size", type=int, default=32, help="images (default: 32)")
    parser.add_argument("--num_workers", type=int, default=8, help="processes (default: 8)")
    parser.add_argument("--num_batches", type=int, default=100, help="measured (default: 100)")
    parser.add_argument("--num_warmup_batches", type=int, default=10, help="first (default: 10)")
    parser.add_argument("--seed", type=int, default=17, help="of order and noise (default: 17)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
