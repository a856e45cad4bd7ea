"""Times latents on their way from a worker to the trainer, in new memory and in slots.

    python tools/compare_transport.py my-latents --output comparison.json

Reads MDS latents in turn, several times: without workers; with workers whose batches lie in new
shared memory each, as torch's default_collate takes it; and with workers that use theirs again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

# A script's own folder is on the path, the repository is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sdbench import data
from sdbench.data.pipeline import shared_batches
from sdbench.data.source import SourceConfig
from tools import comparison


class NewMemory(shared_batches.SharedBatches):
    """New shared memory for each batch, which nobody has to copy out of."""

    def take(self, layout: shared_batches.Layout) -> tuple[dict[str, torch.Tensor], None]:
        """Tensors that are the receiver's own."""
        if torch.utils.data.get_worker_info() is None:
            return super().take(layout)
        return {name: shared_batches._share(*kind) for name, kind in layout.items()}, None


def make_reader(
    folder: Path, *, num_workers: int, reuse: bool, arguments: dict[str, Any]
) -> Callable[[], int]:
    """Make a function that reads one epoch and every value of it, after the first epoch."""
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

    def read() -> int:
        num_samples = 0
        for batch in loader:
            num_samples += len(batch["text_embedding"])
            for tensor in batch.values():
                tensor.view(torch.int16).amax()
        return num_samples

    read()
    return read


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the command line says."""
    parser = comparison.make_parser(__doc__, repeats=7, output="JSON file", needs_output=False)
    parser.add_argument("folder", type=Path, help="an MDS data set of latents")
    parser.add_argument("--image_size", type=int, default=512, help="pixels (default: 512)")
    parser.add_argument("--text_embedding_dim", type=int, default=1024, help="(default: 1024)")
    parser.add_argument("--batch_size", type=int, default=64, help="samples (default: 64)")
    parser.add_argument("--num_workers", type=int, default=2, help="(default: 2)")
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    arguments = {
        "image_size": flags.image_size,
        "text_embedding_dim": flags.text_embedding_dim,
        "device_batch_size": flags.batch_size,
    }
    ways = {"no workers": (0, True), "new memory": (flags.num_workers, False)}
    ways["slots"] = (flags.num_workers, True)
    readers = {
        name: make_reader(flags.folder, num_workers=number, reuse=reuse, arguments=arguments)
        for name, (number, reuse) in ways.items()
    }
    facts = {
        "what": "samples/s of MDS latents, one epoch each, every value touched by the trainer",
        **arguments,
        "num_workers": flags.num_workers,
    }
    result = comparison.time_readers(
        readers, baseline="new memory", unit="samples", repeats=flags.repeats
    )
    comparison.write_json(flags.output, facts | result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
