"""`VARIABLES` of the templates: meaning, allowed values and default of each."""

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
    """A variable of templates, with a flag of the same name in lower case.

    Attributes:
        meaning: What it is, for the help.
        allowed: Its possible values, in words.
        valid: The same as a pattern, or the least and the largest whole number.
        default: A value, or a function of the values of the variables above it in `VARIABLES`;
            None: the user has to give one.
    """

    meaning: str
    allowed: str
    valid: str | tuple[int, int]
    default: str | Callable[[Values], str] | None = None

    def check(self, value: str, *, flag: str) -> None:
        """Refuse a value that the variable cannot have."""
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


def _rendezvous_host(values: Values) -> str:
    return f"{JOB_NAME}-worker-0" if values["RDZV_BACKEND"] == "c10d" else "etcd"


def _rendezvous_port(values: Values) -> str:
    return values["MASTER_PORT"] if values["RDZV_BACKEND"] == "c10d" else "2379"


def _decoders_of_seeds(values: Values) -> str:
    # Seed 002 has 192 for 48 encoders.
    return str(4 * int(values.get("NUM_ENCODERS", "1")))


PORT = f"a port from {MIN_PORT} to {MAX_PORT}"
VARIABLES: dict[str, Variable] = {
    "REGISTRY": Variable(
        "where the image is, with a slash at the end",
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
        "nodes, and so pods, that train", "a whole number from 1 to 10000", (1, 10000)
    ),
    "NUM_GPUS_PER_NODE": Variable(
        "GPUs, and so ranks, of a node", "a whole number from 1 to 1024", (1, 1024), "8"
    ),
    "NUM_EFA_PER_NODE": Variable(
        "EFA devices of a node",
        "a whole number: 4 on p4de, 32 on p5 and p5e, 16 on p5en, 0 without EFA",
        (0, 1024),
    ),
    "NUM_ENCODERS": Variable(
        "pods with one GPU each that encode pictures", "a whole number from 1 to 10000", (1, 10000)
    ),
    "NUM_DECODERS": Variable(
        "processes beside the encoders that read and decode, with a CPU each",
        "a whole number from 1 to 100000",
        (1, 100000),
        _decoders_of_seeds,
    ),
    "TRAINER_INSTANCE_TYPE": Variable(
        "machines that train", "the name of an instance type", DNS_NAME, "p4de.24xlarge"
    ),
    "ENCODER_INSTANCE_TYPE": Variable(
        "machines that decode and encode", "the name of an instance type", DNS_NAME, "g5.2xlarge"
    ),
    "PROGRAM": Variable(
        "what the job runs",
        "benchmark.py or train.py",
        r"(benchmark|train)\.py",
        "benchmark.py",
    ),
    "REMOTE": Variable(
        "the data set's pictures",
        "a place that all pods reach, without spaces, quotes and variables: s3://bucket/laion",
        r"[A-Za-z0-9_./:@%+=,-]+",
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
    "RDZV_HOST": Variable("where they meet", "the name of a service", DNS_NAME, _rendezvous_host),
    "RDZV_PORT": Variable("port there", PORT, (MIN_PORT, MAX_PORT), _rendezvous_port),
    "RUN_ID": Variable(
        "name of the run at the etcd, a new one for each job",
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
SIZES = ("NUM_NODES", "NUM_GPUS_PER_NODE")
# Variables that follow from the sizes of the job, and have no flag.
COMPUTED: dict[str, Callable[[int, int], int]] = {
    "NUM_WORKERS": lambda num_nodes, _: num_nodes - 1,  # pods other than node 0
    "WORLD_SIZE": lambda num_nodes, num_gpus: num_nodes * num_gpus,
}


def flag_of(name: str) -> str:
    """The flag that gives a variable its value."""
    return f"--{name.lower()}"


def find_values(names: set[str], given: Values) -> dict[str, str]:
    """The value of every variable in `names`, from the user's values and the defaults.

    Raises:
        ConfigError: A variable has no value or a wrong one, or is not in the template.
    """
    wanted = names.union(SIZES) if names & COMPUTED.keys() else names
    for name in given:
        if name not in wanted:
            raise ConfigError(
                f"the template has no variable {name}",
                value=given[name],
                allowed=", ".join(name for name in VARIABLES if name in wanted) or "no variable",
                flag=flag_of(name),
            )
    values: dict[str, str] = {}
    unset = []
    for name, variable in VARIABLES.items():
        value = given.get(name, variable.default)
        if value is not None:
            values[name] = value(values) if callable(value) else value
            variable.check(values[name], flag=flag_of(name))
        elif name in wanted:
            unset.append(name)
    if unset:
        raise ConfigError(
            f"not set: {', '.join(unset)}",
            value="nothing",
            allowed="; ".join(f"{name}: {VARIABLES[name].allowed}" for name in unset),
            flag=", ".join(map(flag_of, unset)),
        )
    for name in names & COMPUTED.keys():
        values[name] = str(COMPUTED[name](*(int(values[size]) for size in SIZES)))
    return values
