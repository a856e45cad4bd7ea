"""`BenchmarkConfig`, the settings of benchmark.py, and how its command line is read."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sdbench.settings.arithmetic import ArithmeticSpeedups
from sdbench.settings.compiling import CompilingSpeedups
from sdbench.settings.data import DataSettings
from sdbench.settings.kinds import (  # noqa: F401 - other rooms take these names from here
    NOT_NEGATIVE,
    POSITIVE,
    SECONDS,
    SWITCH,
    Kind,
    parse_value,
)
from sdbench.settings.measuring import LoggingSettings, MeasuringSettings
from sdbench.settings.parallel import RankSpeedups
from sdbench.settings.request import (
    Request,
    add_switch,  # noqa: F401 - as above
    describe,
    parse,
    raise_unknown,  # noqa: F401 - as above
)
from sdbench.settings.setting import SPEED, declarations, presets_of
from sdbench.settings.training import BatchSettings, ModelSettings, UpdateSettings
from sdbench.settings.updating import HostSpeedups, UpdateSpeedups

DATA = DataSettings.GROUP


# A dataclass takes the fields of its last base first: from the bottom up, in the order of the help.
@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(
    LoggingSettings,
    HostSpeedups,
    RankSpeedups,
    UpdateSpeedups,
    CompilingSpeedups,
    ArithmeticSpeedups,
    UpdateSettings,
    DataSettings,
    BatchSettings,
    ModelSettings,
    MeasuringSettings,
):
    """Everything that decides a run. None means: chosen for the machine, then printed."""


SETTINGS = declarations(BenchmarkConfig)
PRESETS = presets_of(SETTINGS)
SPEED_UPS = {name: declared for name, declared in SETTINGS.items() if declared.group == SPEED}


def parse_request(
    argv: Sequence[str] | None, *, description: str, epilog: str
) -> Request[BenchmarkConfig]:
    """Read the command line of benchmark.py; as `request.parse`."""
    return parse(BenchmarkConfig, argv, description=description, epilog=epilog, takes_file=True)


# For commands that have a parser of their own.
FIELDS = {
    name: types.SimpleNamespace(
        name=name,
        default=declared.default,
        metadata={"group": declared.group, "kind": declared.kind, "help": declared.help},
    )
    for name, declared in SETTINGS.items()
}


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Give another command flags of benchmark.py, with the same meaning and default.

    Args:
        parser: Of the command.
        names: Of settings that are no switches.
    """
    for name in names:
        declared = dataclasses.replace(SETTINGS[name], presets={})
        parser.add_argument(
            f"--{name}",
            type=reader(declared.kind),
            default=declared.default,
            metavar="X",
            help=describe(declared),
        )


def reader(kind: Kind) -> Callable[[str], Any]:
    """A kind as the type of a flag of argparse."""

    def read(text: str) -> Any:
        try:
            return kind.parse(text)
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed: {kind.allowed}") from None

    return read
