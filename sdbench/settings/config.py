"""`BenchmarkConfig`, the settings of benchmark.py, and how its command line is read."""

from __future__ import annotations

import dataclasses
import functools

from sdbench.settings.computing import ComputingSpeedups
from sdbench.settings.lora import LoraSettings
from sdbench.settings.measuring import LoggingSettings, MeasuringSettings, RunSettings
from sdbench.settings.online import OnlineSettings
from sdbench.settings.parallel import UpdatingSpeedups
from sdbench.settings.ray import RaySettings
from sdbench.settings.request import parse
from sdbench.settings.setting import SPEED, declarations, presets_of
from sdbench.settings.subject import SubjectSettings
from sdbench.settings.training import BatchSettings, ModelSettings, UpdateSettings


# A dataclass takes the fields of its last base first: from the bottom up, in the order of the help.
@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(
    LoggingSettings,
    UpdatingSpeedups,
    ComputingSpeedups,
    UpdateSettings,
    OnlineSettings,
    BatchSettings,
    LoraSettings,
    ModelSettings,
    SubjectSettings,
    MeasuringSettings,
    RaySettings,
    RunSettings,
):
    """Everything that decides a run. None means: chosen for the machine, then printed."""


SETTINGS = declarations(BenchmarkConfig)
PRESETS = presets_of(SETTINGS)
SPEED_UPS = {name: declared for name, declared in SETTINGS.items() if declared.group == SPEED}
# Reads the command line of benchmark.py, as `request.parse`.
parse_request = functools.partial(parse, BenchmarkConfig, takes_file=True)
