"""How is 2.train.sbatch filled in for one cluster and one measurement?

Slurm reads its options from the head of the script, so that they are replaced or added there; what
the script reads from the environment gets a default, which the environment still replaces.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence

from sdbench.base.errors import ConfigError

END_OF_HEAD = "set -euo pipefail"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Something of the script that a flag of render sets.

    Attributes:
        name: Of the flag, without its dashes.
        target: The option of sbatch, or in capitals the variable of the script.
        meaning: What it is, for the help.
        allowed: Which values it may have, in words.
        pattern: The same as a pattern.
    """

    name: str
    target: str
    meaning: str
    allowed: str
    pattern: str

    @property
    def is_variable(self) -> bool:
        """Whether the script reads it from its environment."""
        return self.target.isupper()


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("num_nodes", "nodes", "nodes of the job", "a number above 0", r"[1-9][0-9]{0,4}"),
        Setting(
            "num_gpus_per_node",
            "gpus-per-node",
            "GPUs of a node, where Slurm does not give all of them to a job that has it to itself",
            "a number above 0, with a type before it if need be, e.g. h100:8",
            r"([A-Za-z0-9_.-]+:)?[1-9][0-9]{0,3}",
        ),
        Setting(
            "time",
            "time",
            "time limit",
            "minutes, H:M:S or D-H, as sbatch has it",
            r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}",
        ),
        Setting("partition", "partition", "partitions to choose from", "names", r"[\w.,-]+"),
        Setting(
            "image",
            "IMAGE",
            "Enroot image that Pyxis runs",
            "a file, a name of a registry, or none for no container",
            r"\S+",
        ),
        Setting(
            "mounts",
            "MOUNTS",
            "more mounts of the container",
            "SOURCE:TARGET,..., e.g. /fsx:/fsx",
            r"[^\s:,]+:[^\s,]+(,[^\s:,]+:[^\s,]+)*",
        ),
    )
}


def check_values(values: Mapping[str, str]) -> None:
    """Refuse what sbatch or the script would not take.

    Raises:
        ConfigError: A value is of the wrong kind.
    """
    for name, value in values.items():
        setting = SETTINGS[name]
        if not re.fullmatch(setting.pattern, value):
            raise ConfigError(
                f"--{name}, {setting.meaning}, has a value that it cannot have",
                value=value,
                allowed=setting.allowed,
                flag=f"--{name}",
            )


def fill_script(script: str, values: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The script with options, settings and arguments of benchmark.py in it.

    Args:
        script: Text of 2.train.sbatch.
        values: Values of the settings that were given.
        arguments: Arguments of benchmark.py, which come before those of the command line.

    Raises:
        ConfigError: The script has no head and body to put them into.
    """
    lines = script.splitlines()
    if END_OF_HEAD not in lines or not any(line.startswith("#SBATCH ") for line in lines):
        raise ConfigError(
            "this is not the script that render knows",
            value=lines[0] if lines else "",
            allowed=f"lines that begin with #SBATCH, and behind them `{END_OF_HEAD}`",
            flag="--template",
        )
    body = []
    for name, value in values.items():
        target = SETTINGS[name].target
        if SETTINGS[name].is_variable:
            body.append(f"{target}=${{{target}:-{shlex.quote(value)}}}")
        else:
            _set_option(lines, target, value)
    if arguments:
        body.append(f'set -- {shlex.join(arguments)} "$@"')
    position = lines.index(END_OF_HEAD) + 1
    lines[position:position] = body
    return "\n".join(lines) + "\n"


def read_options(script: str) -> dict[str, str]:
    """What a script asks Slurm for, by option."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, flags=re.MULTILINE))


def _set_option(lines: list[str], option: str, value: str) -> None:
    line = f"#SBATCH --{option}={value}"
    for number, old in enumerate(lines):
        if re.match(rf"#SBATCH --{option}(=|\s|$)", old):
            lines[number] = line
            return
    last = max(number for number, old in enumerate(lines) if old.startswith("#SBATCH "))
    lines.insert(last + 1, line)
