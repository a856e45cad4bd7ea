"""Times reading pictures, by this suite and by mosaicml/diffusion-benchmark's data set class.

    python tools/compare_datasets.py my-mds --image_size 512 --output comparison.json

Both read the whole data set in turn, several times, in one process with one thread and no workers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script's own folder is on the path, the repository is not

from sdbench import data  # noqa: E402
from sdbench.data.source import SourceConfig  # noqa: E402
from sdbench.measure import hardware  # noqa: E402
from sdbench.record import provenance  # noqa: E402
from sdbench.statistics.intervals import compare  # noqa: E402
from tests.reference.diffusion_benchmark_dataset import ReferenceDataset, load_slow_tokenizer  # noqa: E402

BATCH_SIZE = 32


def measure(read: Callable[[], int]) -> float:
    """Samples a second of one pass."""
    started_s = time.perf_counter()
    num_samples = read()
    return num_samples / (time.perf_counter() - started_s)


def make_readers(folder: Path, *, image_size: int, scratch: Path) -> dict[str, Callable[[], int]]:
    """A function for each data set that reads it once and returns the number of samples."""
    reference = DataLoader(
        ReferenceDataset(folder, image_size=image_size, tokenizer=load_slow_tokenizer(scratch)),
        batch_size=BATCH_SIZE,
    )
    ours = data.build(
        SourceConfig(
            data_format="mds",
            remote=str(folder),
            image_size=image_size,
            device_batch_size=BATCH_SIZE,
            seed=17,
        )
    )
    return {
        "reference": lambda: sum(len(batch["image"]) for batch in reference),
        "ours": lambda: sum(len(batch["image"]) for batch in ours),
    }


def run(folder: Path, *, image_size: int, num_repeats: int) -> dict[str, Any]:
    """Measure both in turn.

    Returns:
        Rates of every pass, their medians, and the ratio with its interval.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        readers = make_readers(folder, image_size=image_size, scratch=Path(scratch))
        for read in readers.values():
            read()
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(num_repeats):
            for name, read in readers.items():
                rates[name].append(measure(read))
                print(f"{name}: {rates[name][-1]:.1f} images/s", file=sys.stderr)
    ratio = compare(rates["ours"], rates["reference"])
    return {
        "what": "images/s of one core without workers, one pass over the data set each",
        "image_size": image_size,
        "batch_size": BATCH_SIZE,
        "images_per_second": rates,
        "median_images_per_second": {
            name: statistics.median(values) for name, values in rates.items()
        },
        "ratio": ratio.ratio,
        "ratio_interval": None if ratio.interval is None else dataclasses.asdict(ratio.interval),
        "verdict": ratio.verdict,
        "machine": hardware.as_dict(hardware.inspect_machine(local_rank=0)),
        "versions": provenance.package_versions(),
        "git": provenance.git_state(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="an MDS data set with the columns jpg, caption")
    parser.add_argument("--image_size", type=int, default=512, help="pixels (default: 512)")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each (default: 5)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    flags = parser.parse_args(argv)
    result = run(flags.folder, image_size=flags.image_size, num_repeats=flags.repeats)
    print(
        f"ours / reference: {result['ratio']:.2f}, {result['verdict']}; medians "
        + ", ".join(
            f"{name} {rate:.1f} images/s"
            for name, rate in result["median_images_per_second"].items()
        )
    )
    if flags.output is not None:
        flags.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
