"""Checks whether a run may go on from a checkpoint: its settings, data and frozen weights."""

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
    """The settings that differ from those of a checkpoint, each with its value before and now.

    Raises:
        ConfigError: A setting that identifies the run differs.
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
    """Describe how the data and the frozen weights differ from those of a checkpoint.

    Args:
        before: Facts of the checkpoint: ``data`` of `identify_data` and ``weights`` of
            `Architecture.identify_weights`. Older checkpoints have neither.
        now: The same facts of this process.
        accepts: Return the differences instead of refusing them.
        folder: The checkpoint, for the message.

    Raises:
        ConfigError: Something differs that is not accepted.
    """
    changes = []
    if before.get("data") and now["data"]:
        change = describe_change(before["data"], now["data"])
        changes += [] if change is None else [change]
    known = before.get("weights", {})
    changes += [
        f"the weights of the {part} have changed"
        for part, weights in now["weights"].items()
        if part in known and known[part] != weights
    ]
    if changes and not accepts:
        raise ConfigError(
            f"the run of {folder} would go on with other inputs: {'; '.join(changes)}",
            value="refuse",
            allowed="what the run had, another --run_name for another run, or accept",
            flag="--changed_inputs",
        )
    return changes


def check_drawing(
    facts: Mapping[str, Any], random_parts: Collection[str], *, folder: Path, flag: str
) -> None:
    """Check that the seed still gives the random sub-models that a checkpoint does not hold.

    Args:
        facts: Facts of the checkpoint.
        random_parts: Sub-models that are drawn from the seed again.
        folder: The checkpoint, for the message.
        flag: The flag that named it.

    Raises:
        ConfigError: This version draws other weights from the same seed.
    """
    drawing = facts.get("drawing", 1)
    if random_parts and drawing != DRAWING:
        raise ConfigError(
            f"an older version drew the random weights of {' and '.join(random_parts)} for the "
            f"checkpoint {folder} in another way, and the checkpoint does not hold them",
            value=f"drawing {drawing}",
            allowed=f"drawing {DRAWING}, or the version of this suite that record.json names",
            flag=flag,
        )
