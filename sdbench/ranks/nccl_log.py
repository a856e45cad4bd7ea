"""The network that NCCL uses between machines, read from its log.

NCCL falls back to TCP sockets when it finds no plugin for the faster one, without an error and at a
fraction of the rate. It says which network it took in its own log only, which is therefore written
to a file and read.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from sdbench.ranks.distributed import Ranks

# What NCCL calls a network without EFA or InfiniBand.
SOCKETS = "Socket"
# "NCCL INFO Using network AWS Libfabric", ncclNet's name in init.cc of NCCL 2.12 and newer.
USING_NETWORK = re.compile(r"NCCL INFO Using network (.+)")


class NcclLog:
    """NCCL's log of this rank, where NCCL is used between machines and the user logs nothing."""

    def __init__(self, ranks: Ranks, *, device_type: str) -> None:
        """Have NCCL write its log. To be called before it starts.

        Args:
            ranks: The place of this process; only the first rank's log is read.
            device_type: ``cuda`` or ``cpu``.
        """
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        is_wanted = device_type == "cuda" and ranks.num_nodes > 1 and ranks.rank == 0
        if is_wanted and "NCCL_DEBUG" not in os.environ:
            self._folder = tempfile.TemporaryDirectory(prefix="nccl-")
            os.environ["NCCL_DEBUG"] = "INFO"
            os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")
            os.environ["NCCL_DEBUG_FILE"] = f"{self._folder.name}/log"

    def read_network(self) -> str | None:
        """NCCL's name of the network: ``AWS Libfabric``, ``IB``, ``Socket``; None if unknown."""
        if self._folder is None:
            return None
        log = Path(self._folder.name, "log")
        found = USING_NETWORK.search(log.read_text(errors="replace")) if log.exists() else None
        return None if found is None else found[1].strip()
