"""Chooses the number of GPUs for a deadline or a budget.

Every GPU count is tried with its fastest micro-batch. With a deadline, the best candidate is the
cheapest that keeps it; with only a budget, the fastest within it.
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
    """Maximum days and dollars of a training; None for no limit."""

    max_days: float | None = None
    max_cost_usd: float | None = None

    def kept_by(self, estimate: Estimate) -> str:
        """Return `YES` (with the whole interval), `LIKELY` (with the value) or `NO`."""
        pairs = ((estimate.days_to_train, self.max_days), (estimate.cost_usd, self.max_cost_usd))
        answers = [_is_within(amount, limit) for amount, limit in pairs if limit is not None]
        return next(answer for answer in (NO, LIKELY, YES) if answer in answers)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An estimate for a number of GPUs, with the law's prediction for each stage in order.

    ``fits`` is the answer of `Limits.kept_by`.
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
    """Make a candidate for every GPU count, from the law of each resolution.

    Empty `micro_batches` stand for those of the figures.
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
    """Return the best candidate that keeps the limits, surely or else likely; None if none does."""
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
    return YES if high <= limit else LIKELY  # NaN, an unknown end, is not within
