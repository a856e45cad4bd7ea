"""Gives the rank of this process, and connects the ranks of a run.

Launchers (`composer`, `torchrun`, a Kubernetes operator) set RANK and WORLD_SIZE in the
environment; a plain `python benchmark.py` is rank 0 of 1.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sdbench.base.errors import ConfigError, RunError, first_line
from sdbench.ranks.ray_cluster import RAY_RESTARTS

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
# How often the store is asked for missing ranks, and knocked at before it is there. torch would
# wait for both without a look at signals, and a launcher have to kill the rank.
PERIOD_S, KNOCK_S = 0.1, 5.0

# A gloo group where the default group is NCCL's; None where the default group is gloo's.
_host_group: Any = None


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of ranks, in the run and on this node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a single process has none."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    @property
    def num_nodes(self) -> int:
        """Nodes of the run, each with the same number of ranks."""
        return self.world_size // self.local_world_size

    def for_record(self) -> dict[str, int]:
        """The numbers of ranks and nodes as a record has them."""
        return {
            "world_size": self.world_size,
            "num_nodes": self.num_nodes,
            "ranks_per_node": self.local_world_size,
        }


ALONE = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)


def num_tasks_without_launcher() -> int:
    """Number of processes that srun has started without a launcher, this one included."""
    # srun alone sets the variable; a batch script and a shell in an allocation have other names.
    return 1 if "RANK" in os.environ else int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def refuse_tasks_without_launcher() -> None:
    """Refuse to be one of several processes of srun, each of which would train alone."""
    num_tasks = num_tasks_without_launcher()
    if num_tasks > 1:
        raise ConfigError(
            "srun has started processes that know nothing of each other",
            value=f"{num_tasks} tasks without RANK",
            allowed="one task on each node, which starts torchrun or composer, as "
            "multi-node/2.train.sbatch has it; RANK=0 for a run of each task's own",
            flag="--ntasks of srun, or RANK (in the environment)",
        )


def num_restarts() -> int:
    """How often Slurm, torchrun or Ray has restarted this process.

    torchrun counts restarts that ranks of its own node caused: that of the run is the largest.
    """
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", RAY_RESTARTS)
    return sum(int(os.environ.get(name, "0")) for name in names)


def connect(
    ranks: Ranks, *, device_type: str, timeout_s: float, patience_s: float | None = None
) -> None:
    """Join the process group of NCCL (``cuda``) or gloo (``cpu``), if there are several ranks.

    Here ranks wait `timeout_s` for each other, and in each later collective `patience_s`, by
    default `timeout_s` too. A missing rank is a RunError.
    """
    if ranks.world_size == 1:
        return
    import torch

    if device_type == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    timeout = datetime.timedelta(seconds=patience_s or timeout_s)
    if ranks.num_nodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not torch.distributed.is_initialized():  # Ray Train has connected its workers
        # torchrun keeps one store for all restarts; else the first rank runs it.
        is_host = ranks.rank == 0 and not is_store_of_torchrun()
        store = open_store("ranks", ranks, is_host=is_host, timeout_s=timeout_s)
        _wait_for_all(store, ranks, timeout_s=timeout_s)
        torch.distributed.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
        )
    if device_type == "cuda":
        global _host_group
        try:
            _host_group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise RunError(
                "the hosts cannot talk to each other beside their GPUs; GLOO_SOCKET_IFNAME names "
                f"the network interface for that ({first_line(error)})"
            ) from None


def open_store(name: str, ranks: Ranks, *, is_host: bool, timeout_s: float) -> Any:
    """Open a new connection to the ranks' store, for keys with the prefix `name`.

    The ranks of one node meet on the loopback, which no other machine reaches. Only torchrun's own
    store listens on all networks of the machine. A store that does not answer, or whose port cannot
    be opened, is a RunError.
    """
    import torch

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener: dict[str, Any] = {}
    try:
        if ranks.num_nodes == 1 and not is_store_of_torchrun():
            address = LOOPBACK
            if is_host:
                # torch 2.7 takes a socket that is bound already only without libuv.
                server = socket.create_server((LOOPBACK, port))
                listener = {"master_listen_fd": server.detach(), "use_libuv": False}
        if not is_host:
            _wait_for_listener(address, port, timeout_s=timeout_s)
        store = torch.distributed.TCPStore(
            address,
            port,
            is_master=is_host,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            **listener,
        )
    except (RuntimeError, OSError) as error:
        if is_host:
            raise RunError(
                f"port {port} cannot be opened for the ranks to meet at; another one is set by "
                f"MASTER_PORT or --master_port ({first_line(error)})"
            ) from None
        raise RunError(
            f"nothing answered within {timeout_s:g} s (--dist_timeout) at {address}:{port}, where "
            f"rank 0 should be ({first_line(error)})",
            status="timeout",
        ) from None
    # torchrun's store outlives a restart, so keys get the number of restarts. Each node counts its
    # own: all ranks of one node agree, and with several nodes start-ranks.sh uses no such store.
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if is_store_of_torchrun() else "0"
    return torch.distributed.PrefixStore(f"sdbench/{attempt}/{name}", store)


def is_store_of_torchrun() -> bool:
    """Whether torchrun runs the ranks' store; else the first rank does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_for_all(store: Any, ranks: Ranks, *, timeout_s: float) -> None:
    """Wait until every rank has connected; the error names the ranks that have not."""
    everyone = [f"here/{rank}" for rank in range(ranks.world_size)]
    end_s = time.monotonic() + timeout_s
    store.set(everyone[ranks.rank], "")
    num_here = store.add("here", 1)
    while num_here < ranks.world_size and time.monotonic() < end_s:
        time.sleep(PERIOD_S)
        num_here = store.add("here", 0)
    if num_here == ranks.world_size:
        return
    missing = [rank for rank, key in enumerate(everyone) if not store.check([key])]
    raise RunError(
        f"within {timeout_s:g} s (--dist_timeout) {name_ranks(missing, ranks)} did not come",
        status="timeout",
    )


def _wait_for_listener(address: str, port: int, *, timeout_s: float) -> None:
    """Wait until something listens there; an OSError after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=KNOCK_S).close()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(PERIOD_S)
        else:
            return


def name_ranks(numbers: Sequence[int], ranks: Ranks) -> str:
    """Ranks and their nodes in words."""
    return ", ".join(f"rank {rank} on node {rank // ranks.local_world_size}" for rank in numbers)


def is_about_connections(error: BaseException) -> bool:
    """Whether an error is about the connection to other ranks, one of which may be the cause."""
    import torch

    message = str(error)
    return isinstance(error, torch.distributed.DistError) or "gloo" in message or "NCCL" in message


def disconnect() -> None:
    """Leave the process group, if there is one; waits for all ranks, so not after an error."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return
    torch.distributed.barrier()
    # Right after a gather torch 2.7 may deadlock: destroying a gloo group holds Python's lock, and
    # gloo's thread needs it to free the gather's tensors. 6 of 43 runs hung so; sleeping gives the
    # lock to that thread, and none of 150 hung.
    time.sleep(0.1)
    torch.distributed.destroy_process_group()


def let_first_rank_end(ranks: Ranks, *, timeout_s: float = 10.0) -> None:
    """Wait on all ranks of a node but the first, until the launcher stops this process.

    When a rank fails, the `composer` launcher stops the others and returns the exit code of the
    first rank, which has to end by itself. Without a launcher the wait ends after `timeout_s`.
    """
    if ranks.local_rank != 0 and RAY_RESTARTS not in os.environ:  # Ray waits for all
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's, who then tells no more
        time.sleep(timeout_s)


def gather(value: T, ranks: Ranks) -> list[T]:
    """The value of every rank, in rank order, on every rank."""
    if ranks.world_size == 1:
        return [value]
    import torch

    values: list[T | None] = [None] * ranks.world_size
    torch.distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def gather_numbered(part: Mapping[int, T], ranks: Ranks) -> list[T]:
    """The values of all ranks in the order of their numbers, on every rank."""
    merged: dict[int, T] = {}
    for of_rank in gather(part, ranks):
        merged |= of_rank
    return [merged[number] for number in sorted(merged)]


def broadcast(value: T, ranks: Ranks) -> T:
    """The value of rank 0, on every rank."""
    if ranks.world_size == 1:
        return value
    import torch

    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def maximum_on_hosts(number: int, ranks: Ranks) -> int:
    """The largest number of all ranks, on every rank; does not use or wait for a GPU."""
    if ranks.world_size == 1:
        return number
    import torch

    largest = torch.tensor(number)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=_host_group)
    return int(largest)
