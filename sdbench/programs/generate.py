"""The program generate.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence

DESCRIPTION = "Draw pictures from prompts; stopped at any moment, the same command goes on."
EPILOG = """\
examples:
  python generate.py --model_name my-model --prompts "a cat" --folder cats --num_images_per_prompt 4
      four pictures, and grid.png with all of them
  torchrun --nproc_per_node 8 generate.py --model_name my-model --prompt_file captions.csv \\
      --folder drawn --scheduler dpm --num_steps 20 --device_batch_size 16
      a picture for each caption of a table, on 8 GPUs
  python generate.py --model_name my-model --prompts "a beach" --folder sea --width 640 --height 384
      a landscape

Each picture has a seed of its own, which prompts.csv tells: any number of ranks draws the same
pictures, another batch size the same up to rounding.

exit codes: 0 ok, 1 the run failed (generate.json says why), 2 bad input, 130 stopped
"""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m sdbench generate") -> int:
    """Draw with these arguments, or those of the process; returns the exit code."""
    # Not before: a stop signal may arrive meanwhile.
    from sdbench.drawing.generate import GenerateFlags
    from sdbench.run import TASKS
    from sdbench.run.runner import run
    from sdbench.settings.request import parse

    parse_flags = functools.partial(
        parse, GenerateFlags, description=DESCRIPTION, epilog=EPILOG, prog=prog
    )
    return run(TASKS["generate"], parse_flags, argv)
