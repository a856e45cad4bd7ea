"""The program data.py: measure how fast a data source alone feeds a trainer."""

from __future__ import annotations

import functools
from collections.abc import Sequence

DESCRIPTION = "Measure how many images a second a data source alone delivers, and record it."
EPILOG = """\
examples:
  python data.py --use_synth_data
      the most that handing over batches costs
  python data.py --remote data/pairs --image_size 512 --batch_size 32 --num_workers 8
      any data set that benchmark.py trains on
  python data.py --remote data/pairs --emulate_step_seconds 0.5
      would a trainer with such steps wait for its data?
  python data.py --remote data/pairs --dry_run
      what a run would use, and who chose it
  python data.py --remote data/pairs --target_images_per_second 800
      is it enough for 8 GPUs of 100 images/s, and how many workers does it take?
  python data.py --engine ray --remote data/laion-parquet --image_size 256 --batch_size 4096 \\
      --num_ray_workers 32 --num_decoders 192 --num_encoders 48 --emulate_step_seconds 0.9227
      do these decoders and encoders of a Ray cluster feed 32 GPUs with such steps?

exit codes: 0 ok, 1 the run failed (its record says why), 2 bad input, 130 stopped
"""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m sdbench data") -> int:
    """Measure with these arguments, or those of the process; returns the exit code."""
    # Not before: a stop signal may arrive meanwhile.
    from sdbench.launch.ray_job import launch_ranks
    from sdbench.run import TASKS
    from sdbench.run.recorded import parse_recorded
    from sdbench.run.runner import run

    parse_feed = functools.partial(
        parse_recorded, "feed", description=DESCRIPTION, epilog=EPILOG, prog=prog
    )
    return run(TASKS["feed"], parse_feed, argv, launch=launch_ranks)
