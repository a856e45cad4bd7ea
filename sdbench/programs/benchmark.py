"""The program benchmark.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence

DESCRIPTION = "Measure how fast this machine trains Stable Diffusion, and write a record of it."
EPILOG = """\
examples:
  composer benchmark.py --use_synth_data --device_train_microbatch_size 8
      the U-Net of Stable Diffusion 2 base on synthetic images, on every GPU here or on the CPU
  composer benchmark.py --use_ema --use_synth_data --device_train_microbatch_size 4
      the same with a moving average of the weights
  composer benchmark.py --remote my-mds-folder
      on real images; `python -m sdbench convert` makes the folder
  composer -n 2 benchmark.py --model_name tiny --use_synth_data
      a miniature in seconds, on two processes
  python benchmark.py --preset seed --print_config
      what a run would use, and who chose it
  torchrun --nproc_per_node gpu benchmark.py --use_synth_data --json > result.json
      the result for a program: its row of runs.csv, null where a figure is unknown

exit codes: 0 ok, 1 the run failed (its record says why), 2 bad input, 130 stopped
"""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m sdbench benchmark") -> int:
    """Run the benchmark with these arguments, or those of the process; returns the exit code."""
    # Not before: a stop signal may arrive meanwhile.
    from sdbench.launch.ray_job import launch_ranks
    from sdbench.run import TASKS
    from sdbench.run.recorded import parse_recorded
    from sdbench.run.runner import run

    parse = functools.partial(
        parse_recorded,
        "benchmark",
        description=DESCRIPTION,
        epilog=EPILOG,
        prog=prog,
        answers_json=True,
    )
    return run(TASKS["benchmark"], parse, argv, launch=launch_ranks)
