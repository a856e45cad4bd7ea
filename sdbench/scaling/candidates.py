"""Chooses the number of GPUs for a deadline or a sum.

Every GPU count is tried with the micro-batch that is fastest there. With a deadline, the cheapest
candidate that keeps it is the best; with a sum alone, the fastest that costs no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sdbench.scaling.cost import Amount, Estimate, Recipe, Tariff, estimate, make_amount
from sdbench.scaling.points import split_batch
from sdbench.statistics.law import Prediction, StepLaw

YES, LIKELY, NO = "yes", "likely", "no"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most days and dollars that a training may take; None is no limit."""

    max_days: float | None = None
    max_cost_usd: float | None = None

    def kept_by(self, estimate: Estimate) -> str:
        """Whether an estimate keeps them: yes, with its whole interval; likely; or no."""
        pairs = ((estimate.days_to_train, self.max_days), (estimate.cost_usd, self.max_cost_usd))
        answers = [_is_within(amount, limit) for amount, limit in pairs if limit is not None]
        return next(answer for answer in (NO, LIKELY, YES) if answer in answers)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        estimate: What it takes.
        predictions: What the law gives for each stage, in order.
        fits: Whether it keeps the limits: yes, likely or no.
    """

    estimate: Estimate
    predictions: tuple[Prediction, ...]
    fits: str


def make_candidates(
    recipe: Recipe,
    laws: Mapping[int, StepLaw],
    *,
    gpu_counts: Sequence[int],
    global_batch: int,
    micro_batches: Sequence[int] = (),
    limits: Limits,
    price: Tariff | None = None,
    power: Tariff | None = None,
) -> list[Candidate]:
    """Try every GPU count.

    Args:
        recipe: The training.
        laws: The law of each resolution of the recipe.
        gpu_counts: GPU counts to try.
        global_batch: Images of an optimizer step.
        micro_batches: Micro-batches to choose from; none takes those of the figures.
        limits: What the training may take.
        price: Dollars per GPU-hour.
        power: Watts per board.

    Raises:
        ConfigError: If a GPU count does not go with the batch, or a law does not know a
            micro-batch.
    """
    candidates = []
    for num_gpus in gpu_counts:
        fastest = {
            stage.image_size: _fastest(
                laws[stage.image_size], num_gpus, global_batch, micro_batches
            )
            for stage in recipe.stages
        }
        rates = {
            image_size: make_amount(
                one.images_per_second, one.images_per_second_low, one.images_per_second_high
            )
            for image_size, one in fastest.items()
        }
        found = estimate(recipe, rates, num_gpus=num_gpus, price=price, power=power)
        candidates.append(Candidate(found, tuple(fastest.values()), limits.kept_by(found)))
    return candidates


def choose_best(candidates: Sequence[Candidate], *, limits: Limits) -> Candidate | None:
    """The candidate to take, or None if none keeps the limits.

    One that keeps them with its whole interval goes before one that likely does.
    """
    for fits in (YES, LIKELY):
        kept = [candidate for candidate in candidates if candidate.fits == fits]
        if kept and limits.max_days is not None:
            return min(kept, key=lambda one: one.estimate.gpu_hours[0])
        if kept:
            return min(kept, key=lambda one: one.estimate.days_to_train[0])
    return None


def _fastest(
    law: StepLaw, num_gpus: int, global_batch: int, micro_batches: Sequence[int]
) -> Prediction:
    predictions = [
        law.predict(
            split_batch(global_batch=global_batch, num_gpus=num_gpus, micro_batch=micro_batch)
        )
        for micro_batch in micro_batches or law.micro_batches
    ]
    return max(predictions, key=lambda one: one.images_per_second)


def _is_within(amount: Amount, limit: float) -> str:
    value, _, high = amount
    if value > limit:
        return NO
    return YES if high <= limit else LIKELY  # an end that is not known is not within
