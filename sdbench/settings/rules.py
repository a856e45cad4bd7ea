"""`settle` and `check` apply the rules of all declarations: legal values, and their effect."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Container, Iterator, Sequence
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.settings.kinds import SWITCH
from sdbench.settings.request import ConfigT, Request
from sdbench.settings.setting import (
    GIVEN,
    GPU,
    AllBut,
    Beside,
    Rule,
    RuledMachine,
    RuledRanks,
    Setting,
    Situation,
    declarations,
    in_words,
    of_device,
)


def settle(
    request: Request[ConfigT], *, machine: RuledMachine, ranks: RuledRanks
) -> tuple[ConfigT, dict[str, str]]:
    """Take the preset's values for this device, and check every setting by its rules.

    Returns the config, and the reason for each replaced value of a preset. A value that cannot be
    used here is refused, and so is one that the user gave and that has no effect.
    """
    on_gpu = machine.device_type == GPU
    config = request.config
    values = {name: of_device(value, on_gpu=on_gpu) for name, value in vars(config).items()}
    config = dataclasses.replace(config, **values)
    reasons: dict[str, str] = {}
    # A rule may depend on another setting's value, so after a replacement all are checked again.
    while True:
        situation = Situation(config, machine, ranks)
        broken = list(_find_broken(request, situation))
        replaceable = [
            (declared, rule)
            for declared, rule in broken
            if declared.presets and not request.is_users(declared.name)
        ]
        if not replaceable:
            break
        declared, rule = replaceable[0]
        reasons[declared.name] = rule.problem
        instead = declared.presets["seed"] if rule.instead is None else rule.instead
        value = of_device(instead, on_gpu=on_gpu)
        config = dataclasses.replace(config, **{declared.name: value})
    for declared, rule in broken:
        _refuse(declared, rule, situation)
    return config, reasons


class UnknownError(Exception):
    """Raised to a check that asks for what is not known before the run."""


class Unknown:
    """In place of the machine, the ranks or a value of a run to come; attributes may be known."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def _raise(self, *_: Any) -> Any:
        raise UnknownError

    __getattr__ = __bool__ = __eq__ = __hash__ = __floordiv__ = _raise


UNKNOWN: Any = Unknown()


def settings_ahead(request: Request[ConfigT]) -> ConfigT:
    """The settings of a request; those of its preset, which a machine may replace, are unknown."""
    config = request.config
    unknown = {
        name: UNKNOWN
        for name, declared in declarations(type(config)).items()
        if declared.presets and not request.is_users(name)
    }
    return dataclasses.replace(config, **unknown)


def check(request: Request, names: Collection[str] | None = None, *, ranks: Any = UNKNOWN) -> None:
    """Check settings by those of their rules that ask for nothing unknown of machine or ranks."""
    known = Situation(settings_ahead(request), UNKNOWN, ranks)
    for declared, rule in _find_broken(request, known, names):
        _refuse(declared, rule, Situation(request.config, UNKNOWN, ranks))


def _is_met(rule: Rule, situation: Situation) -> bool:
    try:
        return bool(rule.is_met(situation))
    except UnknownError:
        return True


def _refuse(declared: Setting, rule: Rule, situation: Situation) -> None:
    value = getattr(situation.config, declared.name)
    lifting = [describe_values(name, values) for name, values in rule.lifted_by.items()]
    together = (" and " if lifting and lifting[0].startswith("no ") else " ").join(lifting)
    own = _usable_values(declared, situation)
    raise ConfigError(
        rule.problem,
        value=declared.flag if value is True else value,
        allowed=rule.allowed or ", or ".join(filter(None, (own, together))),
        flag=" or ".join((declared.flag, *(f"--{name}" for name in rule.others))),
    )


def _usable_values(declared: Setting, situation: Situation) -> str:
    """The values of a setting that none of its rules forbids, the other settings being as is."""
    if declared.kind is SWITCH:
        return f"--no_{declared.name}"

    def is_usable(choice: str) -> bool:
        config = dataclasses.replace(situation.config, **{declared.name: choice})
        changed = dataclasses.replace(situation, config=config)
        rules = [rule for rule in declared.rules if choice in rule.values]
        return all(rule.is_advice or _is_met(rule, changed) for rule in rules)

    return " | ".join(filter(is_usable, declared.kind.choices)) or declared.kind.allowed


def describe_values(name: str, values: Container[Any]) -> str:
    """Values of a setting as flags of a command line, for a sentence."""
    listed: Any = values
    words = " | ".join(
        in_words(value) for value in listed if value is not None and value is not False
    )
    if isinstance(values, AllBut):
        return f"another --{name} than {words}" if words else f"--{name}"
    return f"--{name} {words}" if words else f"no --{name}"


def _find_broken(
    request: Request, situation: Situation, names: Collection[str] | None = None
) -> Iterator[tuple[Setting, Rule]]:
    for declared, rule in _rules_of(type(request.config)):
        if names is not None and declared.name not in names:
            continue
        is_users = request.is_users(declared.name)
        if rule.is_about_effect:
            is_exempt = not _is_asked_for(request, declared, rule)
        else:
            is_exempt = rule.is_advice and is_users
        try:
            is_about_it = getattr(situation.config, declared.name) in rule.values
        except UnknownError:
            continue
        if is_about_it and not is_exempt and not _is_met(rule, situation):
            yield declared, rule


def _is_asked_for(request: Request, declared: Setting, rule: Rule) -> bool:
    """Return True if the user wants what a setting does.

    A file may also have settings that --print_config wrote, keys of another program, and settings
    of something that a flag switches off.
    """
    if request.origin[declared.name] != "file":
        return request.origin[declared.name] == "flag"
    is_switched_off = any(request.origin[other] == "flag" for other in rule.others)
    is_translated = declared.name in request.translation.keys
    return not (declared.presets or is_switched_off or is_translated)


@functools.cache
def _rules_of(config_type: type) -> tuple[tuple[Setting, Rule], ...]:
    """The rules of a program, each with its setting."""
    settings = declarations(config_type)
    found = []
    for declared in settings.values():
        found += [(declared, rule) for rule in declared.rules]
        for beside in declared.acts_beside:
            if settings.keys() >= set(beside.names):
                others = [settings[name] for name in beside.names]
                found.append((declared, _make_effect_rule(declared, others, beside)))
        for name, (values, reason) in declared.demands.items():
            if name in settings:
                rule = _make_demand(declared, settings[name], values, reason)
                found.append((settings[name], rule))
    return tuple(found)


def _make_effect_rule(declared: Setting, others: Sequence[Setting], beside: Beside) -> Rule:
    acting = {
        one.name: AllBut([one.default]) if beside.value is None else (beside.value,)
        for one in others
    }

    def is_met(situation: Situation) -> bool:
        return any(getattr(situation.config, name) in values for name, values in acting.items())

    return Rule(
        AllBut([declared.default]),
        is_met,
        f"{declared.flag} has no effect",
        allowed="only with " + " or ".join(describe_values(*item) for item in acting.items()),
        others=beside.names,
        is_about_effect=True,
    )


def _make_demand(declared: Setting, other: Setting, values: Any, reason: str) -> Rule:
    if values is GIVEN:
        forbidden, allowed = (None,), other.kind.allowed
    else:
        forbidden = AllBut(values)
        allowed = " | ".join(in_words(value) for value in values if value is not None) or "nothing"
    others = [choice for choice in declared.kind.choices if choice != declared.default]
    asking = " ".join(filter(None, (declared.flag, " | ".join(others))))
    return Rule(
        forbidden,
        lambda situation: getattr(situation.config, declared.name) == declared.default,
        f"{reason} ({asking} needs {describe_values(other.name, values)})",
        allowed=allowed,
        others=(declared.name,),
    )
