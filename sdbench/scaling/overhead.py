"""Predicts the gain of sharing or hiding the overhead of a step on more GPUs.

    step_s = num_micro_batches x time_per_micro_batch_s + overhead_s

as in `sdbench.statistics.law`, but the overhead is not fitted: it is the sum of the phases of a
record and of the communication with GPUs that the record did not have. A micro-batch with fewer
images than the record's is assumed to take as long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError
from sdbench.measure import phases
from sdbench.report.runs import read_record
from sdbench.scaling.points import phase_seconds
from sdbench.settings.kinds import NOT_NEGATIVE_NUMBER
from sdbench.settings.parallel import NODE_MIB, SEVERAL_NODES_MIB, SHARED, WITHIN_NODE
from sdbench.statistics.law import Setup, communication_share

if TYPE_CHECKING:  # the flags name the changes below
    from sdbench.scaling.command_line import OverheadFlags

AS_IT_IS = "as it is, nothing hidden"
BYTES_PER_MIB = 2**20
ENCODERS = (phases.VAE_ENCODE, phases.TEXT_ENCODE)
# Phases of every micro-batch; the others count once in a step.
WORK = (*ENCODERS, phases.UNET_FORWARD, phases.BACKWARD)
UPDATES = (phases.OPTIMIZER, phases.EMA)
REST = (phases.DATA_WAIT, phases.HOST_TO_DEVICE, phases.OTHER)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the overhead.

    Attributes:
        shares: The GPUs of a node share optimizer and moving average.
        halves: Gradients have 16 bits instead of 32.
        hides_behind: Phases of a micro-batch that overlap with the communication of gradients.
        hides_rest: Time outside of the device's phases is hidden, as with CUDA graphs.
    """

    shares: bool = False
    halves: bool = False
    hides_behind: tuple[str, ...] = ()
    hides_rest: bool = False

    def __or__(self, other: Change) -> Change:
        return Change(
            self.shares or other.shares,
            self.halves or other.halves,
            tuple(dict.fromkeys(self.hides_behind + other.hides_behind)),
            self.hides_rest or other.hides_rest,
        )


CHANGES = {
    "shared": Change(shares=True),
    "16_bit": Change(halves=True),
    "behind_backward": Change(hides_behind=(phases.BACKWARD,)),
    "behind_encoders": Change(hides_behind=ENCODERS),
    "no_rest": Change(hides_rest=True),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
        source: Source of its figures, in words.
        micro_batch: Images of a micro-batch.
        num_micro_batches: Micro-batches of the step on one GPU.
        num_gpus: GPUs that it was measured on.
        seconds: Seconds of each phase.
        num_sharers: GPUs that shared optimizer and moving average; 1: not shared.
        gradient_bytes: Bytes that one GPU averages with the others.
        is_16_bit: True if gradients have 16 bits, False if 32.
        bucket_bytes: Bytes of a bucket of gradients within a node.
        bucket_bytes_of_nodes: Bytes of a bucket between nodes.
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
        """Return the seconds of phases in one micro-batch."""
        return sum(self.seconds[name] for name in names) / self.num_micro_batches


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Link speeds of GPUs: bytes/s that one GPU sends within its node and to other nodes."""

    gpus_per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float

    def transfer_s(self, num_bytes: float, num_gpus: int) -> float:
        """Return the seconds to average these bytes over all GPUs.

        Rings within each node sum the bytes and later distribute them; in between, each GPU
        averages its share with the GPUs of other nodes that have the same share. Reducing gradients
        and gathering weights, as with sharded optimizers, takes as long.
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
        name: A key of `CHANGES`, or `AS_IT_IS`: communication with GPUs that the record did not
            have is added in full, though DDP and FSDP hide a part of it.
        is_together: True if the changes before it are made as well.
        setup: How the step is divided.
        work_s: Seconds of its micro-batches.
        overhead_s: Seconds of each part of the overhead.
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
    """Predict the step as it is, and each named change alone and with the changes before it."""
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
    share = 1.0
    if change.shares:  # the record may share over more GPUs than a node has
        share = min(1.0, step.num_sharers / min(num_gpus, cluster.gpus_per_node))
    rest_s = 0.0 if change.hides_rest else sum(step.seconds[name] for name in REST)
    return {
        **{name: step.seconds[name] * share for name in UPDATES},
        phases.GRADIENT_COMMUNICATION: _exposed(step, cluster, change, num_gpus=num_gpus),
        phases.RANK_WAIT: step.seconds[phases.RANK_WAIT],
        "rest": rest_s,
    }


def _exposed(step: Step, cluster: Cluster, change: Change, *, num_gpus: int) -> float:
    """Return the seconds of communication that nothing hides."""
    part = 0.5 if change.halves and not step.is_16_bit else 1.0
    num_bytes = part * step.gradient_bytes
    whole_s = cluster.transfer_s(num_bytes, num_gpus)
    # The measured time, and by the model that of the GPUs that the record did not have.
    added_s = max(0.0, whole_s - cluster.transfer_s(num_bytes, step.num_gpus))
    unhidden_s = part * step.seconds[phases.GRADIENT_COMMUNICATION] + added_s
    if not change.hides_behind:
        return unhidden_s
    # The first bucket is sent when its gradients are ready, the last one after the backward pass.
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
    """Read the step of a record, or of the phases that are given."""
    if (arguments.record is None) == (not arguments.phases):
        raise ConfigError(
            "the overhead comes either from a record or from phases that are given",
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
    """Return the number of GPUs that shared the optimizer of a run."""
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
            "the phases of a step cannot be read",
            value=" ".join(arguments.phases),
            allowed="PHASE=MILLISECONDS, each once, of " + ", ".join(phases.PHASES),
            flag="--phases",
        )
    if phases.BACKWARD not in seconds or arguments.micro_batch is None:
        raise ConfigError(
            "a step needs a backward pass and the images of its micro-batch",
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


def describe(step: Step, cluster: Cluster, setups: Sequence[Setup]) -> list[str]:
    """Return lines about the figures and assumptions of the forecasts."""
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
            f"a micro-batch of fewer images than {step.micro_batch} is assumed to take as long"
        )
    return lines


def efficiency(one: Forecast, forecasts: Sequence[Forecast]) -> float:
    """Return images/s per GPU over those of the same changes on the fewest GPUs."""
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
