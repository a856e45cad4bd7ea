"""Two gloo ranks that one of them ends, with each engine; saves how each rank ended.

Usage: python stop_ranks.py FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
    from tests.engines.forked_ranks import NUM_RANKS
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
    """Train all cases."""
    from sdbench.engines import ENGINES

    ends = {
        engine: {fault: train(engine, fault, rank=rank) for fault in ("signal", "nan")}
        for engine in ENGINES
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.engines.forked_ranks import run_ranks

    sys.exit(run_ranks(run_rank, Path(sys.argv[1])))
