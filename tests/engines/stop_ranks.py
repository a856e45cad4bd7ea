"""Two gloo ranks that one of them ends, with each engine; saves how each rank ended.

Usage: python stop_ranks.py FOLDER
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2


class ReadingAtStep4:
    """Reads the loss of the fourth step alone, as a progress line may."""

    def loop_begins(self):
        """Nothing to do."""

    def step_ends(self, *, index, loss, **_):
        """Read, or leave the loss where it is."""
        if index == 3:
            loss()


def train(engine, fault, *, rank):
    """Name of the exception that ended the run, and the steps that the rank has trained."""
    from sdbench.base.errors import RunError
    from sdbench.base.stop import Terminated, stop_signals_raise
    from sdbench.engines import load_engine
    from tests.engines.linear import make_config, make_parts, mean_squared_error, watch_with

    num_losses = 0

    def loss(output):
        nonlocal num_losses
        num_losses += 1
        value = mean_squared_error(output)
        # Two micro-batches a step: this is the third one.
        if rank == 1 and num_losses == 5:
            if fault == "nan":
                return value * float("nan")
            os.kill(os.getpid(), signal.SIGTERM)
        return value

    watch = watch_with(*([ReadingAtStep4()] if rank == 0 else []))
    job = make_parts(num_ranks=NUM_RANKS, rank=rank, loss=loss)
    try:
        with stop_signals_raise():
            load_engine(engine)(job, make_config(), watch)
    except (RunError, Terminated) as error:
        return type(error).__name__, watch.timer.num_steps


def run_rank(rank, folder):
    """Join the other rank and train all cases."""
    import torch

    from sdbench.engines import ENGINES

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(NUM_RANKS))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS
    )
    ends = {
        engine: {fault: train(engine, fault, rank=rank) for fault in ("signal", "nan")}
        for engine in ENGINES
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(ends))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(folder):
    """Import everything once, then fork the ranks."""
    import torch

    from sdbench.engines import ENGINES, load_engine

    for engine in ENGINES:
        load_engine(engine)
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode) for rank in ranks)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(Path(sys.argv[1])))
