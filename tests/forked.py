"""Ranks as forked processes, which saves each of them the import of torch."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.ports import free_port
from tests.waiting import wait_for

NUM_RANKS = 2


@contextlib.contextmanager
def forked_ranks(
    program: Callable[[], int], folder: Path, *, num_ranks: int = NUM_RANKS, num_nodes: int = 1
) -> Iterator[list[BaseProcess]]:
    """Ranks that run a program in sessions of their own, until it or the context ends.

    Each calls the program, with its place in the environment as a launcher tells it, which returns
    the rank's exit code; `log_of` has what they print. This machine passes for `num_nodes` nodes.
    Yields the processes, by rank.
    """
    port = free_port()
    ranks_per_node = num_ranks // num_nodes
    context = multiprocessing.get_context("fork")
    ranks = []
    try:
        for rank in range(num_ranks):
            place = {
                "RANK": rank,
                "WORLD_SIZE": num_ranks,
                "LOCAL_RANK": rank % ranks_per_node,
                "LOCAL_WORLD_SIZE": ranks_per_node,
                "NODE_RANK": rank // ranks_per_node,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            log = log_of(folder, rank)
            log.touch()
            ranks.append(context.Process(target=_be_rank, args=(program, place, log)))
            ranks[-1].start()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def log_of(folder: Path, rank: int) -> Path:
    """What a rank prints."""
    return folder / f"rank{rank}.log"


def wait_for_step(log: Path) -> None:
    """Wait until a run has ended its first step, by what it prints."""
    wait_for(lambda: "step 1/" in log.read_text(), what="the first step", within_s=240, log=log)


def exit_codes(ranks: list[BaseProcess], *, timeout_s: float = 60) -> list[int | None]:
    """Wait for the ranks; None stands for one that has not ended in time."""
    for rank in ranks:
        rank.join(timeout_s)
    return [rank.exitcode for rank in ranks]


def codes_of(
    program: Callable[[], int], folder: Path, *, timeout_s: float = 60, **ranks_and_nodes: int
) -> list[int | None]:
    """Run a program in ranks, as `forked_ranks` does, until they end; their exit codes."""
    with forked_ranks(program, folder, **ranks_and_nodes) as ranks:
        return exit_codes(ranks, timeout_s=timeout_s)


def run_in_group(
    run: Callable[[int], None], folder: Path, *, num_ranks: int = NUM_RANKS, num_nodes: int = 1
) -> None:
    """Call `run(rank)` on each of the ranks, which have joined a gloo group."""
    from sdbench.engines import ENGINES, load_engine

    for engine in ENGINES:
        load_engine(engine)  # here, and not once in each rank

    def program() -> int:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        run(torch.distributed.get_rank())
        # The group is left as it is: destroying it right after a gather may deadlock (torch 2.7).
        torch.distributed.barrier()
        return 0

    codes = codes_of(program, folder, timeout_s=240, num_ranks=num_ranks, num_nodes=num_nodes)
    logs = [log_of(folder, rank).read_text() for rank in range(num_ranks)]
    assert codes == [0] * num_ranks, logs


def _be_rank(program: Callable[[], int], place: dict[str, object], log: Path) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed pytest leaves no rank
    os.environ |= {name: str(value) for name, value in place.items()}
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    os._exit(program())
