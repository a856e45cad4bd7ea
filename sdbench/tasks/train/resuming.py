"""Whether the settings of today go on with the run that a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.data.identity import describe_change
from sdbench.models.architecture import DRAWING
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.setting import declarations


def compare_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], *, folder: Path
) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, each with its value before and now.

    Args:
        before: Settings of the checkpoint.
        now: Settings of this process.
        folder: Of the checkpoint, for the message.

    Raises:
        ConfigError: One of them makes it another run.
    """
    changes = {
        name: (before[name], value)
        for name, value in now.items()
        if name in before and before[name] != value
    }
    for name, declared in declarations(TrainConfig).items():
        if declared.identifies and name in changes:
            was, value = changes[name]
            raise ConfigError(
                f"the checkpoint {folder} belongs to a run with another --{name}",
                value=value,
                allowed=f"{was}, or another --run_name for another run",
                flag=f"--{name}",
            )
    return changes


def check_inputs(
    before: Mapping[str, Any], now: Mapping[str, Any], *, accepts: bool, folder: Path
) -> list[str]:
    """What differs of the data and the frozen weights, in a few words each.

    Args:
        before: Facts of the checkpoint: ``data``, as `identify_data` gives it, and ``weights``, as
            `Architecture.identify_weights`. Older ones have neither.
        now: The same of this process.
        accepts: Whether the run may go on with what differs.
        folder: Of the checkpoint, for the message.

    Raises:
        ConfigError: Something differs, and it may not.
    """
    changes = []
    if before.get("data") and now["data"]:
        change = describe_change(before["data"], now["data"])
        changes += [] if change is None else [change]
    known = before.get("weights", {})
    changes += [
        f"the weights of the {part} are others"
        for part, weights in now["weights"].items()
        if part in known and known[part] != weights
    ]
    if changes and not accepts:
        raise ConfigError(
            f"the run that {folder} belongs to would go on with something else: "
            f"{'; '.join(changes)}",
            value="refuse",
            allowed="what the run had, another --run_name for another run, or accept",
            flag="--changed_inputs",
        )
    return changes


def check_drawing(
    facts: Mapping[str, Any], random_parts: Collection[str], *, folder: Path, flag: str
) -> None:
    """Check that random weights beside those of a checkpoint are drawn as they were before.

    Args:
        facts: Of the checkpoint.
        random_parts: The sub-models that are drawn from the seed once more.
        folder: Of the checkpoint, for the message.
        flag: What it was given by.

    Raises:
        ConfigError: The seed gives other numbers today.
    """
    drawing = facts.get("drawing", 1)
    if random_parts and drawing != DRAWING:
        raise ConfigError(
            f"the checkpoint {folder} is of a version that drew the random weights of "
            f"{' and '.join(random_parts)} otherwise, and does not hold them",
            value=f"drawing {drawing}",
            allowed=f"drawing {DRAWING}, or the version of this suite that record.json names",
            flag=flag,
        )
