"""Times latents on their way from a worker to the trainer, in new memory and in slots.

    python tools/compare_transport.py my-latents --output comparison.json

Reads MDS latents in turn, several times: without workers; with workers whose batches lie in new
shared memory each, as torch's default_collate takes it; and with workers that use theirs again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script's own folder is on the path, the repository is not

from sdbench import data  # noqa: E402
from sdbench.data.pipeline import shared_batches  # noqa: E402
from sdbench.data.source import SourceConfig  # noqa: E402
from sdbench.measure import hardware  # noqa: E402
from sdbench.record import provenance  # noqa: E402
from sdbench.statistics.intervals import compare  # noqa: E402


class NewMemory(shared_batches.SharedBatches):
    """New shared memory for each batch, which nobody has to copy out of."""

    def take(self, layout: shared_batches.Layout) -> tuple[dict[str, torch.Tensor], None]:
        """Tensors that are the receiver's own."""
        if torch.utils.data.get_worker_info() is None:
            return super().take(layout)
        return {name: shared_batches._share(*kind) for name, kind in layout.items()}, None


def build(folder: Path, *, num_workers: int, reuse: bool, arguments: dict[str, Any]) -> Any:
    """A loader of one of the three ways, one epoch old."""
    loader = data.build(
        SourceConfig(
            data_format="mds",
            remote=str(folder),
            latents="precomputed",
            seed=17,
            num_workers=num_workers,
            **arguments,
        )
    )
    if not reuse:
        loader.collate_fn._slots = NewMemory(prefetch_factor=2)
    measure(loader)
    return loader


def measure(loader: Any) -> float:
    """Samples a second of one epoch, every value touched."""
    started_s = time.perf_counter()
    num_samples = 0
    for batch in loader:
        num_samples += len(batch["text_embedding"])
        for tensor in batch.values():
            tensor.view(torch.int16).amax()
    return num_samples / (time.perf_counter() - started_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="an MDS data set of latents")
    parser.add_argument("--image_size", type=int, default=512, help="pixels (default: 512)")
    parser.add_argument("--text_embedding_dim", type=int, default=1024, help="(default: 1024)")
    parser.add_argument("--batch_size", type=int, default=64, help="samples (default: 64)")
    parser.add_argument("--num_workers", type=int, default=2, help="(default: 2)")
    parser.add_argument("--repeats", type=int, default=7, help="epochs of each (default: 7)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    arguments = {
        "image_size": flags.image_size,
        "text_embedding_dim": flags.text_embedding_dim,
        "device_batch_size": flags.batch_size,
    }
    ways = {
        "no workers": build(flags.folder, num_workers=0, reuse=True, arguments=arguments),
        "new memory": build(
            flags.folder, num_workers=flags.num_workers, reuse=False, arguments=arguments
        ),
        "slots": build(
            flags.folder, num_workers=flags.num_workers, reuse=True, arguments=arguments
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(flags.repeats):
        for name, loader in ways.items():
            rates[name].append(measure(loader))
            print(f"{name}: {rates[name][-1]:.0f} samples/s", file=sys.stderr)
    ratio = compare(rates["slots"], rates["new memory"])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"slots / new memory: {ratio.ratio:.2f}, {ratio.verdict}; medians "
        + ", ".join(f"{name} {rate:.0f} samples/s" for name, rate in medians.items())
    )
    result = {
        "what": "samples/s of MDS latents, one epoch each, every value touched by the trainer",
        **arguments,
        "num_workers": flags.num_workers,
        "samples_per_second": rates,
        "median_samples_per_second": medians,
        "ratio": ratio.ratio,
        "ratio_interval": None if ratio.interval is None else dataclasses.asdict(ratio.interval),
        "verdict": ratio.verdict,
        "machine": hardware.as_dict(hardware.inspect_machine(local_rank=0)),
        "versions": provenance.package_versions(),
        "git": provenance.git_state(),
    }
    if flags.output is not None:
        flags.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
