"""The rungs of the ladder: the speed-ups that are measured on top of the preset seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sdbench.settings.config import SETTINGS
from sdbench.settings.setting import ANY_NUMBER, RANKS, Rung


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedRung(Rung):
    """A declared rung with all settings that belong to it, by name.

    `needs_ranks` says whether it has an effect only with several ranks.
    """

    settings: Mapping[str, Any]
    needs_ranks: bool

    def is_part_of(self, added: Mapping[str, Any]) -> bool:
        """Whether these settings contain this rung; `ANY_NUMBER` matches any value."""
        return all(
            name in added and value in (ANY_NUMBER, added[name])
            for name, value in self.settings.items()
        )


def _in_order(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in SETTINGS if name in settings}


RUNGS = tuple(
    NamedRung(
        **vars(rung),
        settings=_in_order({name: rung.value, **rung.together}),
        needs_ranks=declared.acts_with == RANKS,
    )
    for name, declared in SETTINGS.items()
    for rung in declared.rungs
)


def find_rung(added: Mapping[str, Any]) -> NamedRung | None:
    """The rung with these settings, which may include the settings that it needs; or None."""
    for rung in RUNGS:
        rest = {name: value for name, value in added.items() if name not in rung.settings}
        if rung.is_part_of(added) and rest in ({}, rung.needs):
            return rung
    return None


def describe_flags(settings: Mapping[str, Any]) -> str:
    """Settings as the flags of benchmark.py, e.g. ``--compile unet --cuda_graph``."""
    return " ".join(_as_flag(name, value) for name, value in settings.items())


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {value}"
