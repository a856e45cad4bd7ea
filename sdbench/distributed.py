"""Which rank is this, and what do the other ranks say?

The launchers (`composer`, `torchrun`, an operator) tell each process its place in the environment;
a plain `python benchmark.py` is rank 0 of 1.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The place of this process among all processes of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; unset means a single process."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    @property
    def num_nodes(self) -> int:
        """Machines in the run, each with the same number of ranks."""
        return self.world_size // self.local_world_size


def connect(ranks: Ranks, *, device_type: str, timeout_s: float = 300.0) -> None:
    """Join the process group, unless this process is alone.

    Args:
        ranks: The place of this process.
        device_type: ``cuda`` or ``cpu``; the backend is the one that Composer expects for it.
        timeout_s: How long a collective waits for the slowest rank before it fails.
    """
    if ranks.world_size == 1:
        return
    import torch

    if device_type == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    torch.distributed.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def disconnect() -> None:
    """Leave the process group, if there is one, together with the other ranks.

    Only after a good end: it waits for all of them.
    """
    import torch

    if not torch.distributed.is_initialized():
        return
    torch.distributed.barrier()
    # Right after a gather torch 2.7 may wait for ever: ending a gloo group holds the interpreter's
    # lock, and freeing the gather's tensors in gloo's thread asks for it. 6 of 43 runs hung so;
    # sleeping gives the lock to that thread, and none of 150 hung.
    time.sleep(0.1)
    torch.distributed.destroy_process_group()


def let_first_rank_end(ranks: Ranks, *, timeout_s: float = 10.0) -> None:
    """Wait on all ranks of a machine but its first, until a launcher that saw it end stops them.

    When a rank ends with an error the `composer` launcher stops the others and passes on the exit
    code of the first rank: that of the error only if that rank was not stopped itself.

    Args:
        ranks: The place of this process.
        timeout_s: When to go on all the same, because nobody stops this process.
    """
    if ranks.local_rank != 0:
        time.sleep(timeout_s)


def gather(value: T, ranks: Ranks) -> list[T]:
    """The value of every rank, in rank order, on every rank."""
    if ranks.world_size == 1:
        return [value]
    import torch

    values: list[T | None] = [None] * ranks.world_size
    torch.distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def broadcast(value: T, ranks: Ranks) -> T:
    """The value of rank 0, on every rank."""
    if ranks.world_size == 1:
        return value
    import torch

    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
