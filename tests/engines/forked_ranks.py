"""Two gloo ranks, forked when all engines have been imported: that is what keeps it short."""

from __future__ import annotations

import datetime
import multiprocessing
import os

NUM_RANKS = 2


def _run_rank(run, rank, folder):
    import torch

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(NUM_RANKS))
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    run(rank, folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_ranks(run, folder):
    """Call `run(rank, folder)` on each of two ranks that have joined.

    Returns:
        The exit code.
    """
    import torch
    import torch.distributed.fsdp
    import torch.distributed.optim

    from sdbench.engines import ENGINES, load_engine

    for engine in ENGINES:
        load_engine(engine)
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_run_rank, args=(run, rank, folder)) for rank in range(NUM_RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode) for rank in ranks)
