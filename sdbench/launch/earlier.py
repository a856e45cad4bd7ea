"""Refuses to go on with results of `sdbench dreambooth` from other pictures, prompts or flags."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from sdbench import data
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.outside import read_json_object
from sdbench.base.secrets import redact_values
from sdbench.data.identity import describe_changes, identify, sources_of
from sdbench.data.pictures import BEFORE, PICTURES_NAME
from sdbench.launch.child import values_of
from sdbench.settings.recipe import TrainConfig, parse_request
from sdbench.settings.setting import declarations

# Names in the folder of a subject.
CLASS, RUN, MODEL, LORA = "class", "train", "model", "lora"
# Settings that train.py chooses if they are not given.
CHOSEN = ("batch_size", "image_size", "model_revision")


def refuse_changes(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Compare the commands of all steps with the results in the folder; refuse other results."""
    changes = []
    for command in commands:
        if "--config" in command:
            changes += _compare_training(command, folder)
            continue
        place = Path(*values_of(command, "--folder")[:1])
        if place.name in (CLASS, BEFORE) and (found := _compare_drawing(command, place)):
            changes.append(found)
    if changes:
        raise ConfigError(
            f"the folder has results from other pictures, prompts or flags: {'; '.join(changes)}",
            value=str(folder),
            allowed="another folder, or this one once its results are moved or deleted",
            flag="--folder",
        )


def _compare_drawing(command: Sequence[str], folder: Path) -> str | None:
    """Say which flags of generate.py have changed since it drew into a folder; None if none has."""
    if not any((folder / PICTURES_NAME).glob("*.png")):
        return None
    try:
        drawn = _flags(read_json_object(folder / "generate.json")["command"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # generate.py refuses it
    now = _flags(redact_values(command))
    gone, new = set(drawn) - set(now), set(now) - set(drawn)
    if not gone and not new:
        return None
    then, here = (shlex.join(sorted(words)) or "fewer flags" for words in (gone, new))
    return f"{folder} was drawn with {then}, and now it is {here}"


def _flags(command: Sequence[str]) -> list[str]:
    """Return the flags of generate.py without --folder."""
    flags = itertools.dropwhile(lambda word: not word.startswith("--model_name"), command)
    return [word for word in flags if not word.startswith("--folder=")]


def _compare_training(command: Sequence[str], folder: Path) -> list[str]:
    """Say which settings and data of the training differ from its newest checkpoint."""
    notes = sorted(folder.glob(f"{RUN}/checkpoints/step_*/checkpoint.json"))
    if not notes:
        return []
    try:
        facts = read_json_object(notes[-1])["facts"]
        settings = {name: facts["config"][name] for name in declarations(TrainConfig)}
        inputs = facts["inputs"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # train.py names the damage, or the other version
    arguments = command[command.index("--config") :]
    config = parse_request(arguments, description="", epilog="").config
    changes = []
    for name, declared in declarations(TrainConfig).items():
        now = redact_values(getattr(config, name))
        before = settings[name]
        if before != now and declared.identifies and not (now is None and name in CHOSEN):
            changes.append(f"{declared.flag} was {before}, and is {now}")
    if config.changed_inputs == "refuse":
        config = dataclasses.replace(config, data_format=data.detect_format(config.remote))
        try:
            found = describe_changes(inputs, identify(sources_of(config)))
        except (ConfigError, RunError):
            return changes  # pictures of the class are gone: they are drawn again
        changes += [f"since the training, {change}" for change in found.values()]
    return changes
