"""Finds results of `sdbench dreambooth` from other pictures, prompts or flags; sets them aside."""

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
from sdbench.data.identity import describe_change, identify_data, sources_of
from sdbench.data.pictures import AFTER, BEFORE, PICTURES_NAME, RESULT_NAME, SHEET_NAME
from sdbench.launch.child import values_of
from sdbench.settings.recipe import TrainConfig, parse_request
from sdbench.settings.setting import declarations

# Names in the folder of a subject.
CLASS, RUN, MODEL, LORA = "class", "train", "model", "lora"
OF_PICTURES = (AFTER, SHEET_NAME, RESULT_NAME)
OF_TRAINING = (*OF_PICTURES, MODEL, f".{MODEL}-made-of", LORA, f".{LORA}-made-of", RUN)
# Settings that train.py chooses if they are not given; paths, as data and results may be moved.
CHOSEN = ("batch_size", "image_size", "model_revision")
PLACES = ("remote", "class_remote", "results_dir")


@dataclasses.dataclass
class Earlier:
    """Changes since the results in a folder were made, in words, and what to move out of it.

    What the changes are found by is moved last, so that an interrupted move can be continued.
    """

    folder: Path
    changes: list[str]
    names: list[str]

    def refuse(self) -> None:
        """Raise the `ConfigError` that names the changes and the flag to train again."""
        again = "trains again" if RUN in self.names else "draws again"
        raise ConfigError(
            "the folder has results from other pictures, prompts or flags: "
            f"{'; '.join(self.changes)}",
            value=str(self.folder),
            allowed=f"--train_again, which moves them to {self._place()} and {again}; or another "
            "--folder",
            flag="--train_again",
        )

    def set_aside(self) -> None:
        """Move the results to a folder of their own, and say so."""
        names = [name for name in self.names if (self.folder / name).exists()]
        if not names:
            print(f"Nothing has changed since the results in {self.folder} were made.")
            return
        place = self._place()
        place.mkdir()
        for name in names:
            (self.folder / name).rename(place / name)
        print(f"Moved to {place}: {', '.join(names)} ({'; '.join(self.changes)})")

    def _place(self) -> Path:
        places = (self.folder / f"earlier-{number}" for number in itertools.count(1))
        return next(place for place in places if not place.exists())


def find_earlier(commands: Sequence[Sequence[str]], folder: Path, *, trains_again: bool) -> Earlier:
    """Compare the commands of all steps with the results in the folder.

    If `trains_again`, every changed flag of the training counts, such as --lr; otherwise only those
    with which a run cannot be resumed.
    """
    changes, names = [], []
    for command in commands:
        if "--config" in command:
            if found := _compare_training(command, folder, trains_again=trains_again):
                changes += found
                names += OF_TRAINING
            continue
        place = Path(*values_of(command, "--folder")[:1])
        if place.name in (CLASS, BEFORE) and (found := _compare_drawing(command, place)):
            changes.append(found)
            names += [*(OF_TRAINING if place.name == CLASS else OF_PICTURES), place.name]
    return Earlier(folder, changes, list(dict.fromkeys(reversed(names)))[::-1])


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


def _compare_training(command: Sequence[str], folder: Path, *, trains_again: bool) -> list[str]:
    """Say which settings and data of the training differ from its newest checkpoint."""
    notes = sorted(folder.glob(f"{RUN}/checkpoints/step_*/checkpoint.json"))
    if not notes:
        return []
    try:
        facts = read_json_object(notes[-1])["facts"]
        settings, of_data = dict(facts["config"]), facts["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # train.py names the damage
    request = parse_request(command[command.index("--config") :], description="", epilog="")
    changes = []
    for name, declared in declarations(TrainConfig).items():
        is_asked = trains_again and request.origin[name] == "flag" and name not in PLACES
        now = redact_values(getattr(request.config, name))
        before = settings.get(name, now)
        if (
            before != now
            and (declared.identifies or is_asked)
            and not (now is None and name in CHOSEN)
        ):
            changes.append(f"{declared.flag} was {before}, and is {now}")
    config = request.config
    if of_data and (trains_again or config.changed_inputs == "refuse"):
        config = dataclasses.replace(config, data_format=data.detect_format(config.remote))
        try:
            change = describe_change(of_data, identify_data(sources_of(config)))
        except (ConfigError, RunError):
            return changes  # pictures of the class are gone: they are drawn again
        changes += [] if change is None else [f"since the training {change}"]
    return changes
