"""Predicts what sharing out, or hiding, the overhead of a step gives on more GPUs.

    step_s = num_micro_batches x time_per_micro_batch_s + overhead_s

as `sdbench.statistics.law` has it, but with an overhead that is not fitted: it is put together from
the phases of a record, and from the time that gradients take between GPUs that it did not have. A
micro-batch with fewer images than the record's is taken to last as long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.measure import phases
from sdbench.report.runs import read_record
from sdbench.scaling.changes import CHANGES, ENCODERS, Change
from sdbench.scaling.command_line import OverheadFlags
from sdbench.scaling.points import phase_seconds, split_batch
from sdbench.settings.kinds import NOT_NEGATIVE_NUMBER
from sdbench.settings.parallel import NODE_MIB, SEVERAL_NODES_MIB, SHARED, WITHIN_NODE
from sdbench.statistics.law import Setup, communication_share

AS_IT_IS = "as it is, nothing hidden"
BYTES_PER_MIB = 2**20
# Phases that every micro-batch goes through; the others count once in a step.
WORK = (*ENCODERS, phases.UNET_FORWARD, phases.BACKWARD)
UPDATES = (phases.OPTIMIZER, phases.EMA)
REST = (phases.DATA_WAIT, phases.HOST_TO_DEVICE, phases.OTHER)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that was measured.

    Attributes:
        source: Where its figures are from, in words.
        micro_batch: Images of a micro-batch.
        num_micro_batches: Of the step, on one GPU.
        num_gpus: It was measured on.
        seconds: Of each phase.
        num_sharers: GPUs that shared out optimizer and moving average; 1: none did.
        gradient_bytes: That one GPU has to average with the others.
        is_16_bit: Whether these are of 16 bits each, and not of 32.
        bucket_bytes: Of them, what travels in one piece within a node.
        bucket_bytes_of_nodes: The same between nodes.
    """

    source: str
    micro_batch: int
    num_micro_batches: int
    num_gpus: int
    seconds: Mapping[str, float]
    num_sharers: int
    gradient_bytes: float
    is_16_bit: bool
    bucket_bytes: float
    bucket_bytes_of_nodes: float

    def of_micro_batch(self, *names: str) -> float:
        """Seconds of phases in one micro-batch."""
        return sum(self.seconds[name] for name in names) / self.num_micro_batches


@dataclasses.dataclass(frozen=True)
class Cluster:
    """How fast GPUs send to each other.

    Attributes:
        gpus_per_node: GPUs of a node.
        node_bytes_per_s: What one GPU sends to the others of its node.
        network_bytes_per_s: What one GPU sends to other nodes.
    """

    gpus_per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float

    def transfer_s(self, num_bytes: float, num_gpus: int) -> float:
        """Seconds to average so many bytes over all GPUs.

        Rings within each node sum the bytes and later distribute them; between, each GPU averages
        its share of them with those of the other nodes that have the same share. Gradients that are
        summed so and weights that are gathered, as sharing them out has it, take as long.
        """
        in_node = min(num_gpus, self.gpus_per_node)
        num_nodes = math.ceil(num_gpus / self.gpus_per_node)
        within = communication_share(in_node) * num_bytes / self.node_bytes_per_s
        between = communication_share(num_nodes) * num_bytes / in_node / self.network_bytes_per_s
        return 2 * (within + between)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A predicted step.

    Attributes:
        name: Of the change, a key of `CHANGES`, or `AS_IT_IS`: what gradients take between GPUs
            that were not there is added in full, though DDP and FSDP hide a part of it.
        is_together: Whether those above it are made as well.
        setup: How the step is divided.
        work_s: Seconds of its micro-batches.
        overhead_s: Seconds of the overhead by its parts.
    """

    name: str
    is_together: bool
    setup: Setup
    work_s: float
    overhead_s: Mapping[str, float]

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return self.work_s + sum(self.overhead_s.values())

    @property
    def images_per_second(self) -> float:
        """Images/s of all GPUs."""
        return self.setup.images_per_step / self.step_time_s


def forecast(
    step: Step, cluster: Cluster, setups: Sequence[Setup], *, names: Sequence[str]
) -> list[Forecast]:
    """Predict the step as it is, and each change alone and together with those before it.

    Args:
        step: The step.
        cluster: The cluster.
        setups: How the step is divided.
        names: Keys of `CHANGES`.
    """
    found, together = [], Change()
    for name, change in ((AS_IT_IS, Change()), *((name, CHANGES[name]) for name in names)):
        together = together | change
        for is_together, made in ((False, change), (True, together)):
            for setup in setups:
                work_s = setup.num_micro_batches * step.of_micro_batch(*WORK)
                overhead_s = _overhead(step, cluster, made, num_gpus=setup.num_gpus)
                found.append(Forecast(name, is_together, setup, work_s, overhead_s))
    return found


def _overhead(step: Step, cluster: Cluster, change: Change, *, num_gpus: int) -> dict[str, float]:
    """Seconds of each part of the overhead."""
    share = 1.0
    if change.shares:  # more GPUs than those of a node may share already
        share = min(1.0, step.num_sharers / min(num_gpus, cluster.gpus_per_node))
    rest_s = 0.0 if change.hides_rest else sum(step.seconds[name] for name in REST)
    return {
        **{name: step.seconds[name] * share for name in UPDATES},
        phases.GRADIENT_COMMUNICATION: _exposed(step, cluster, change, num_gpus=num_gpus),
        phases.RANK_WAIT: step.seconds[phases.RANK_WAIT],
        "rest": rest_s,
    }


def _exposed(step: Step, cluster: Cluster, change: Change, *, num_gpus: int) -> float:
    """Seconds of the communication that nothing hides."""
    part = 0.5 if change.halves and not step.is_16_bit else 1.0
    num_bytes = part * step.gradient_bytes
    whole_s = cluster.transfer_s(num_bytes, num_gpus)
    # What was measured, and what the model says of the GPUs that were not there.
    added_s = max(0.0, whole_s - cluster.transfer_s(num_bytes, step.num_gpus))
    unhidden_s = part * step.seconds[phases.GRADIENT_COMMUNICATION] + added_s
    if not change.hides_behind:
        return unhidden_s
    # The first piece is there when its gradients are, and the last one leaves when all are done.
    has_nodes = num_gpus > cluster.gpus_per_node
    bucket_bytes = step.bucket_bytes_of_nodes if has_nodes else step.bucket_bytes
    piece = min(1.0, bucket_bytes / num_bytes)
    cover_s = sum(
        step.of_micro_batch(name) * (1 - piece if name == phases.BACKWARD else 1)
        for name in change.hides_behind
    )
    last_s = piece * whole_s if set(change.hides_behind) == {phases.BACKWARD} else 0.0
    return min(unhidden_s, max(whole_s - cover_s, last_s))


def read_step(arguments: OverheadFlags) -> Step:
    """The step of a record, or of the phases that are given.

    Raises:
        ConfigError: There is neither or both, or a record has no phases.
    """
    if (arguments.record is None) == (not arguments.phases):
        raise ConfigError(
            "the overhead is that of one record, or of phases that are given",
            value="both" if arguments.phases else "neither",
            allowed="one of the two",
            flag="--record or --phases",
        )
    if arguments.record is None:
        return _given_step(arguments)
    record = read_record(arguments.record, flag="--record")
    seconds = phase_seconds(record)
    if seconds is None:
        raise ConfigError(
            "the record does not say how long the phases of a step take",
            value=f"{arguments.record}: {record['status']}",
            allowed="a run that ended well, with --profile_batches 1 or more",
            flag="--record",
        )
    config, num_gpus = record["config"], record["ranks"]["world_size"]
    device_batch = config["batch_size"] // num_gpus
    step_time_s = config["batch_size"] / record["summary"]["images_per_second"]
    is_16_bit = "bf16" in (config["precision"], config.get("grad_compression"))
    num_bytes = record["workload"]["num_trainable_parameters"] * (2 if is_16_bit else 4)
    micro_batch = min(device_batch, config["device_train_microbatch_size"])
    bucket_mib = config.get("ddp_bucket_mib", NODE_MIB)  # torch's own, which older records had
    of_nodes_mib = bucket_mib if record["ranks"]["num_nodes"] > 1 else SEVERAL_NODES_MIB
    return Step(
        source=f"{arguments.record}, step {step_time_s:.4g} s on {num_gpus} ranks",
        micro_batch=micro_batch,
        num_micro_batches=math.ceil(device_batch / micro_batch),
        num_gpus=num_gpus,
        seconds=seconds,
        num_sharers=_count_sharers(record),
        gradient_bytes=num_bytes,
        is_16_bit=is_16_bit,
        bucket_bytes=(arguments.bucket_mib or bucket_mib) * BYTES_PER_MIB,
        bucket_bytes_of_nodes=(arguments.bucket_mib or of_nodes_mib) * BYTES_PER_MIB,
    )


def _count_sharers(record: Mapping[str, Any]) -> int:
    """GPUs among which a run has shared out its optimizer."""
    sharding, ranks = record["config"].get("sharding"), record["ranks"]
    if sharding not in SHARED:
        return 1
    return ranks["ranks_per_node" if sharding in WITHIN_NODE else "world_size"]


def _given_step(arguments: OverheadFlags) -> Step:
    given = [text.partition("=") for text in arguments.phases]
    try:
        seconds = {name: NOT_NEGATIVE_NUMBER.parse(value) / 1000 for name, _, value in given}
    except ValueError:
        seconds = {}
    if len(seconds) < len(given) or not seconds.keys() <= set(phases.PHASES):
        raise ConfigError(
            "the phases of a step are not given as such",
            value=" ".join(arguments.phases),
            allowed="PHASE=MILLISECONDS, each once, of " + ", ".join(phases.PHASES),
            flag="--phases",
        )
    if phases.BACKWARD not in seconds or arguments.micro_batch is None:
        raise ConfigError(
            "a step has a backward pass of so many images",
            value=" ".join(arguments.phases),
            allowed=f"{phases.BACKWARD}=MILLISECONDS and the images of a micro-batch",
            flag="--phases and --micro_batch",
        )
    return Step(
        source="the phases that were given, of one micro-batch on one GPU",
        micro_batch=arguments.micro_batch,
        num_micro_batches=1,
        num_gpus=1,
        seconds={name: seconds.get(name, 0.0) for name in phases.PHASES},
        num_sharers=1,
        gradient_bytes=4 * arguments.num_parameters,
        is_16_bit=False,
        bucket_bytes=(arguments.bucket_mib or NODE_MIB) * BYTES_PER_MIB,
        bucket_bytes_of_nodes=(arguments.bucket_mib or SEVERAL_NODES_MIB) * BYTES_PER_MIB,
    )


def make_setups(step: Step, counts: Sequence[int], arguments: OverheadFlags) -> list[Setup]:
    """How a step is divided on each number of GPUs.

    Raises:
        ConfigError: There is no batch or there are two, or a GPU would have no image.
    """
    if (arguments.global_batch is None) == (arguments.device_batch is None):
        raise ConfigError(
            "the batch is either the same for all numbers of GPUs or grows with them",
            value="neither" if arguments.global_batch is None else "both",
            allowed="one of the two",
            flag="--global_batch or --device_batch",
        )
    return [
        Setup(num_gpus, arguments.device_batch, step.micro_batch)
        if arguments.device_batch is not None
        else split_batch(
            global_batch=arguments.global_batch, num_gpus=num_gpus, micro_batch=step.micro_batch
        )
        for num_gpus in sorted(counts)
    ]


def make_cluster(arguments: OverheadFlags) -> Cluster:
    """The cluster of the flags."""
    return Cluster(
        arguments.gpus_per_node,
        arguments.node_gb_per_s * 1e9,
        arguments.network_gb_per_s * 1e9,
    )


def describe(step: Step, cluster: Cluster, setups: Sequence[Setup]) -> list[str]:
    """Lines on what the forecasts rest on."""
    first = setups[0]
    parts = ", ".join(f"{name} {1000 * value:.3g}" for name, value in step.seconds.items() if value)
    lines = [
        f"modelled, from {step.source}; phases in ms: {parts}",
        f"gradients: {step.gradient_bytes / 1e9:.3g} GB; a GPU sends "
        f"{cluster.node_bytes_per_s / 1e9:g} GB/s within its node of {cluster.gpus_per_node} and "
        f"{cluster.network_bytes_per_s / 1e9:g} GB/s to other nodes, at most",
        f"efficiency: images/s per GPU over those on {first.num_gpus} with the same changes",
    ]
    if any(setup.device_batch % step.micro_batch for setup in setups):
        lines.append(
            f"a micro-batch of fewer images than {step.micro_batch} is taken to last as long"
        )
    return lines


def efficiency(one: Forecast, forecasts: Sequence[Forecast]) -> float:
    """Images/s per GPU over those of the same changes on the fewest GPUs."""
    first = next(
        other
        for other in forecasts
        if (other.name, other.is_together) == (one.name, one.is_together)
    )
    of_gpu, of_first = (each.images_per_second / each.setup.num_gpus for each in (one, first))
    return of_gpu / of_first


def forecast_rows(forecasts: Sequence[Forecast], *, source: str) -> list[dict[str, Any]]:
    """Make the rows of the CSV file."""
    return [
        {
            "source": source,
            "kind": "modelled",
            "change": one.name,
            "with_those_above": one.is_together,
            "num_gpus": one.setup.num_gpus,
            "images_per_step": one.setup.images_per_step,
            "images_per_second": one.images_per_second,
            "step_time_s": one.step_time_s,
            **{f"{part}_s": value for part, value in one.overhead_s.items()},
            "efficiency_percent": 100 * efficiency(one, forecasts),
        }
        for one in forecasts
    ]
