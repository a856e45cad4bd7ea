"""`parse` turns a command line, a YAML file and a preset into a checked, frozen configuration.

Precedence: defaults < preset < `--config` file < ``key=value`` < flags. A setting that is still
None after that is one that the program chooses for the machine it is on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from sdbench import __version__
from sdbench.base.errors import ConfigError
from sdbench.base.names import nearest
from sdbench.settings.file import CONFIG_FLAG, is_assignment, read_values
from sdbench.settings.kinds import SWITCH
from sdbench.settings.setting import REQUIRED, Setting, declarations, presets_of

ConfigT = TypeVar("ConfigT")
PartT = TypeVar("PartT")


class Translation(NamedTuple):
    """What the config file of another program says in this one's settings.

    `keys` tells for each setting the key that it comes from, `notes` what has no effect here; of a
    record they tell what is not as in it.
    """

    values: Mapping[str, Any] = {}
    keys: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


NOTHING_TRANSLATED = Translation()

COMMON_FLAGS = ("--help", "--version")
HELP_ALL = "--help_all"
# One action, two names: the second is that of the commands that start others.
PRINT_FLAGS = ("--print_config", "--dry_run")
JSON_FLAG = "--json"
# The --help of a program with more lists those of every day alone.
MAX_LISTED = 40
# Variable of argcomplete: the place of the program among the words of the line, from 1.
TYPED_PLACE = "_ARGCOMPLETE"


@dataclasses.dataclass(frozen=True)
class Request(Generic[ConfigT]):
    """What the user asked for, before the program fills in what was left open.

    Attributes:
        config: Merged from defaults, preset, file and flags; None where nobody said.
        origin: Name of each setting to where its value came from: default, preset, file or flag.
        print_config: The user wants to see the resolved config instead of a run.
        json: The user wants the answer as one JSON document, for a program to read.
        rest: The arguments behind ``--``, for another program.
        translation: Of a file in another program's form; of a record its notes.
    """

    config: ConfigT
    origin: Mapping[str, str]
    print_config: bool
    rest: tuple[str, ...] = ()
    translation: Translation = NOTHING_TRANSLATED
    json: bool = False

    def is_users(self, name: str) -> bool:
        """Whether the user gave this setting a value, in a flag or in a file."""
        return self.origin[name] in ("file", "flag")

    def changed(self, values: Mapping[str, Any]) -> Request[ConfigT]:
        """The same request with a preset of these values, of which what does not suit may go."""
        config = dataclasses.replace(self.config, **values)
        origin = {**self.origin, **dict.fromkeys(values, "preset")}
        return dataclasses.replace(self, config=config, origin=origin)

    def part(self, config_type: type[PartT]) -> Request[PartT]:
        """The request for the settings of one dataclass that `config` inherits from."""
        names = declarations(config_type)
        config = config_type(**{name: getattr(self.config, name) for name in names})
        origin = {name: self.origin[name] for name in names}
        return dataclasses.replace(self, config=config, origin=origin)


def parse(
    config_type: type[ConfigT],
    argv: Sequence[str] | None,
    *,
    description: str,
    epilog: str,
    prog: str | None = None,
    takes_file: bool = False,
    answers_json: bool = False,
    translate: Callable[[dict[str, Any]], Translation] | None = None,
    read_record: Callable[[str, Collection[str]], dict[str, Any] | None] | None = None,
    rest: str | None = None,
) -> Request[ConfigT]:
    """Read a command line.

    Args:
        config_type: A dataclass of settings, each declared by `setting` or `shared`.
        argv: Arguments without the program's name; None takes those of the process.
        description: Text above the flags in the help.
        epilog: Text below them: the examples.
        prog: Name of the program; None takes the name that the process was started by.
        takes_file: Whether the command has ``--config``, ``--print_config`` and arguments
            ``key=value``.
        answers_json: Whether the command has ``--json``. It is no setting: what a run records
            does not have it.
        translate: Takes from the content of a file what it has in another program's form.
        read_record: Reads the settings of a record at the path of ``--config``, but those whose
            names are given; returns None for another file.
        rest: What may follow ``--``, in the words of the usage line; None: nothing.
    """
    arguments, behind = list(sys.argv[1:] if argv is None else argv), []
    if rest is not None and "--" in arguments:
        position = arguments.index("--")
        arguments, behind = arguments[:position], arguments[position + 1 :]
    if takes_file:
        arguments = [f"--{text}" if text.startswith("config=") else text for text in arguments]
    settings = declarations(config_type)
    is_short = len(settings) > MAX_LISTED and HELP_ALL not in arguments and not _wants_completion()
    if is_short:
        description = f"{description.rstrip()} These are the flags of every day; {HELP_ALL} "
        description += f"lists all {len(settings)}."
    parser = _make_parser(
        prog, usage=_describe_usage(settings, rest), description=description, epilog=epilog
    )
    parser.add_argument(HELP_ALL, action="help", help="list every flag and exit")
    if takes_file:
        parser.add_argument(
            CONFIG_FLAG,
            metavar="FILE",
            help="YAML file, or the name of one in configs/, whose keys are the flag names below; "
            "${key} is another value, ??? one that the command line has to give, by a flag or as "
            "key=value"
            + ("" if read_record is None else "; or a record.json, or the folder of its run"),
        )
        parser.add_argument(
            *PRINT_FLAGS,
            action="store_true",
            help="check everything, print every value of the run and who chose it, then stop",
        )
    if answers_json:
        parser.add_argument(
            JSON_FLAG,
            action="store_true",
            help="print the answer as one JSON document on stdout, all other lines on stderr",
        )
    _add_arguments(parser, settings, only_everyday=is_short)
    if _wants_completion():
        _complete(parser)
    known = [*COMMON_FLAGS, HELP_ALL, *((CONFIG_FLAG, *PRINT_FLAGS) if takes_file else ())]
    known += [JSON_FLAG] if answers_json else []
    _refuse_unknown_flags(arguments, settings, known=known, rest=rest)
    namespace, others = parser.parse_known_args(arguments)
    assignments = [other for other in others if takes_file and is_assignment(other)]
    for other in others:
        if other not in assignments:
            _refuse_word(other, settings)
    given = vars(namespace)
    flags = {
        name: declared.parse(given[name])
        for name, declared in settings.items()
        if given[name] is not None
    }
    file, translation = {}, NOTHING_TRANSLATED
    path = given.get("config")
    recorded = None
    if path is not None and read_record is not None:
        recorded = read_record(path, {*flags, *(text.partition("=")[0] for text in assignments)})
    if path is not None or assignments:
        file_path = path if recorded is None else None
        content, assigned = read_values(file_path, assignments, flags=flags, names=settings)
        flags = _parse_values(assigned, settings) | flags
        if recorded is not None and content:
            raise ConfigError(
                "settings of a record are replaced as a whole",
                value=content,
                allowed="flags, and key=value with the name of a setting",
                flag=f"--{next(iter(content))}",
            )
        if recorded is None and translate is not None:
            translation = translate(content)
        file = _parse_values(recorded or {**translation.values, **content}, settings)
    preset = {}
    if "preset" in settings:
        chosen = {**file, **flags}.get("preset", settings["preset"].default)
        preset = presets_of(settings)[chosen]

    origin = dict.fromkeys(settings, "default")
    merged: dict[str, Any] = {}
    for layer_name, layer in (("preset", preset), ("file", file), ("flag", flags)):
        merged.update(layer)
        origin.update(dict.fromkeys(layer, layer_name))
    print_config, json = given.get("print_config", False), given.get("json", False)
    if print_config and json:
        raise ConfigError(
            "the values of a run are printed as YAML, which --config reads again",
            value=" ".join(one for one in arguments if one in (*PRINT_FLAGS, JSON_FLAG)),
            allowed=f"one of {PRINT_FLAGS[0]} and {JSON_FLAG}",
            flag=JSON_FLAG,
        )
    return Request(config_type(**merged), origin, print_config, tuple(behind), translation, json)


def _refuse_unknown_flags(
    arguments: Sequence[str],
    settings: Mapping[str, Setting],
    *,
    known: list[str],
    rest: str | None,
) -> None:
    """Refuse an unknown flag, with the nearest known one, which argparse does not tell.

    `known` are the flags that are no settings.
    """
    known = [*known]
    same = {flag: declared for declared in settings.values() for flag in declared.diffusers}
    for declared in settings.values():
        if not declared.is_positional:
            known.append(declared.flag)
            known += [f"--no_{declared.name}"] if declared.kind is SWITCH else []
    for argument in arguments:
        name = argument.partition("=")[0]
        if name == "--":
            break
        # A text with a blank is a value, whatever it begins with.
        if name.startswith("--") and len(name.split()) == 1 and name not in known:
            if declared := same.get(name):
                raise ConfigError(
                    f"unknown flag, {name} of diffusers' scripts is {declared.flag} here",
                    value=argument,
                    allowed=f"{declared.flag} {declared.kind.metavar}: {declared.help}",
                    flag=declared.flag,
                )
            where = "flag" if rest is None else f"flag before -- (behind it: {rest})"
            raise_unknown(argument, known=known, where=where)


def _refuse_word(word: str, settings: Mapping[str, Setting]) -> NoReturn:
    """Refuse an argument that belongs to no flag."""
    flags = [declared for declared in settings.values() if not declared.is_positional]
    meant = {declared.flag: declared.flag for declared in flags}
    for declared in flags:
        for choice in declared.kind.choices:
            meant.setdefault(choice, f"{declared.flag} {choice}")
    name = nearest(word, meant)
    raise ConfigError(
        "this argument is no flag, and stands behind none that takes it",
        value=word,
        allowed=f"what {HELP_ALL} lists"
        + ("" if name is None else f", the nearest is {meant[name]}"),
        flag=HELP_ALL if name is None else meant[name].split()[0],
    )


def _parse_values(values: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    for key in values:
        if key not in settings:
            raise_unknown(str(key), known=list(settings), where="key")
    # `key:` with nothing behind it means "not said", so that --print_config output is a valid file.
    return {key: settings[key].parse(value) for key, value in values.items() if value is not None}


def choose_command(
    commands: Mapping[str, str],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    epilog: str,
) -> tuple[str, list[str]]:
    """Read the name of a command at the head of a command line; returns it and its arguments.

    `commands` tells what each does. The help, also of an empty line, and the version end the
    process. The other arguments are those of `parse`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if _wants_completion() and (typed := _typed_command(commands)) is not None:
        return typed, []
    first = arguments[0] if arguments else None
    if first in commands:
        return first, arguments[1:]
    if first is not None and not first.startswith("-"):
        raise_unknown(
            first, known=list(commands), where="command", flag="COMMAND", listed_by="--help"
        )
    if first not in (None, "-h", *COMMON_FLAGS):
        raise_unknown(first, known=COMMON_FLAGS, where="flag", listed_by="--help")
    parser = _make_parser(
        prog, usage="%(prog)s COMMAND ...", description=description, epilog=epilog
    )
    choices = parser.add_subparsers(metavar="COMMAND")
    for name, help_text in commands.items():
        choices.add_parser(name, help=help_text)
    if _wants_completion():
        _complete(parser)
    parser.parse_args([first or "--help"])
    raise AssertionError("argparse prints its help or the version, and ends the process")


def _wants_completion() -> bool:
    """Return True if a shell, which has started this program anew, asks for completions only."""
    return TYPED_PLACE in os.environ


def _typed_command(commands: Collection[str]) -> str | None:
    """The command on the shell's line; its own parser completes the words after it."""
    from argcomplete.lexers import split_line

    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    place = int(os.environ[TYPED_PLACE])
    if len(words) <= place or words[place] not in commands:
        return None
    os.environ[TYPED_PLACE] = str(place + 1)
    return words[place]


def _complete(parser: argparse.ArgumentParser) -> None:
    """Hand completions to the shell and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fits paragraphs to the terminal; indented lines, such as examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = functools.partial(textwrap.wrap, width=width, break_on_hyphens=False)
        filled: list[str] = []
        # Other lines are empty or begin with a blank.
        for is_text, group in itertools.groupby(text.splitlines(), lambda line: line[:1] > " "):
            lines = list(group)
            filled += wrap(" ".join(lines)) if is_text else lines
        return "\n".join(filled)

    def _format_usage(self, *given: Any) -> str:
        usage = super()._format_usage(*given)
        return textwrap.fill(usage, self._width, subsequent_indent=" " * 7) + "\n\n"


def _make_parser(
    prog: str | None, *, usage: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sdbench {__version__}")
    return parser


def _describe_usage(settings: Mapping[str, Setting], rest: str | None) -> str:
    """The usage line: what is required by name, the other flags in one word."""
    words = [declared.flag for declared in settings.values() if declared.is_positional]
    for declared in settings.values():
        if declared.default is REQUIRED and not declared.is_positional:
            words.append(f"{declared.flag} {declared.kind.metavar}")
    return " ".join(["%(prog)s", *words, "[FLAGS]", *([] if rest is None else ["--", rest])])


def _add_arguments(
    parser: argparse.ArgumentParser, settings: Mapping[str, Setting], *, only_everyday: bool
) -> None:
    groups: dict[str, Any] = {"": parser}
    for name, declared in settings.items():
        is_required = declared.default is REQUIRED
        is_listed = declared.is_everyday or is_required or not only_everyday
        help_text = describe(declared) if is_listed else argparse.SUPPRESS
        several: dict[str, Any] = {}
        if declared.takes_several:
            several["nargs"] = "+" if is_required or not declared.is_positional else "*"
        if declared.bare is not None:
            several = {"nargs": "?", "const": declared.bare}
        if declared.is_positional:
            parser.add_argument(name, metavar=declared.flag, help=describe(declared), **several)
            continue
        if declared.group not in groups:
            groups[declared.group] = parser.add_argument_group(declared.group)
        group = groups[declared.group]
        if declared.kind is SWITCH:
            add = functools.partial(group.add_argument, dest=name, action="store_const")
            add(declared.flag, const=True, help=help_text)
            add(f"--no_{name}", const=False, help=argparse.SUPPRESS)
        else:
            added = group.add_argument(
                declared.flag,
                dest=name,
                metavar=declared.kind.metavar,
                required=is_required,
                help=help_text,
                **several,
            )
            if _wants_completion() and declared.kind.choices:
                choices = declared.kind.choices
                added.completer = lambda choices=choices, **_: choices  # else it offers files


def describe(declared: Setting) -> str:
    """The help of a flag: what it does, its choices, its default and how it is switched off."""
    if not declared.help:
        return argparse.SUPPRESS
    text, is_switch = declared.help, declared.kind is SWITCH
    if " | " in declared.kind.allowed and not is_switch:
        text += f"; {declared.kind.allowed}"
    notes = [declared.default_in_words, f"--no_{declared.name}" if is_switch else ""]
    if any(notes):
        text += f" ({'; '.join(filter(None, notes))})"
    return text.replace("%", "%%")


def raise_unknown(
    given: str,
    *,
    known: Sequence[str],
    where: str,
    flag: str | None = None,
    listed_by: str = HELP_ALL,
) -> NoReturn:
    """Refuse an unknown name of a kind (`where`), with the nearest known one.

    `flag` changes it; None: the flag of the nearest name, or of this one. The flag `listed_by`
    lists the known names.
    """
    name = given.split("=")[0]
    meant = nearest(name, known)
    raise ConfigError(
        f"unknown {where}",
        value=given,
        allowed=f"the names that {listed_by} lists"
        + (f", the nearest is {meant}" if meant else ""),
        flag=flag or f"--{(meant or name).removeprefix('--')}",
    )
