"""The machines that a training takes, and its hours and price, by where pictures are encoded.

    trained = trainers x images/s of one x scaling efficiency
    encoders = trained x (1 + margin) / images/s of one, rounded up; decoders likewise
    hours = images / images/s of the slowest of them / 3600
    cost = hours x sum over the kinds of machines of their number x price

A decoder is a CPU worker that reads, decodes and tokenizes, with a core of its own. Intervals
assume that the rates at work deviate in the same direction; those of hours and cost are for the
machines that are named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import reduce

import numpy as np

from sdbench.data.source import NUM_LATENT_CHANNELS, NUM_TOKENS, VAE_FACTOR
from sdbench.scaling.cost import Amount, Machine, Recipe, Stage, make_amount

SECONDS_PER_HOUR = 3600
BYTES_PER_FLOAT16 = 2
BYTES_PER_TERABYTE = 10**12
# What rounding may add to a quotient that is a whole number.
ROUNDING = 1e-9

ONLINE_PREPROCESSING = "encoders beside the trainers"
IN_STEP = "encoders in the step"
PRECOMPUTED_ONCE = "latents made once, before"
TRAINERS, ENCODERS, DECODERS = "trainers", "encoders", "decoders"


@dataclasses.dataclass(frozen=True)
class WorkerRates:
    """Images/s of one worker, by resolution in pixels.

    Attributes:
        trainer: Of one trainer that is given latents.
        encoder: Of one encoder.
        decoder: Of one decoder.
        encoding_trainer: Of one trainer that encodes in its step; empty: not known.
    """

    trainer: Mapping[int, Amount]
    encoder: Mapping[int, Amount]
    decoder: Mapping[int, Amount]
    encoding_trainer: Mapping[int, Amount]


@dataclasses.dataclass(frozen=True)
class Fleet:
    """What is chosen before the plan.

    Attributes:
        num_trainers: GPUs that train.
        scaling_efficiency: Images/s of one trainer among them over those of one by itself.
        margin: Share by which encoders and decoders may do more than the trainers take.
        trainer_machine: What trainers run on.
        encoder_machine: What encoders run on.
        decoder_machine: What decoders run on; None: the cores of the encoders' machines.
        num_encoders: None: as many as the trainers take.
        num_decoders: None: as many as the trainers take.
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
        encoders_needed: For these and the margin, with its interval.
        decoders_needed: Likewise.
        num_encoders: Those of the plan: the need, or what was asked for.
        num_decoders: Likewise.
        machines: Those of encoders and decoders, with their number.
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
        way: Where its pictures are encoded.
        image_size: Resolution in pixels.
        num_images: Pictures that it goes through.
        images_per_second: Of the slowest of those at work.
        slowest: Who that is; with the others whose interval overlaps, if both are known.
        num_trainers: GPUs that train.
        num_encoders: GPUs that only encode.
        num_decoders: Decoders with a core of their own.
        machines: All machines with their number.
    """

    way: str
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
        return self.num_images / _swap(self.images_per_second) / SECONDS_PER_HOUR

    @property
    def cost_usd(self) -> Amount:
        """Price of its machines for these hours."""
        return self.hours * sum(number * machine.usd_per_hour for machine, number in self.machines)


def plan_feeding(stage: Stage, rates: WorkerRates, fleet: Fleet) -> Feeding:
    """How many encoders and decoders keep the trainers of a stage busy."""
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
    recipe: Recipe, rates: WorkerRates, fleet: Fleet, *, num_dataset_images: int | None
) -> dict[str, list[Job]]:
    """The jobs of each way to train, in their order.

    Args:
        recipe: The training.
        rates: Images/s of one worker; encoders in the step are left out if their rate is not known.
        fleet: What is chosen.
        num_dataset_images: Pictures of the data set, which are encoded once; None: as many as are
            trained on at each resolution, each of them once.
    """
    ways: dict[str, list[Job]] = {ONLINE_PREPROCESSING: [], IN_STEP: [], PRECOMPUTED_ONCE: []}
    for stage in recipe.stages:
        feeding = plan_feeding(stage, rates, fleet)
        ways[ONLINE_PREPROCESSING].append(_beside(stage, feeding, rates, fleet))
        if stage.image_size in rates.encoding_trainer:
            ways[IN_STEP].append(_in_step(stage, rates, fleet))
        ways[PRECOMPUTED_ONCE] += [
            _encode(stage, feeding, rates, num_images=num_dataset_images or stage.num_images),
            _train_on_latents(stage, feeding, fleet),
        ]
    if len(ways[IN_STEP]) < len(recipe.stages):
        del ways[IN_STEP]
    return ways


def latents_in_terabytes(
    recipe: Recipe, *, text_embedding_dim: int, num_dataset_images: int | None
) -> float:
    """Size of the VAE's moments and the encoded captions of all stages in float16, in 10^12 bytes.

    Args:
        recipe: The training.
        text_embedding_dim: Width of the text encoder.
        num_dataset_images: As in `plan_jobs`.
    """
    num_bytes = 0
    for stage in recipe.stages:
        num_moments = 2 * NUM_LATENT_CHANNELS * (stage.image_size // VAE_FACTOR) ** 2
        num_values = num_moments + NUM_TOKENS * text_embedding_dim
        num_bytes += (num_dataset_images or stage.num_images) * num_values * BYTES_PER_FLOAT16
    return num_bytes / BYTES_PER_TERABYTE


def add(amounts: list[Amount]) -> Amount:
    """The sum of amounts that follow each other."""
    return reduce(np.add, amounts, make_amount(0, 0, 0))


def _beside(stage: Stage, feeding: Feeding, rates: WorkerRates, fleet: Fleet) -> Job:
    at_work = {TRAINERS: feeding.trained}
    # Those whose number follows from the need are fast enough by it.
    if fleet.num_encoders:
        at_work[ENCODERS] = feeding.num_encoders * rates.encoder[stage.image_size]
    if fleet.num_decoders:
        at_work[DECODERS] = feeding.num_decoders * rates.decoder[stage.image_size]
    return Job(
        ONLINE_PREPROCESSING,
        stage.image_size,
        stage.num_images,
        *_find_slowest(at_work),
        num_trainers=fleet.num_trainers,
        num_encoders=feeding.num_encoders,
        num_decoders=feeding.num_decoders,
        machines=(_machines_of_trainers(fleet), *feeding.machines),
    )


def _in_step(stage: Stage, rates: WorkerRates, fleet: Fleet) -> Job:
    """Decoders have all the cores of the trainers' machines."""
    machine, number = _machines_of_trainers(fleet)
    num_decoders = number * machine.num_cpu_cores
    one = rates.encoding_trainer[stage.image_size]
    at_work = {
        TRAINERS: fleet.num_trainers * fleet.scaling_efficiency * one,
        DECODERS: num_decoders * rates.decoder[stage.image_size],
    }
    return Job(
        IN_STEP,
        stage.image_size,
        stage.num_images,
        *_find_slowest(at_work),
        num_trainers=fleet.num_trainers,
        num_encoders=0,
        num_decoders=num_decoders,
        machines=((machine, number),),
    )


def _encode(stage: Stage, feeding: Feeding, rates: WorkerRates, *, num_images: int) -> Job:
    """The encoders and decoders of the training beside which they would run, by themselves."""
    at_work = {
        ENCODERS: feeding.num_encoders * rates.encoder[stage.image_size],
        DECODERS: feeding.num_decoders * rates.decoder[stage.image_size],
    }
    return Job(
        PRECOMPUTED_ONCE,
        stage.image_size,
        num_images,
        *_find_slowest(at_work),
        num_trainers=0,
        num_encoders=feeding.num_encoders,
        num_decoders=feeding.num_decoders,
        machines=feeding.machines,
    )


def _train_on_latents(stage: Stage, feeding: Feeding, fleet: Fleet) -> Job:
    return Job(
        PRECOMPUTED_ONCE,
        stage.image_size,
        stage.num_images,
        feeding.trained,
        (TRAINERS,),
        num_trainers=fleet.num_trainers,
        num_encoders=0,
        num_decoders=0,
        machines=(_machines_of_trainers(fleet),),
    )


def _find_slowest(at_work: Mapping[str, Amount]) -> tuple[Amount, tuple[str, ...]]:
    """Images/s of the slowest, and who it is, first; an end that one of them lacks is not known."""
    names = sorted(at_work, key=lambda name: at_work[name][0])
    slowest = at_work[names[0]]
    # NaN is not below anything: without an interval nobody else may be the slowest.
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
    """How many workers of such a rate do what is wanted, rounded up."""
    return np.ceil(wanted / _swap(one) * (1 - ROUNDING))


def _swap(amount: Amount) -> Amount:
    """The amount with its ends swapped, to divide by it."""
    return amount[[0, 2, 1]]
