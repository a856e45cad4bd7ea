"""Which ranks are there, and what do they tell each other?

Findings travel through a store of keys and values and not through collectives, so that a rank that
is missing, slow or dead is named by the first one instead of stopping all of them.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from typing import Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.ranks.distributed import Ranks, hosts_store, open_store

# As in multi-node/2.train.sbatch: jobs that share a node get ports of their own, below those that
# Linux gives to clients.
FIRST_PORT, NUM_PORTS = 10_000, 20_000


def find_ranks() -> Ranks:
    """The place of this process, told by a launcher, or by srun where there is no launcher.

    What srun says is written into the environment under the names that launchers use.

    Raises:
        ConfigError: There are several, and nothing says where the first one is.
    """
    # srun alone sets these; a batch script and a shell in an allocation have other names.
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        os.environ.update(_read_slurm())
    ranks = Ranks.from_environment()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if ranks.world_size > 1 and not os.environ.get(name):
            raise ConfigError(
                f"there are {ranks.world_size} ranks, and nothing says where the first one is",
                value=f"no {name}",
                allowed="the address of the first node, and a free port of it from 1024 on",
                flag=name,
            )
    return ranks


def _read_slurm() -> dict[str, str]:
    step = os.environ
    tasks_of_nodes = expand_counts(step["SLURM_STEP_TASKS_PER_NODE"])
    place = {
        "RANK": step["SLURM_PROCID"],
        "WORLD_SIZE": step["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": step["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_of_nodes[int(step["SLURM_NODEID"])]),
    }
    if "MASTER_ADDR" not in step:
        place["MASTER_ADDR"] = _find_first_node(step["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" not in step:
        place["MASTER_PORT"] = str(FIRST_PORT + int(step["SLURM_JOB_ID"]) % NUM_PORTS)
    return place


def expand_counts(text: str) -> list[int]:
    """Slurm's short form of a list of numbers: ``2(x3),1`` is 2, 2, 2, 1."""
    counts = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts


def _find_first_node(nodes: str) -> str:
    """Slurm's own address of the first node: one that the others reach, also without DNS."""
    if shutil.which("scontrol") is None:
        raise ConfigError(
            "srun has started several tasks, and nothing says where the first one is",
            value=f"nodes {nodes}, and no scontrol to ask",
            allowed="the address of the first node, the same for all tasks",
            flag="MASTER_ADDR",
        )
    first = _ask_slurm("hostnames", nodes).split()[0]
    return re.findall(r"NodeAddr=(\S+)", _ask_slurm("node", "--oneliner", first))[0]


def _ask_slurm(*arguments: str) -> str:
    return subprocess.run(
        ["scontrol", "show", *arguments], check=True, capture_output=True, text=True
    ).stdout


class Meeting:
    """A board on which each rank writes one value per topic, and which all can read."""

    def __init__(self, ranks: Ranks, *, timeout_s: float) -> None:
        """Find the board, which the first rank or the launcher has.

        Args:
            ranks: The place of this process.
            timeout_s: How long to look for it.

        Raises:
            RunError: It is not there.
        """
        self.ranks = ranks
        self.store = _open_store(ranks, timeout_s=timeout_s)

    def say(self, topic: str, value: Any = None) -> None:
        """Write what this rank has to say."""
        self.store.set(f"{topic}/{self.ranks.rank}", json.dumps(value))

    def hear(self, topic: str, ranks: Iterable[int], *, timeout_s: float) -> dict[int, Any]:
        """Wait for what others say.

        Args:
            topic: About what.
            ranks: Whom to wait for.
            timeout_s: How long to wait for all of them together.

        Returns:
            Rank to what it said; those that said nothing in time are left out.
        """
        end_s = time.monotonic() + timeout_s
        heard = {}
        for rank in ranks:
            key = f"{topic}/{rank}"
            patience = datetime.timedelta(seconds=max(end_s - time.monotonic(), 0.01))
            try:
                self.store.wait([key], patience)
                heard[rank] = json.loads(self.store.get(key))
            except RuntimeError:  # as torch tells of a wait in vain, or of a store that has died
                continue
        return heard


def _open_store(ranks: Ranks, *, timeout_s: float) -> Any:
    import torch

    if ranks.world_size == 1:
        return torch.distributed.HashStore()
    try:
        return open_store("doctor", is_host=hosts_store(ranks), timeout_s=timeout_s)
    except RunError as problem:  # the bound has another name here
        raise RunError(str(problem).replace("--dist_timeout", "--timeout_s")) from None
