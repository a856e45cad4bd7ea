"""Measure how fast a data source alone feeds a trainer.

    python data.py --use_synth_data
    python data.py --remote my-mds-folder --num_workers 8
    python data.py --remote my-mds-folder --emulate_step_seconds 0.5
    python data.py --remote my-mds-folder --target_images_per_second 800
    python data.py --engine ray --remote my-parquet-folder --num_decoders 4 --num_encoders 1

Also the place to import the data set classes from:
``from data import StreamingLAIONDataset, SyntheticImageCaptionDataset``.
"""

# PYTHON_ARGCOMPLETE_OK: a shell may start this to complete a command line.

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from sdbench.base.output import protected_output
from sdbench.base.stop import run_program, stoppable
from sdbench.programs import data

DATASETS = {
    "StreamingLAIONDataset": "sdbench.data.batches.mds",
    "SyntheticImageCaptionDataset": "sdbench.data.batches.synthetic",
}


def __getattr__(name: str) -> type:
    """Import a data set class when it is asked for: each needs torch, one needs streaming."""
    if name not in DATASETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(DATASETS[name]), name)


@protected_output()
@stoppable
def main(argv: Sequence[str] | None = None) -> int:
    """Measure with these arguments, or those of the process; returns the exit code."""
    return data.main(argv, prog="data.py")


if __name__ == "__main__":
    run_program(main)
