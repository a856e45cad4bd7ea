"""The program train.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence

DESCRIPTION = "Train Stable Diffusion: as benchmark.py does, for as long as you say, and kept."
EPILOG = """\
examples:
  python train.py --model_name tiny --remote my-pictures --max_duration 300ba --run_name first
      a miniature on a folder of pictures and captions
  python train.py --config configs/laptop.yaml --remote my-pictures
      settings from a file; the same command goes on after a stop, from the newest checkpoint
  torchrun --nproc_per_node 8 train.py config=open-diffusion.yaml dataset.params.path=my-tars
      a config file of mlfoundations/open-diffusion; --print_config shows it in this suite's flags
  composer train.py --remote my-mds --max_duration 550000ba --save_every_batches 5000 --use_ema
      on every GPU of this machine

exit codes: 0 ok, 1 the run failed (its record says why), 2 bad input, 130 stopped
"""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m sdbench train") -> int:
    """Train a model with these arguments, or those of the process; returns the exit code."""
    # Not before: a stop signal may arrive meanwhile.
    from sdbench.launch.ray_job import launch_ranks
    from sdbench.run import TASKS
    from sdbench.run.recorded import parse_recorded
    from sdbench.run.runner import run

    parse = functools.partial(
        parse_recorded, "train", description=DESCRIPTION, epilog=EPILOG, prog=prog
    )
    return run(TASKS["train"], parse, argv, launch=launch_ranks)
