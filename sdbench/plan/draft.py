"""`Draft`: a plan whose open settings are being chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from sdbench.measure.hardware import Machine
from sdbench.models.architecture import Architecture
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.request import Request
from sdbench.settings.setting import GPU


@dataclasses.dataclass
class Draft:
    """An unfinished plan.

    Attributes:
        request: The user's request.
        config: The request's config, with the values chosen so far.
        machine: The machine of this process.
        ranks: The rank of this process.
        architecture: The model to train.
        chosen: The reason for each setting that the program chose.
        notes: Sentences that the user has to read.
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
        """Set a setting that the user left open or set to ``auto``."""
        self.config = dataclasses.replace(self.config, **{name: value})
        self.chosen[name] = reason
