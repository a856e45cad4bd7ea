"""The rungs of the ladder: each speed-up on top of the preset seed, where it can be measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sdbench.settings.config import SETTINGS
from sdbench.settings.setting import ANY_NUMBER, CPU, GPU, RANKS

DEVICES = {CPU: "CPU", GPU: "GPU"}


@dataclasses.dataclass(frozen=True)
class Rung:
    """A speed-up on top of the preset seed.

    Attributes:
        settings: Name and value of each setting; more than one where they are one idea.
        needs: Settings that these need to have an effect.
        origin: Where the idea comes from.
        devices: Types of device that have it.
        needs_ranks: Whether it has an effect with several ranks only.
        loss_tolerance: Largest relative difference of a loss; None without a bound of its own.
    """

    settings: Mapping[str, Any]
    needs: Mapping[str, Any]
    origin: str
    devices: tuple[str, ...]
    needs_ranks: bool
    loss_tolerance: float | None

    def is_part_of(self, added: Mapping[str, Any]) -> bool:
        """Whether these settings contain this rung, whatever number stands for `ANY_NUMBER`."""
        return all(
            name in added and value in (ANY_NUMBER, added[name])
            for name, value in self.settings.items()
        )


def _in_order(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in SETTINGS if name in settings}


RUNGS = tuple(
    Rung(
        settings=_in_order({name: declared.value, **declared.together}),
        needs=declared.needs,
        origin=declared.origin,
        devices=declared.devices,
        needs_ranks=SETTINGS[name].acts_with == RANKS,
        loss_tolerance=declared.loss_tolerance,
    )
    for name in SETTINGS
    for declared in SETTINGS[name].rungs
)


def find_rung(added: Mapping[str, Any]) -> Rung | None:
    """The rung that has these settings, with or without those that it needs; None without one."""
    for rung in RUNGS:
        rest = {name: value for name, value in added.items() if name not in rung.settings}
        if rung.is_part_of(added) and rest in ({}, rung.needs):
            return rung
    return None


def own_settings(added: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a rung without those that it needs."""
    rung = find_rung(added)
    needs = {} if rung is None else rung.needs
    return {name: value for name, value in added.items() if name not in needs}


def describe_flags(settings: Mapping[str, Any]) -> str:
    """Settings as the flags of benchmark.py, e.g. ``--compile unet --cuda_graph``."""
    return " ".join(_as_flag(name, value) for name, value in settings.items())


def describe_effect(settings: Mapping[str, Any]) -> str:
    """What the settings do, in the words of --help."""
    return "; ".join(SETTINGS[name].help for name in settings)


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {value}"
