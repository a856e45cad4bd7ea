"""The command `memory`: the largest micro-batch of each recipe on each GPU, and what fills it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from sdbench.base.errors import EXIT_OK, ConfigError
from sdbench.base.output import results_only_on_stdout
from sdbench.settings.fitting import MemorySettings
from sdbench.settings.request import parse

DESCRIPTION = """\
Tell beforehand what fits a GPU: the largest micro-batch of each recipe by memory of the GPU, what
the memory of a step is made of, and what each flag saves. Takes the flags of benchmark.py, which
hold for every recipe; with one that a recipe sets, such as --lora_rank, only what is given is told.
It needs no GPU, no weights and no data: a step is replayed on tensors without content, and every
allocation is counted. That takes minutes for a real model, the first time; of some models the steps
of these recipes, at the model's own resolution, were replayed beforehand, which the answer tells
(sdbench/forecast/known_steps.json). A micro-batch fits if its estimate is at most 90% of the
memory, as with --device_train_microbatch_size auto.
"""
EPILOG = """\
examples:
  python -m sdbench memory --model_name tiny
      a miniature in seconds
  python -m sdbench memory --model_name sdxl --latents precomputed
      what trains SDXL at 1024 px on which GPU
  python -m sdbench memory --model_name flux-schnell --latents precomputed --lora_rank 16
      LoRA alone, with what each further flag saves
  python -m sdbench memory --model_name sd2-base --gpu_memory_gib 22.2 --num_gpus 4
      other GPUs: their memory in GiB as torch tells it, and how many share the global batch
  python -m sdbench memory --model_name tiny --json
      for a program: the same figures, unrounded

The estimate counts tensors. CUDA's context and the allocator's losses are constants that were not
measured: in four configurations on one H200 the estimate was 3 % below to 21 % above what torch
reserved.

exit codes: 0 ok, 2 bad input
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print what fits; return the exit code."""
    request = parse(
        MemorySettings,
        argv,
        prog="python -m sdbench memory",
        description=DESCRIPTION,
        epilog=EPILOG,
        takes_file=True,
        answers_json=True,
    )
    if request.print_config:
        raise ConfigError(
            "memory makes no run whose settings could be printed",
            value="--print_config",
            allowed="no such flag; benchmark.py has it",
            flag="--print_config or --dry_run",
        )
    from sdbench.forecast import memory_tables  # with torch

    with results_only_on_stdout() if request.json else contextlib.nullcontext() as show:
        needs, first = memory_tables.find_needs(request)
        levers = memory_tables.list_levers(first)
        if show is None:
            memory_tables.print_needs(needs)
            memory_tables.print_levers(needs, levers)
        else:
            show(json.dumps({**needs, "levers": list(levers)}, indent=2, allow_nan=False))
    return EXIT_OK
