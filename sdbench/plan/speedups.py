"""`settle`: fits the speed-ups of a request to this machine, by the rules of their declarations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from sdbench.base.errors import ConfigError
from sdbench.measure.hardware import Machine
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import SETTINGS, BenchmarkConfig
from sdbench.settings.setting import GPU, Rule, Situation, of_device


def settle(
    config: BenchmarkConfig,
    *,
    machine: Machine,
    ranks: Ranks,
    is_users: Callable[[str], bool],
) -> tuple[BenchmarkConfig, dict[str, str]]:
    """Take the preset's values for this device, and check every setting by its rules.

    Args:
        config: Of the request; a preset's value may be one for each device.
        machine: The machine of this process.
        ranks: The rank of this process.
        is_users: Whether the user has set the setting of this name.

    Returns:
        The config, and the reason for each replaced value of a preset.

    Raises:
        ConfigError: A value of the user's cannot be used here.
    """
    on_gpu = machine.device_type == GPU
    values = {name: of_device(getattr(config, name), on_gpu=on_gpu) for name in vars(config)}
    config = dataclasses.replace(config, **values)
    reasons: dict[str, str] = {}
    # A rule may depend on another setting's value, so after a replacement all are checked again.
    while True:
        broken = list(_broken_rules(Situation(config, machine, ranks), is_users))
        replaceable = [(name, rule) for name, rule in broken if not is_users(name)]
        if not replaceable:
            break
        name, rule = replaceable[0]
        reasons[name] = rule.problem
        instead = SETTINGS[name].presets["seed"] if rule.instead is None else rule.instead
        config = dataclasses.replace(config, **{name: of_device(instead, on_gpu=on_gpu)})
    if broken:
        name, rule = broken[0]
        value = getattr(config, name)
        raise ConfigError(
            rule.problem,
            value=f"--{name}" if value is True else value,
            allowed=rule.allowed,
            flag=f"--{name}",
        )
    return config, reasons


def _broken_rules(
    situation: Situation, is_users: Callable[[str], bool]
) -> Iterator[tuple[str, Rule]]:
    for name, declared in SETTINGS.items():
        for rule in declared.rules:
            is_about_it = getattr(situation.config, name) in rule.values
            is_advice = rule.allowed is None and is_users(name)
            if is_about_it and not is_advice and not rule.is_met(situation):
                yield name, rule
