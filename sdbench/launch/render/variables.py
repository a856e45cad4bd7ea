"""Which variables do the manifests' templates have, and which values may they take?

One table: a variable has a flag of its own name, the words for its help and errors, and a check. A
template is text with ``${NAME}`` in it, as envsubst reads it.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import string
from collections.abc import Callable, Mapping
from pathlib import Path

from sdbench.base.errors import ConfigError

# Ports below need root on most systems; the seed's README asks for 80.
MIN_PORT, MAX_PORT = 1024, 65535
ETCD_PORT = 2379
JOB_NAME = "stable-diffusion"

NAME_IN_TEMPLATE = re.compile(r"\$\{(\w+)\}")
DNS_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
Values = Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
    """A name that templates use.

    Attributes:
        name: As it stands in a template; its flag is the same in lower case.
        meaning: What it is, for the help.
        allowed: Which values it may have, in words.
        is_valid: Whether a value is one of them.
        default: Its value if none is given; None where one has to be.
        follow: Its value if none is given, from those of `needs`.
        needs: The variables that `follow` looks at.
        is_fixed: A value that is given has to be the one that follows.
    """

    name: str
    meaning: str
    allowed: str
    is_valid: Callable[[str], bool]
    default: str | None = None
    follow: Callable[[Values], str] | None = None
    needs: tuple[str, ...] = ()
    is_fixed: bool = False

    @property
    def flag(self) -> str:
        """The flag that gives its value."""
        return f"--{self.name.lower()}"


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda value: re.fullmatch(pattern, value) is not None


def _is_number(low: int, high: int) -> Callable[[str], bool]:
    return lambda value: (
        re.fullmatch(r"0|[1-9][0-9]{0,8}", value) is not None and low <= int(value) <= high
    )


def _count_ranks(values: Values) -> str:
    return str(int(values["NUM_NODES"]) * int(values["NUM_GPUS_PER_NODE"]))


def _find_host(values: Values) -> str:
    return f"{JOB_NAME}-worker-0" if values["RDZV_BACKEND"] == "c10d" else "etcd"


def _find_port(values: Values) -> str:
    return values["MASTER_PORT"] if values["RDZV_BACKEND"] == "c10d" else str(ETCD_PORT)


def _name_run(_: Values) -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("run-%Y%m%dt%H%M%Sz")


PORT = f"a port from {MIN_PORT} to {MAX_PORT}"

# In an order in which each follows from those above it.
VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            name="REGISTRY",
            meaning="where the image is, with the slash behind it",
            allowed="a registry that ends with a slash, e.g. registry.example.com/team/",
            is_valid=_matches(r"[a-zA-Z0-9.-]+(:[0-9]+)?/([a-z0-9._-]+/)*"),
        ),
        Variable(
            name="DOCKER_IMAGE_NAME",
            meaning="name of the image",
            allowed="lower-case letters, digits, dots, dashes, underscores and slashes",
            is_valid=_matches(r"[a-z0-9]+([._/-]+[a-z0-9]+)*"),
            default="mosaicml-stable-diffusion",
        ),
        Variable(
            name="TAG",
            meaning="tag of the image",
            allowed="letters, digits, dots, dashes and underscores, e.g. 0.32.1",
            is_valid=_matches(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"),
        ),
        Variable(
            name="NUM_NODES",
            meaning="nodes, and so pods, of the job",
            allowed="a whole number from 1 to 10000",
            is_valid=_is_number(1, 10000),
        ),
        Variable(
            name="NUM_GPUS_PER_NODE",
            meaning="GPUs, and so ranks, of a node",
            allowed="a whole number from 1 to 1024",
            is_valid=_is_number(1, 1024),
            default="8",
        ),
        Variable(
            name="NUM_EFA_PER_NODE",
            meaning="EFA devices of a node",
            allowed="a whole number: 4 on p4de, 32 on p5 and p5e, 16 on p5en, 0 without EFA",
            is_valid=_is_number(0, 1024),
        ),
        Variable(
            name="NUM_WORKERS",
            meaning="pods beside that of node 0",
            allowed="NUM_NODES - 1",
            is_valid=_is_number(0, 9999),
            follow=lambda values: str(int(values["NUM_NODES"]) - 1),
            needs=("NUM_NODES",),
            is_fixed=True,
        ),
        Variable(
            name="WORLD_SIZE",
            meaning="ranks of the job",
            allowed="NUM_NODES times NUM_GPUS_PER_NODE",
            is_valid=_is_number(1, 999999999),
            follow=_count_ranks,
            needs=("NUM_NODES", "NUM_GPUS_PER_NODE"),
            is_fixed=True,
        ),
        Variable(
            name="MASTER_PORT",
            meaning="port on node 0 where the ranks meet",
            allowed=PORT,
            is_valid=_is_number(MIN_PORT, MAX_PORT),
            default="29500",
        ),
        Variable(
            name="RDZV_BACKEND",
            meaning="how the nodes of an elastic job meet: at its first pod, or at the etcd of "
            "4.etcd.yaml",
            allowed="c10d, etcd or etcd-v2",
            is_valid=_matches(r"c10d|etcd|etcd-v2"),
            default="c10d",
        ),
        Variable(
            name="RDZV_HOST",
            meaning="where they meet",
            allowed="the name of a service",
            is_valid=_matches(DNS_NAME),
            follow=_find_host,
            needs=("RDZV_BACKEND",),
        ),
        Variable(
            name="RDZV_PORT",
            meaning="port there",
            allowed=PORT,
            is_valid=_is_number(MIN_PORT, MAX_PORT),
            follow=_find_port,
            needs=("RDZV_BACKEND", "MASTER_PORT"),
        ),
        Variable(
            name="RUN_ID",
            meaning="name of the run at the etcd, another one for each job",
            allowed="letters, digits and dashes",
            is_valid=_matches(r"[A-Za-z0-9-]{1,63}"),
            follow=_name_run,
        ),
        Variable(
            name="RESULTS_CLAIM",
            meaning="persistent volume claim that the records go to",
            allowed="the name of a claim: lower-case letters, digits, dashes and dots",
            is_valid=_matches(DNS_NAME),
            default=f"{JOB_NAME}-results",
        ),
    )
}


def names_in(template: str, *, path: Path) -> list[str]:
    """The variables of a template, in the table's order.

    Raises:
        ConfigError: It has one that the table does not know, or a dollar sign that begins none.
    """
    names = set(NAME_IN_TEMPLATE.findall(template))
    unknown = sorted(names - set(VARIABLES))
    if unknown:
        raise ConfigError(
            "the template has a variable that render does not know",
            value=unknown[0],
            allowed=", ".join(VARIABLES),
            flag=f"the template {path}",
        )
    rest = NAME_IN_TEMPLATE.sub("", template)
    for number, line in enumerate(rest.splitlines(), start=1):
        if "$" in line:
            raise ConfigError(
                f"line {number} of the template has a dollar sign that begins no variable",
                value=line.strip(),
                allowed="${NAME}",
                flag=f"the template {path}",
            )
    return [name for name in VARIABLES if name in names]


def find_values(names: list[str], given: Values) -> dict[str, str]:
    """The value of every variable of a template.

    Args:
        names: The template's variables.
        given: Those that the user gave a value.

    Raises:
        ConfigError: One has no value, one that it may not have, or is not in the template.
    """
    wanted = {*names, *(need for name in names for need in VARIABLES[name].needs)}
    _refuse_unused(given, wanted)
    _refuse_unset([name for name in VARIABLES if name in wanted and name not in given])
    values: dict[str, str] = {}
    for name, variable in VARIABLES.items():
        if name in wanted:
            values[name] = _find_value(variable, given.get(name), values)
    return values


def fill(template: str, values: Values) -> str:
    """A template with its variables replaced, as envsubst does it."""
    return string.Template(template).substitute(values)


def _find_value(variable: Variable, given: str | None, values: Values) -> str:
    if given is not None and not variable.is_valid(given):
        raise _wrong(variable, given)
    if variable.follow is None:
        return given if given is not None else str(variable.default)
    follows = variable.follow(values)
    if variable.is_fixed and given not in (None, follows):
        raise _wrong(variable, str(given), allowed=f"{variable.allowed}, {follows}")
    return given if given is not None else follows


def _wrong(variable: Variable, value: str, *, allowed: str | None = None) -> ConfigError:
    return ConfigError(
        f"{variable.name}, {variable.meaning}, has a value that it cannot have",
        value=value,
        allowed=allowed or variable.allowed,
        flag=variable.flag,
    )


def _refuse_unused(given: Values, wanted: set[str]) -> None:
    for name in given:
        if name not in wanted:
            raise ConfigError(
                f"the template has no variable {name}",
                value=given[name],
                allowed=", ".join(name for name in VARIABLES if name in wanted) or "none",
                flag=VARIABLES[name].flag,
            )


def _refuse_unset(names: list[str]) -> None:
    unset = [
        VARIABLES[name]
        for name in names
        if VARIABLES[name].default is None and VARIABLES[name].follow is None
    ]
    if unset:
        raise ConfigError(
            f"not set: {', '.join(variable.name for variable in unset)}",
            value="nothing",
            allowed="; ".join(f"{variable.name}: {variable.allowed}" for variable in unset),
            flag=", ".join(variable.flag for variable in unset),
        )
