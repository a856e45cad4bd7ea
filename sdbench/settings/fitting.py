"""`MemorySettings`, the settings of the command memory."""

from __future__ import annotations

import dataclasses

from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.kinds import POSITIVE, POSITIVE_NUMBER, list_of
from sdbench.settings.setting import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorySettings(BenchmarkConfig):
    """Settings of memory: its own, and those of the run that is estimated."""

    gpu_memory_gib: tuple[float, ...] | None = setting(
        list_of(POSITIVE_NUMBER),
        None,
        "memory of the GPUs in GiB, as torch tells it (default: of those with 16 to 288 GB)",
        is_everyday=True,
    )
    num_gpus: int = setting(
        POSITIVE, 1, "GPUs of one machine that share the global batch", is_everyday=True
    )
