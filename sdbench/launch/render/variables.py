"""The variables of the templates: what each means, which values it may have, and its default."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Mapping

from sdbench.base.errors import ConfigError

# Ports below need root on most systems.
MIN_PORT, MAX_PORT = 1024, 65535
JOB_NAME = "stable-diffusion"
DNS_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
Values = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Variable:
    """A name that templates use; its flag is the same in lower case.

    Attributes:
        meaning: What it is, for the help.
        allowed: Which values it may have, in words.
        valid: The same as a pattern, or the least and the largest whole number.
        default: Its value if none is given; a function takes it from those of `needs`.
        needs: The variables that the default follows from.
        is_fixed: A value that is given has to be the default.
    """

    meaning: str
    allowed: str
    valid: str | tuple[int, int]
    default: str | Callable[[Values], str] | None = None
    needs: tuple[str, ...] = ()
    is_fixed: bool = False

    def check(self, value: str, *, flag: str) -> None:
        """Refuse a value that the variable cannot have.

        Raises:
            ConfigError: It is one.
        """
        if isinstance(self.valid, str):
            is_valid = re.fullmatch(self.valid, value) is not None
        else:
            low, high = self.valid
            is_number = re.fullmatch(r"0|[1-9][0-9]{0,8}", value) is not None
            is_valid = is_number and low <= int(value) <= high
        if not is_valid:
            raise ConfigError(
                f"{self.meaning}: not a possible value",
                value=value,
                allowed=self.allowed,
                flag=flag,
            )


def _name_run(_: Values) -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("run-%Y%m%dt%H%M%Sz")


PORT = f"a port from {MIN_PORT} to {MAX_PORT}"
# Each follows from those above it.
VARIABLES: dict[str, Variable] = {
    "REGISTRY": Variable(
        "where the image is, with the slash behind it",
        "a registry that ends with a slash, e.g. registry.example.com/team/",
        r"[a-zA-Z0-9.-]+(:[0-9]+)?/([a-z0-9._-]+/)*",
    ),
    "DOCKER_IMAGE_NAME": Variable(
        "name of the image",
        "lower-case letters, digits, dots, dashes, underscores and slashes",
        r"[a-z0-9]+([._/-]+[a-z0-9]+)*",
        "mosaicml-stable-diffusion",
    ),
    "TAG": Variable(
        "tag of the image",
        "letters, digits, dots, dashes and underscores, e.g. 0.32.1",
        r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}",
    ),
    "NUM_NODES": Variable(
        "nodes, and so pods, of the job", "a whole number from 1 to 10000", (1, 10000)
    ),
    "NUM_GPUS_PER_NODE": Variable(
        "GPUs, and so ranks, of a node", "a whole number from 1 to 1024", (1, 1024), "8"
    ),
    "NUM_EFA_PER_NODE": Variable(
        "EFA devices of a node",
        "a whole number: 4 on p4de, 32 on p5 and p5e, 16 on p5en, 0 without EFA",
        (0, 1024),
    ),
    "NUM_WORKERS": Variable(
        "pods beside that of node 0",
        "NUM_NODES - 1",
        (0, 9999),
        lambda values: str(int(values["NUM_NODES"]) - 1),
        needs=("NUM_NODES",),
        is_fixed=True,
    ),
    "WORLD_SIZE": Variable(
        "ranks of the job",
        "NUM_NODES times NUM_GPUS_PER_NODE",
        (1, 999999999),
        lambda values: str(int(values["NUM_NODES"]) * int(values["NUM_GPUS_PER_NODE"])),
        needs=("NUM_NODES", "NUM_GPUS_PER_NODE"),
        is_fixed=True,
    ),
    "MASTER_PORT": Variable(
        "port on node 0 where the ranks meet", PORT, (MIN_PORT, MAX_PORT), "29500"
    ),
    "RDZV_BACKEND": Variable(
        "how the nodes of an elastic job meet: at its first pod, or at the etcd of 4.etcd.yaml",
        "c10d, etcd or etcd-v2",
        "c10d|etcd|etcd-v2",
        "c10d",
    ),
    "RDZV_HOST": Variable(
        "where they meet",
        "the name of a service",
        DNS_NAME,
        lambda values: f"{JOB_NAME}-worker-0" if values["RDZV_BACKEND"] == "c10d" else "etcd",
        needs=("RDZV_BACKEND",),
    ),
    "RDZV_PORT": Variable(
        "port there",
        PORT,
        (MIN_PORT, MAX_PORT),
        lambda values: values["MASTER_PORT"] if values["RDZV_BACKEND"] == "c10d" else "2379",
        needs=("RDZV_BACKEND", "MASTER_PORT"),
    ),
    "RUN_ID": Variable(
        "name of the run at the etcd, another one for each job",
        "letters, digits and dashes",
        r"[A-Za-z0-9-]{1,63}",
        _name_run,
    ),
    "RESULTS_CLAIM": Variable(
        "persistent volume claim that the records go to",
        "the name of a claim: lower-case letters, digits, dashes and dots",
        DNS_NAME,
        f"{JOB_NAME}-results",
    ),
}
# Of 2.train.sbatch, under the names that the script gives them: in capitals a variable that it
# reads from its environment, else an option of sbatch.
SLURM_VARIABLES: dict[str, Variable] = {
    "nodes": Variable("nodes of the job", "a number above 0", r"[1-9][0-9]{0,4}"),
    "gpus-per-node": Variable(
        "GPUs of a node, where Slurm does not give all of them to a job that has it to itself",
        "a number above 0, with a type before it if need be, e.g. h100:8",
        r"([A-Za-z0-9_.-]+:)?[1-9][0-9]{0,3}",
    ),
    "time": Variable(
        "time limit",
        "minutes, H:M:S or D-H, as sbatch has it",
        r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}",
    ),
    "partition": Variable("partitions to choose from", "names", r"[\w.,-]+"),
    "IMAGE": Variable(
        "Enroot image that Pyxis runs",
        "a file, a name of a registry, or none for no container",
        r"\S+",
    ),
    "MOUNTS": Variable(
        "more mounts of the container",
        "SOURCE:TARGET,..., e.g. /fsx:/fsx",
        r"[^\s:,]+:[^\s,]+(,[^\s:,]+:[^\s,]+)*",
    ),
}
SLURM_FLAGS = {"nodes": "--num_nodes", "gpus-per-node": "--num_gpus_per_node"}


def flag_of(name: str) -> str:
    """The flag that gives a variable its value."""
    return SLURM_FLAGS.get(name, f"--{name.lower()}")


def find_values(names: set[str], given: Values) -> dict[str, str]:
    """The value of every variable of a manifest's template.

    Args:
        names: The template's variables.
        given: Those that the user gave a value.

    Raises:
        ConfigError: One has no value, one that it may not have, or is not in the template.
    """
    wanted = names | {need for name in names for need in VARIABLES[name].needs}
    for name in given:
        if name not in wanted:
            raise ConfigError(
                f"the template has no variable {name}",
                value=given[name],
                allowed=", ".join(name for name in VARIABLES if name in wanted) or "none",
                flag=flag_of(name),
            )
    order = [name for name in VARIABLES if name in wanted]
    unset = [name for name in order if name not in given and VARIABLES[name].default is None]
    if unset:
        raise ConfigError(
            f"not set: {', '.join(unset)}",
            value="nothing",
            allowed="; ".join(f"{name}: {VARIABLES[name].allowed}" for name in unset),
            flag=", ".join(map(flag_of, unset)),
        )
    values: dict[str, str] = {}
    for name in order:
        variable = VARIABLES[name]
        default = variable.default(values) if callable(variable.default) else variable.default
        values[name] = given.get(name, default or "")
        variable.check(values[name], flag=flag_of(name))
        if variable.is_fixed and values[name] != default:
            raise ConfigError(
                f"{variable.meaning}: not what follows from the others",
                value=values[name],
                allowed=f"{variable.allowed}, {default}",
                flag=flag_of(name),
            )
    return values
