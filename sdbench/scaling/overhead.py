"""Model what sharding or hiding the overhead of a step gains on more GPUs.

    step_s = num_micro_batches x time_per_micro_batch_s + overhead_s

The step comes from a record with --profile_batches, or from phases that you give for one
micro-batch on one GPU. The encoders, the forward and the backward pass count in each micro-batch,
and one of fewer images is assumed to take as long. The overhead is the sum of the others, once in a
step: the optimizer, the EMA, gradients, rank wait and the rest (data wait, copies, other).
Communication with GPUs that the record did not have is computed from the speed of the links; the
first row counts it in full, though DDP and FSDP hide a part. All figures are modelled: measure what
matters.

Changes: shared shards the optimizer and the EMA over the GPUs of a node; 16_bit sends gradients in
16 bits; behind_backward and behind_encoders overlap gradients with the backward pass and with the
encoders of the next step; no_rest hides the rest, as CUDA graphs do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.measure import phases
from sdbench.report.runs import read_record
from sdbench.report.tables import Cell, Table, make_table
from sdbench.scaling import points
from sdbench.scaling.points import BatchFlags, Row
from sdbench.scaling.predict import SETUP
from sdbench.settings.kinds import (
    NOT_NEGATIVE_NUMBER,
    PATH,
    POSITIVE,
    POSITIVE_NUMBER,
    Kind,
    one_of,
    whole_number,
)
from sdbench.settings.parallel import NODE_MIB, SEVERAL_NODES_MIB, SHARED, WITHIN_NODE
from sdbench.settings.setting import setting
from sdbench.statistics.law import Setup, communication_share

EPILOG = """\
examples:
  python -m sdbench scaling overhead --num_gpus 8,512,1024 --global_batch 2048 --micro_batch 4 \\
      --phases vae_encode=11 text_encode=1 unet_forward=8 backward=16 optimizer=9 ema=4 other=12
      The phases are estimates: take those of a record.
  python -m sdbench scaling overhead --help
      With a record: --record runs/<run> --num_gpus 8,512 --global_batch 2048
"""

AS_IT_IS = "as it is, nothing hidden"
SHARE, HALVE, BEHIND_BACKWARD, BEHIND_ENCODERS, NO_REST = CHANGES = (
    *("shared", "16_bit", "behind_backward", "behind_encoders", "no_rest"),
)
BYTES_PER_MIB = 2**20
ENCODERS = (phases.VAE_ENCODE, phases.TEXT_ENCODE)
# Phases of every micro-batch; the others count once in a step.
WORK = (*ENCODERS, phases.UNET_FORWARD, phases.BACKWARD)
UPDATES = (phases.OPTIMIZER, phases.EMA)
REST = (phases.DATA_WAIT, phases.HOST_TO_DEVICE, phases.OTHER)


def _parse_phase(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition("=")
    if name not in phases.PHASES:
        raise ValueError
    return name, NOT_NEGATIVE_NUMBER.parse(milliseconds) / 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverheadFlags(BatchFlags):
    """Flags of overhead."""

    record: Path | None = setting(PATH, None, "run of benchmark.py whose phases are taken")
    phases: tuple[tuple[str, float], ...] = setting(
        Kind(f"PHASE=MILLISECONDS of {', '.join(phases.PHASES)}", _parse_phase, "PHASE=MS"),
        (),
        "phases of a step of one micro-batch on one GPU, instead of a record",
        takes_several=True,
    )
    micro_batch: int | None = setting(POSITIVE, None, "with --phases: images of the micro-batch")
    num_parameters: int = setting(
        whole_number(1, 10**12),
        865_910_724,
        "with --phases: trained parameters, whose gradients are sent in 32 bits",
    )
    changes: tuple[str, ...] = setting(
        one_of(*CHANGES),
        CHANGES,
        "changes to model, in this order",
        takes_several=True,
    )
    gpus_per_node: int = setting(POSITIVE, 8, "GPUs that share a fast link")
    # AWS's page of p5 instances: NVSwitch of 900 GB/s a GPU in both directions together, and
    # 3200 Gbit/s of EFA for 8 GPUs.
    node_gb_per_s: float = setting(
        POSITIVE_NUMBER, 450.0, "what a GPU sends within its node, in GB/s"
    )
    network_gb_per_s: float = setting(
        POSITIVE_NUMBER, 50.0, "what a GPU sends to other nodes, in GB/s"
    )
    out: Path | None = setting(PATH, None, points.OUT_HELP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A measured step: seconds by phase, and the images of a micro-batch on one GPU.

    ``gradient_bytes`` are what one GPU averages with the others. ``num_sharers`` GPUs shard the
    optimizer and the EMA. Gradient buckets differ in size within a node and between nodes.
    """

    source: str
    seconds: Mapping[str, float]
    micro_batch: int
    gradient_bytes: float
    num_micro_batches: int = 1
    num_gpus: int = 1
    num_sharers: int = 1
    is_16_bit: bool = False
    bucket_mib: int = NODE_MIB
    nodes_bucket_mib: int = SEVERAL_NODES_MIB

    def of_micro_batch(self, *names: str) -> float:
        """Return the seconds of phases in one micro-batch."""
        return sum(self.seconds[name] for name in names) / self.num_micro_batches


def run(arguments: OverheadFlags) -> None:
    """Print the gain of each change, and write it to the file of --out."""
    step = _read_step(arguments)
    setups = points.make_setups(
        arguments, global_batch=arguments.global_batch, micro_batch=step.micro_batch
    )
    common = {"source": step.source, "kind": points.MODELLED}
    rows = [
        {**common, "change": name, "with_those_above": is_together, **row}
        for index, name in enumerate((AS_IT_IS, *arguments.changes))
        for is_together, made in ((False, (name,)), (True, arguments.changes[:index]))
        for row in _add_efficiency([_forecast(step, arguments, made, one) for one in setups])
    ]
    points.show(_describe(step, arguments, setups), _tabulate(rows))
    points.write_rows(arguments.out, rows)


def _add_efficiency(forecasts: Sequence[Row]) -> list[Row]:
    """Forecasts with their images/s per GPU over that on the fewest GPUs."""
    rates = [row["images_per_second"] / row["num_gpus"] for row in forecasts]
    return [
        {**row, "efficiency_percent": 100 * rate / rates[0]}
        for row, rate in zip(forecasts, rates, strict=True)
    ]


def _tabulate(rows: Sequence[Row]) -> Table:
    """A row for each change and number of GPUs: the change alone, and with those above it."""
    shown: dict[tuple[str, int], Row] = {}
    for row in rows:
        cells = shown.setdefault(
            (row["change"], row["num_gpus"]),
            {"change": row["change"], **{field.name: field.cell_of(row) for field in SETUP}},
        )
        which = "with those above" if row["with_those_above"] else "alone"
        cells[f"{which}: step, ms"] = 1000 * row["step_time_s"]
        percent = row["efficiency_percent"]
        cells[f"{which}: efficiency"] = Cell(f"{percent:.0f}%", percent)
    return make_table(shown.values())


def _forecast(step: Step, links: OverheadFlags, made: Collection[str], setup: Setup) -> Row:
    """The step with these changes; communication with GPUs that it did not have is added in full.

    DDP and FSDP hide a part of it, which only the changes model.
    """
    share = 1.0
    if SHARE in made:  # the record may share over more GPUs than a node has
        share = min(1.0, step.num_sharers / min(setup.num_gpus, links.gpus_per_node))
    rest_s = 0.0 if NO_REST in made else sum(step.seconds[name] for name in REST)
    overhead_s = {
        **{name: step.seconds[name] * share for name in UPDATES},
        phases.GRADIENT_COMMUNICATION: _exposed(step, links, made, num_gpus=setup.num_gpus),
        phases.RANK_WAIT: step.seconds[phases.RANK_WAIT],
        "rest": rest_s,
    }
    work_s = setup.num_micro_batches * step.of_micro_batch(*WORK)
    step_time_s = work_s + sum(overhead_s.values())
    return {
        **points.setup_columns(setup),
        "images_per_second": setup.images_per_step / step_time_s,
        "step_time_s": step_time_s,
        **{f"{part}_s": value for part, value in overhead_s.items()},
    }


def _exposed(step: Step, links: OverheadFlags, made: Collection[str], *, num_gpus: int) -> float:
    """Return the seconds of communication that nothing hides."""
    part = 0.5 if HALVE in made and not step.is_16_bit else 1.0
    num_bytes = part * step.gradient_bytes
    whole_s = _transfer_s(links, num_bytes, num_gpus)
    # The measured time, plus the modelled time of GPUs that the record did not have.
    added_s = max(0.0, whole_s - _transfer_s(links, num_bytes, step.num_gpus))
    unhidden_s = part * step.seconds[phases.GRADIENT_COMMUNICATION] + added_s
    if BEHIND_BACKWARD not in made and BEHIND_ENCODERS not in made:
        return unhidden_s
    # The first bucket is sent when its gradients are ready, the last one after the backward pass.
    bucket_mib = step.nodes_bucket_mib if num_gpus > links.gpus_per_node else step.bucket_mib
    piece = min(1.0, bucket_mib * BYTES_PER_MIB / num_bytes)
    left_s = whole_s
    if BEHIND_BACKWARD in made:
        left_s -= step.of_micro_batch(phases.BACKWARD) * (1 - piece)
    if BEHIND_ENCODERS in made:
        left_s -= step.of_micro_batch(*ENCODERS)
    last_s = 0.0 if BEHIND_ENCODERS in made else piece * whole_s
    return min(unhidden_s, max(left_s, last_s))


def _transfer_s(links: OverheadFlags, num_bytes: float, num_gpus: int) -> float:
    """Return the seconds to average these bytes over all GPUs.

    Rings within each node sum the bytes and later distribute them; in between, each GPU averages
    its share with the GPUs of other nodes that have the same share. Reducing gradients and
    gathering weights, as with sharded optimizers, takes as long.
    """
    in_node = min(num_gpus, links.gpus_per_node)
    num_nodes = math.ceil(num_gpus / links.gpus_per_node)
    within = communication_share(in_node) * num_bytes / links.node_gb_per_s
    between = communication_share(num_nodes) * num_bytes / in_node / links.network_gb_per_s
    return 2 * (within + between) / 1e9


def _read_step(arguments: OverheadFlags) -> Step:
    if (arguments.record is None) == (not arguments.phases):
        raise ConfigError(
            "the overhead comes either from a record or from phases that are given",
            value="both" if arguments.phases else "neither",
            allowed="one of the two",
            flag="--record or --phases",
        )
    if arguments.record is None:
        seconds = dict.fromkeys(phases.PHASES, 0.0) | dict(arguments.phases)
        names = [name for name, _ in arguments.phases]
        is_whole = phases.BACKWARD in names and len(set(names)) == len(names)
        if not is_whole or arguments.micro_batch is None:
            raise ConfigError(
                "a step needs a backward pass, each phase once, and the images of its micro-batch",
                value=" ".join(names),
                allowed=f"{phases.BACKWARD}=MILLISECONDS and the images of a micro-batch",
                flag="--phases and --micro_batch",
            )
        return Step(
            source="the phases that were given, of one micro-batch on one GPU",
            seconds=seconds,
            micro_batch=arguments.micro_batch,
            gradient_bytes=4 * arguments.num_parameters,
        )
    record = read_record(arguments.record, flag="--record")
    seconds = points.phase_seconds(record)
    if seconds is None:
        raise ConfigError(
            "the record does not say how long the phases of a step take",
            value=f"{arguments.record}: {record['status']}",
            allowed="a run that ended well, with --profile_batches 1 or more",
            flag="--record",
        )
    config, ranks = record["config"], record["ranks"]
    num_gpus = ranks["world_size"]
    device_batch = config["batch_size"] // num_gpus
    step_time_s = config["batch_size"] / record["summary"]["images_per_second"]
    is_16_bit = "bf16" in (config["precision"], config.get("grad_compression"))
    micro_batch = min(device_batch, config["device_train_microbatch_size"])
    bucket_mib = config.get("ddp_bucket_mib", NODE_MIB)  # torch's own, which older records had
    sharding, num_sharers = config.get("sharding"), 1
    if sharding in SHARED:
        num_sharers = ranks["ranks_per_node" if sharding in WITHIN_NODE else "world_size"]
    return Step(
        source=f"{arguments.record}, step {step_time_s:.4g} s on {num_gpus} ranks",
        seconds=seconds,
        micro_batch=micro_batch,
        gradient_bytes=record["workload"]["num_trainable_parameters"] * (2 if is_16_bit else 4),
        num_micro_batches=math.ceil(device_batch / micro_batch),
        num_gpus=num_gpus,
        num_sharers=num_sharers,
        is_16_bit=is_16_bit,
        bucket_mib=bucket_mib,
        nodes_bucket_mib=bucket_mib if ranks["num_nodes"] > 1 else SEVERAL_NODES_MIB,
    )


def _describe(step: Step, links: OverheadFlags, setups: Sequence[Setup]) -> list[str]:
    parts = ", ".join(f"{name} {1000 * value:.3g}" for name, value in step.seconds.items() if value)
    lines = [
        f"modelled, from {step.source}; phases in ms: {parts}",
        f"gradients: {step.gradient_bytes / 1e9:.3g} GB; a GPU sends "
        f"{links.node_gb_per_s:g} GB/s within its node of {links.gpus_per_node} and "
        f"{links.network_gb_per_s:g} GB/s to other nodes, at most",
        f"efficiency: images/s per GPU over those on {setups[0].num_gpus} with the same changes",
    ]
    if any(setup.device_batch % step.micro_batch for setup in setups):
        lines.append(
            f"a micro-batch of fewer images than {step.micro_batch} is assumed to take as long"
        )
    return lines
