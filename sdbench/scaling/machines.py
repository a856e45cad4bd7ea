"""Plans the machines of a training, its hours and its price, by where pictures are encoded.

    trained = trainers x images/s of one x scaling efficiency
    encoders = trained x (1 + margin) / images/s of one, rounded up; decoders likewise
    hours = images / images/s of the slowest workers / 3600
    cost = hours x sum over the kinds of machines of number x price

A decoder is a CPU worker with a core of its own that reads, decodes and tokenizes. Intervals assume
that all rates deviate in the same direction; intervals of hours and cost are for the planned
machines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from sdbench.data.source import NUM_LATENT_CHANNELS, NUM_TOKENS, VAE_FACTOR
from sdbench.scaling.cost import Amount, Machine, Recipe, Stage, make_amount, swap_ends

SECONDS_PER_HOUR = 3600
BYTES_PER_FLOAT16 = 2
BYTES_PER_TERABYTE = 10**12
# Relative rounding error of a quotient that is a whole number.
ROUNDING = 1e-9

ONLINE_PREPROCESSING = "encoders beside the trainers"
IN_STEP = "encoders in the step"
PRECOMPUTED_ONCE = "latents made once, before"
TRAINERS, ENCODERS, DECODERS = "trainers", "encoders", "decoders"


@dataclasses.dataclass(frozen=True)
class WorkerRates:
    """Images/s of one worker of each kind, by resolution in pixels.

    A ``trainer`` gets latents; an ``encoding_trainer`` encodes in its step and may be unknown.
    """

    trainer: Mapping[int, Amount]
    encoder: Mapping[int, Amount]
    decoder: Mapping[int, Amount]
    encoding_trainer: Mapping[int, Amount]


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Choices before the plan.

    Attributes:
        num_trainers: GPUs that train.
        scaling_efficiency: Images/s of one of these trainers over those of a trainer alone.
        margin: Share by which encoders and decoders exceed the rate of the trainers.
        trainer_machine: Machine of the trainers.
        encoder_machine: Machine of the encoders.
        decoder_machine: Machine of the decoders; None: the cores of the encoders' machines.
        num_encoders: None: as many as the trainers need.
        num_decoders: None: as many as the trainers need.
    """

    num_trainers: int
    scaling_efficiency: float
    margin: float
    trainer_machine: Machine
    encoder_machine: Machine
    decoder_machine: Machine | None
    num_encoders: int | None
    num_decoders: int | None


@dataclasses.dataclass(frozen=True)
class Feeding:
    """The encoders and decoders beside the trainers at one resolution.

    Attributes:
        image_size: Resolution in pixels.
        trained: Images/s of all trainers.
        encoders_needed: Number for that rate and the margin, with its interval.
        decoders_needed: The same for decoders.
        num_encoders: Number in the plan: the need, or the number given.
        num_decoders: The same for decoders.
        machines: Machines of encoders and decoders, with their numbers.
    """

    image_size: int
    trained: Amount
    encoders_needed: Amount
    decoders_needed: Amount
    num_encoders: int
    num_decoders: int
    machines: tuple[tuple[Machine, int], ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """A stage of the training, or the encoding of its data set.

    Attributes:
        image_size: Resolution in pixels.
        num_images: Pictures that it processes.
        images_per_second: Rate of the slowest kind of worker.
        slowest: That kind, and others whose known interval overlaps.
        num_trainers: GPUs that train.
        num_encoders: GPUs that only encode.
        num_decoders: Decoders with a core of their own.
        machines: All machines with their numbers.
    """

    image_size: int
    num_images: int
    images_per_second: Amount
    slowest: tuple[str, ...]
    num_trainers: int
    num_encoders: int
    num_decoders: int
    machines: tuple[tuple[Machine, int], ...]

    @property
    def hours(self) -> Amount:
        """Hours that it takes."""
        return self.num_images / swap_ends(self.images_per_second) / SECONDS_PER_HOUR

    @property
    def cost_usd(self) -> Amount:
        """Price of its machines for these hours."""
        return self.hours * sum(number * machine.usd_per_hour for machine, number in self.machines)


def plan_feeding(stage: Stage, rates: WorkerRates, fleet: Fleet) -> Feeding:
    """Return the encoders and decoders that keep the trainers of a stage busy."""
    size = stage.image_size
    trained = fleet.num_trainers * fleet.scaling_efficiency * rates.trainer[size]
    wanted = trained * (1 + fleet.margin)
    encoders, decoders = (_divide_up(wanted, one[size]) for one in (rates.encoder, rates.decoder))
    num_encoders = fleet.num_encoders or int(encoders[0])
    num_decoders = fleet.num_decoders or int(decoders[0])
    return Feeding(
        image_size=size,
        trained=trained,
        encoders_needed=encoders,
        decoders_needed=decoders,
        num_encoders=num_encoders,
        num_decoders=num_decoders,
        machines=_machines_beside(fleet, num_encoders=num_encoders, num_decoders=num_decoders),
    )


def plan_jobs(
    recipe: Recipe,
    rates: WorkerRates,
    fleet: Fleet,
    feedings: Sequence[Feeding],
    *,
    num_dataset_images: int | None,
) -> dict[str, list[Job]]:
    """Return the jobs of each way to train, in order.

    Encoders in the step are left out if their rate is not known. `num_dataset_images` are encoded
    once; None: the images of each stage, without repetition.
    """
    ways: dict[str, list[Job]] = {ONLINE_PREPROCESSING: [], IN_STEP: [], PRECOMPUTED_ONCE: []}
    trainers = _machines_of_trainers(fleet)
    num_own_decoders = trainers[1] * trainers[0].num_cpu_cores
    for stage, feeding in zip(recipe.stages, feedings, strict=True):
        size = stage.image_size
        beside = {"num_encoders": feeding.num_encoders, "num_decoders": feeding.num_decoders}
        training = {TRAINERS: feeding.trained}
        encoding = {ENCODERS: feeding.num_encoders * rates.encoder[size]}
        decoding = {DECODERS: feeding.num_decoders * rates.decoder[size]}
        # Workers whose number follows from the need are fast enough.
        at_work = training | (encoding if fleet.num_encoders else {})
        at_work |= decoding if fleet.num_decoders else {}
        machines = (trainers, *feeding.machines)
        ways[ONLINE_PREPROCESSING].append(
            _make_job(stage, at_work, machines, num_trainers=fleet.num_trainers, **beside)
        )
        if size in rates.encoding_trainer:
            rate = fleet.num_trainers * fleet.scaling_efficiency * rates.encoding_trainer[size]
            at_work = {TRAINERS: rate, DECODERS: num_own_decoders * rates.decoder[size]}
            counts = {"num_trainers": fleet.num_trainers, "num_decoders": num_own_decoders}
            ways[IN_STEP].append(_make_job(stage, at_work, (trainers,), **counts))
        once = dataclasses.replace(stage, num_images=num_dataset_images or stage.num_images)
        ways[PRECOMPUTED_ONCE] += [
            _make_job(once, encoding | decoding, feeding.machines, **beside),
            _make_job(stage, training, (trainers,), num_trainers=fleet.num_trainers),
        ]
    if len(ways[IN_STEP]) < len(recipe.stages):
        del ways[IN_STEP]
    return ways


def latents_in_terabytes(
    recipe: Recipe, *, text_embedding_dim: int, num_dataset_images: int | None
) -> float:
    """Return the size of VAE moments and encoded captions of all stages in float16, 10^12 bytes."""
    num_bytes = 0
    for stage in recipe.stages:
        num_moments = 2 * NUM_LATENT_CHANNELS * (stage.image_size // VAE_FACTOR) ** 2
        num_values = num_moments + NUM_TOKENS * text_embedding_dim
        num_bytes += (num_dataset_images or stage.num_images) * num_values * BYTES_PER_FLOAT16
    return num_bytes / BYTES_PER_TERABYTE


def add(amounts: list[Amount]) -> Amount:
    """Return the sum of amounts."""
    return reduce(np.add, amounts, make_amount(0, 0, 0))


def _make_job(
    stage: Stage,
    at_work: Mapping[str, Amount],
    machines: tuple[tuple[Machine, int], ...],
    *,
    num_trainers: int = 0,
    num_encoders: int = 0,
    num_decoders: int = 0,
) -> Job:
    rate, slowest = _find_slowest(at_work)
    counts = (num_trainers, num_encoders, num_decoders)
    return Job(stage.image_size, stage.num_images, rate, slowest, *counts, machines)


def _find_slowest(at_work: Mapping[str, Amount]) -> tuple[Amount, tuple[str, ...]]:
    """Return images/s of the slowest, and its name first; NaN for an end that one of them lacks."""
    names = sorted(at_work, key=lambda name: at_work[name][0])
    slowest = at_work[names[0]]
    # Comparisons with NaN are False: without an interval no other worker counts as the slowest.
    others = [name for name in names[1:] if at_work[name][1] < slowest[2]]
    return reduce(np.minimum, at_work.values()), (names[0], *others)


def _machines_of_trainers(fleet: Fleet) -> tuple[Machine, int]:
    machine = fleet.trainer_machine
    return machine, math.ceil(fleet.num_trainers / machine.num_devices)


def _machines_beside(
    fleet: Fleet, *, num_encoders: int, num_decoders: int
) -> tuple[tuple[Machine, int], ...]:
    encoding, decoding = fleet.encoder_machine, fleet.decoder_machine
    for_encoders = math.ceil(num_encoders / encoding.num_devices)
    if decoding is not None:
        for_decoders = math.ceil(num_decoders / decoding.num_cpu_cores)
        return (encoding, for_encoders), (decoding, for_decoders)
    return ((encoding, max(for_encoders, math.ceil(num_decoders / encoding.num_cpu_cores))),)


def _divide_up(wanted: Amount, one: Amount) -> Amount:
    """Return the number of workers of one rate for the wanted rate, rounded up."""
    return np.ceil(wanted / swap_ends(one) * (1 - ROUNDING))
