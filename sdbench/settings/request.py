"""`parse` turns a command line, a YAML file and a preset into a checked, frozen configuration.

Precedence: defaults < preset < `--config` file < flags. A setting that is still None after that is
one that the program chooses for the machine it is on.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from sdbench.base.errors import ConfigError
from sdbench.settings.kinds import SWITCH
from sdbench.settings.setting import REQUIRED, Setting, declarations, presets_of

ConfigT = TypeVar("ConfigT")


@dataclasses.dataclass(frozen=True)
class Request(Generic[ConfigT]):
    """What the user asked for, before the program fills in what was left open.

    Attributes:
        config: Merged from defaults, preset, file and flags; None where nobody said.
        origin: Name of each setting to where its value came from: default, preset, file or flag.
        print_config: The user wants to see the resolved config instead of a run.
    """

    config: ConfigT
    origin: Mapping[str, str]
    print_config: bool

    def is_users(self, name: str) -> bool:
        """Whether the user gave this setting a value, in a flag or in a file."""
        return self.origin[name] in ("file", "flag")


def parse(
    config_type: type[ConfigT],
    argv: Sequence[str] | None,
    *,
    description: str,
    epilog: str,
    prog: str | None = None,
    takes_file: bool = False,
) -> Request[ConfigT]:
    """Read a command line.

    Args:
        config_type: A dataclass of settings, each declared by `setting` or `shared`.
        argv: Arguments without the program's name; None takes those of the process.
        description: Text above the flags in the help.
        epilog: Text below them: the examples.
        prog: Name of the program; None takes that of the process.
        takes_file: Whether the command has ``--config`` and ``--print_config``.

    Raises:
        ConfigError: For an unknown flag or key, a value of the wrong kind, or an unreadable file.
    """
    settings = declarations(config_type)
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if takes_file:
        parser.add_argument(
            "--config", metavar="FILE", help="YAML file whose keys are the flag names below"
        )
        parser.add_argument(
            "--print_config",
            action="store_true",
            help="print every value of the run, and who chose it, then stop",
        )
    _add_arguments(parser, settings)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [f"--{one.flag_name}" for one in settings.values() if not one.is_positional]
        raise_unknown(unknown[0], known=known, where="flag")
    given = vars(namespace)
    flags = {
        name: declared.parse(given[name])
        for name, declared in settings.items()
        if given[name] is not None
    }
    path = given.get("config")
    file = {} if path is None else _read_file(path, settings)
    preset = {}
    if "preset" in settings:
        chosen = {**file, **flags}.get("preset", settings["preset"].default)
        preset = presets_of(settings)[chosen]

    origin = dict.fromkeys(settings, "default")
    merged: dict[str, Any] = {}
    for layer_name, layer in (("preset", preset), ("file", file), ("flag", flags)):
        merged.update(layer)
        origin.update(dict.fromkeys(layer, layer_name))
    return Request(config_type(**merged), origin, given.get("print_config", False))


def _add_arguments(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    groups: dict[str, Any] = {"": parser}
    for name, declared in settings.items():
        if declared.is_positional:
            parser.add_argument(name, metavar=name.upper(), help=declared.help)
            continue
        if declared.group not in groups:
            groups[declared.group] = parser.add_argument_group(declared.group)
        group = groups[declared.group]
        if declared.kind is SWITCH:
            add_switch(group, name, default=declared.default, help_text=declared.help)
        else:
            group.add_argument(
                f"--{declared.flag_name}",
                dest=name,
                metavar=declared.kind.metavar,
                required=declared.default is REQUIRED,
                help=describe(declared),
            )


def describe(declared: Setting) -> str:
    """The help of a flag: what it does, its choices and its default."""
    text = declared.help
    if " | " in declared.kind.allowed:
        text += f"; {declared.kind.allowed}"
    if declared.default not in (None, REQUIRED):
        text += f" (default: {declared.default})"
    elif declared.presets:
        by_preset = ", ".join(f"{name}: {value}" for name, value in declared.presets.items())
        text += f" ({by_preset})"
    return text.replace("%", "%%")


def add_switch(parser: Any, name: str, *, default: bool, help_text: str) -> None:
    """Add the flags ``--<name>`` and ``--no_<name>``; without either the value is None.

    Args:
        parser: An argparse parser, or a group of one.
        name: Of the value.
        default: What None will mean, for the help.
        help_text: What it does.
    """
    shown = "on" if default else "off"
    parser.add_argument(
        f"--{name}",
        action="store_const",
        const=True,
        help=f"{help_text} (default: {shown}; --no_{name})",
    )
    parser.add_argument(
        f"--no_{name}", dest=name, action="store_const", const=False, help=argparse.SUPPRESS
    )


def _read_file(path: str, settings: Mapping[str, Setting]) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the config file cannot be read ({error})",
            value=path,
            allowed="a readable YAML file of flag names and values",
            flag="--config",
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            "the config file does not hold keys and values",
            value=type(content).__name__,
            allowed="lines such as `batch_size: 2048`",
            flag="--config",
        )
    for key in content:
        if key not in settings:
            raise_unknown(str(key), known=list(settings), where="key in the config file")
    # `key:` with nothing behind it means "not said", so that --print_config output is a valid file.
    return {key: settings[key].parse(value) for key, value in content.items() if value is not None}


def raise_unknown(given: str, *, known: list[str], where: str) -> None:
    """Refuse a name, with the nearest of the known ones.

    Raises:
        ConfigError: Always.
    """
    name = given.split("=")[0]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"unknown {where}",
        value=given,
        allowed=f"the names that --help lists, the nearest is {nearest}",
        flag=nearest if nearest.startswith("--") else f"--{nearest}",
    )
