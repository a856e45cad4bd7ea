"""`NcclLog` reads from NCCL's log which network it uses between nodes.

When NCCL finds no plugin for a fast network, it uses TCP sockets at a fraction of the rate, without
an error. Only its log says which network it uses.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from sdbench.ranks.distributed import Ranks

# "NCCL INFO Using network AWS Libfabric", ncclNet's name in init.cc of NCCL 2.12 and newer.
USING_NETWORK = re.compile(r"NCCL INFO Using network (.+)")


class NcclLog:
    """NCCL's log of the first rank, unless the user has set NCCL_DEBUG."""

    def __init__(self, ranks: Ranks, *, device_type: str) -> None:
        """Turn the log on before NCCL starts, on the first rank of GPUs on several nodes."""
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
