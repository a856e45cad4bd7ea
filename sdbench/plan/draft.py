"""`Draft`: a plan whose open settings are being chosen."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sdbench import data
from sdbench.measure.hardware import Machine
from sdbench.models.architecture import Architecture
from sdbench.ranks.distributed import Ranks
from sdbench.settings.request import Request
from sdbench.settings.rules import settle
from sdbench.settings.setting import GPU

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass
class Draft:
    """An unfinished plan of any task, for the machine and the rank of this process.

    Attributes:
        config: The request's config, with the values chosen so far.
        chosen: The reason for each setting that the program chose.
        notes: Sentences that the user has to read.
        architecture: The model, where the task has one.
    """

    request: Request[Any]
    config: Any
    machine: Machine
    ranks: Ranks
    chosen: dict[str, str]
    notes: list[str]
    architecture: Architecture = dataclasses.field(init=False)

    @classmethod
    def begin(cls, request: Request[Any], *, machine: Machine, ranks: Ranks) -> Self:
        """Check a request by the rules of its settings, and begin a plan with it."""
        config, reasons = settle(request, machine=machine, ranks=ranks)
        return cls(request, config, machine, ranks, reasons, [*request.translation.notes])

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.machine.device_type == GPU

    def choose(self, name: str, value: Any, reason: str) -> None:
        """Set a setting that the user left open or set to ``auto``."""
        self.config = dataclasses.replace(self.config, **{name: value})
        self.chosen[name] = reason

    def choose_if_open(self, name: str, value: Any, reason: str) -> None:
        """Set a setting that is None."""
        if getattr(self.config, name) is None:
            self.choose(name, value, reason)

    def choose_format(self) -> None:
        """Choose the format of the data; refuse settings that contradict each other."""
        config = self.config
        data_format = data.resolve_format(config)
        if data_format != config.data_format:
            given = config.use_synth_data or config.remote or config.local or config.streams
            reason = "from the data flags" if given else "neither --remote nor --local was given"
            self.choose("data_format", data_format, reason)
