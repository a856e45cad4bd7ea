"""`Draft`: a run while its open settings are being chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from sdbench.measure.hardware import Machine
from sdbench.models.architecture import Architecture
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import BenchmarkConfig, Request
from sdbench.settings.setting import GPU


@dataclasses.dataclass
class Draft:
    """What is known of a run so far.

    Attributes:
        request: What the user asked for.
        config: That, with what has been chosen since.
        machine: The machine at hand.
        ranks: The place of this process among the ranks.
        architecture: What is trained.
        chosen: Setting to reason, for each value that the program chose.
        notes: Sentences the user must read.
    """

    request: Request[BenchmarkConfig]
    config: BenchmarkConfig
    machine: Machine
    ranks: Ranks
    architecture: Architecture
    chosen: dict[str, str]
    notes: list[str]

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.machine.device_type == GPU

    def choose(self, name: str, value: Any, reason: str) -> None:
        """Fill in a setting that the user left open, or let the program choose."""
        self.config = dataclasses.replace(self.config, **{name: value})
        self.chosen[name] = reason
