"""Times reading pictures, by this suite and by mosaicml/diffusion-benchmark's data set class.

    python tools/compare_datasets.py my-mds --image_size 512 --output comparison.json

Both read the whole data set in turn, several times, in one process with one thread and no workers.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader

# A script's own folder is on the path, the repository is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sdbench import data
from sdbench.data.source import SourceConfig
from tests.reference.diffusion_benchmark_dataset import ReferenceDataset, load_slow_tokenizer
from tools import comparison

BATCH_SIZE = 32


def make_readers(folder: Path, *, image_size: int, scratch: Path) -> dict[str, Callable[[], int]]:
    """Make a function for each data set class that reads all and returns the number of samples."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the command line says."""
    parser = comparison.make_parser(__doc__, repeats=5, output="JSON file", needs_output=False)
    parser.add_argument("folder", type=Path, help="an MDS data set with the columns jpg, caption")
    parser.add_argument("--image_size", type=int, default=512, help="pixels (default: 512)")
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        readers = make_readers(flags.folder, image_size=flags.image_size, scratch=Path(scratch))
        for read in readers.values():
            read()
        result = comparison.time_readers(
            readers, baseline="reference", unit="images", repeats=flags.repeats
        )
    facts = {
        "what": "images/s of one core without workers, one pass over the data set each",
        "image_size": flags.image_size,
        "batch_size": BATCH_SIZE,
    }
    comparison.write_json(flags.output, facts | result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
