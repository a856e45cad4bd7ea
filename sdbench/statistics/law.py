"""`fit_law` and `StepLaw`: the time of an optimizer step on any number of GPUs.

    step_s = num_micro_batches x time_per_micro_batch_s + overhead_s
    num_micro_batches = ceil(device_batch / micro_batch), device_batch = floor(global_batch / N)

and the images in a step are N x device_batch, less than the global batch if N does not divide it.
The law counts micro-batches because training with small ones is bound by the host: a micro-batch of
1 or 2 images takes nearly the time of one of 4. Figures of several micro-batch sizes add the term
device_batch x time_per_image_s. Figures of several nodes, if they determine it, add

    (nodes - 1) / nodes x communication_s, the data that a ring all-reduce sends between nodes, and
    (N - 1) x latency_per_rank_s, the messages that it waits for one after the other
    (Thakur, Rabenseifner and Gropp, 2005: 2 (p - 1) a + 2 (p - 1) / p x n b for p processes).

Where the phases of records tell how long a step waits for communication, those seconds are fitted
to these terms separately, and the law also has the share of the communication that hides behind the
backward pass of the last micro-batch:

    max(0, (nodes - 1) / nodes - hidden_share) x communication_s.

The interval does not assume that the law is right. It covers every law with non-negative constants
of all these terms that agrees with the figures (`find_range`). A micro-batch cannot hide more than
it takes, hidden_share x communication_s <= time_per_micro_batch_s; a time per image, if there is
one, is assumed to hide nothing. What no term describes is added as in Kennedy and O'Hagan (2001,
Bayesian calibration of computer models): the law is off by a factor that changes smoothly, to first
order a power of the number of GPUs. Figures are about a doubling apart and deviate by the relative
error s, so a power that changes a step by s in a doubling goes unnoticed among them; d doublings
beyond them it has changed the step by d x s. A figure there deviates from the law by
s x sqrt(1 + d^2).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sdbench.base.errors import ConfigError
from sdbench.statistics.intervals import t_quantile
from sdbench.statistics.region import find_range, fit_non_negative

MICRO_BATCH = "time per micro-batch"
IMAGE = "time per image"
OVERHEAD = "overhead per step"
OVERHEAD_WITH_COMMUNICATION = "overhead with communication"
COMMUNICATION = "communication"
NODE = "communication within a node"
LATENCY = "latency per rank"
# All that a step may have. `OVERHEAD_WITH_COMMUNICATION` is `OVERHEAD` by another name.
ALL_TERMS = (MICRO_BATCH, IMAGE, OVERHEAD, NODE, COMMUNICATION, LATENCY)
# A constant below this is a rounding error of the fit.
NO_TIME_S = 1e-9
# Relative precision of a figure: a fit without any error would be too good to be true.
ROUNDING = 1e-6
# Figures that are off by more on average do not follow the law.
MAX_MEAN_ERROR = 0.2


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a step is divided among GPUs, each with its images and the images of a micro-batch."""

    num_gpus: int
    device_batch: int
    micro_batch: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step on one GPU."""
        return math.ceil(self.device_batch / self.micro_batch)

    @property
    def last_micro_batch(self) -> int:
        """Images in the last micro-batch."""
        return self.device_batch - (self.num_micro_batches - 1) * self.micro_batch

    @property
    def images_per_step(self) -> int:
        """Images of a step on all GPUs."""
        return self.num_gpus * self.device_batch


@dataclasses.dataclass(frozen=True)
class Point:
    """One figure of a table: images/s of all GPUs.

    A step waits ``communication_s`` for gradients; None if the run was not profiled.
    """

    setup: Setup
    images_per_second: float
    communication_s: float | None = None

    @property
    def step_time_s(self) -> float:
        """Seconds of a step on all GPUs."""
        return self.setup.images_per_step / self.images_per_second


class Prediction(NamedTuple):
    """The prediction of a law for a setup.

    ``images_per_second`` has the rate of all GPUs and the ends of the 95 % interval of a figure
    measured there; an end without a bound is NaN.
    """

    setup: Setup
    step_time_s: float
    images_per_second: np.ndarray
    is_extrapolated: bool


@dataclasses.dataclass(frozen=True)
class StepLaw:
    """A fitted law.

    Attributes:
        seconds: The constant of each term.
        hidden_share: The part of the communication constant that hides behind the backward pass.
        relative_error: Standard deviation of a figure from the law, as a fraction.
        degrees_of_freedom: Number of figures minus that of the constants above 0 in the fit of all
            terms (Meyer and Woodroofe, 2000, on least squares of constants that are not negative).
        limit: The largest sum of squares of constants that agree with the figures.
        notes: Terms that the figures do not determine, in words.
    """

    terms: tuple[str, ...]
    seconds: tuple[float, ...]
    hidden_share: float
    relative_error: float
    degrees_of_freedom: int
    figures: _Figures
    limit: float
    notes: tuple[str, ...]

    @property
    def points(self) -> Sequence[Point]:
        """The points that were fitted."""
        return self.figures.points

    def constant(self, term: str) -> tuple[float, float, float]:
        """Return the constant of a term and the ends of its 95 % interval, in seconds.

        The interval covers what the constant stands for where the figures were taken. Figures of
        one micro-batch size cannot separate a micro-batch from its images, so the time per
        micro-batch contains both. The overhead with communication contains that of the most GPUs.
        """
        value = self.seconds[self.terms.index(term)]

        def factors(hidden_share: float) -> np.ndarray:
            if term == OVERHEAD_WITH_COMMUNICATION:
                most = max((point.setup for point in self.points), key=lambda one: one.num_gpus)
                overhead = np.array([one == OVERHEAD for one in ALL_TERMS], dtype=float)
                return overhead + self.figures.factors(most, hidden_share)[1]
            counts = {term: 1.0}
            if term == MICRO_BATCH:
                counts[COMMUNICATION] = hidden_share
                counts[IMAGE] = 0 if IMAGE in self.terms else max(self.micro_batches)
            return np.array([counts.get(one, 0.0) for one in ALL_TERMS])

        return value, *self._ends(value, factors)

    @property
    def micro_batches(self) -> list[int]:
        """Micro-batch sizes of the points."""
        return sorted({point.setup.micro_batch for point in self.points})

    @property
    def mean_error(self) -> float:
        """Mean absolute value of `errors`."""
        return float(np.mean(np.abs(self.errors())))

    def step_time_s(self, setup: Setup) -> float:
        """Return the seconds of a step by the law."""
        factors = self.figures.factors(setup, self.hidden_share).sum(axis=0)
        return float(factors[_columns(self.terms)] @ np.asarray(self.seconds))

    def predict(self, setup: Setup) -> Prediction:
        """Predict the images/s of a setup; refuse a micro-batch size that the figures lack.

        The interval covers all constants that agree with the figures, the deviation of single
        figures from the law, and its drift beyond the figures.
        """
        if IMAGE not in self.terms and setup.micro_batch not in self.micro_batches:
            raise ConfigError(
                "the figures say nothing about this micro-batch",
                value=setup.micro_batch,
                allowed=f"{self.micro_batches}, or figures of several micro-batches to fit",
                flag="--micro_batch",
            )
        step_time_s = self.step_time_s(setup)
        low_s, high_s = self._ends(
            step_time_s, lambda share: self.figures.factors(setup, share, share).sum(axis=0)
        )
        doublings = self._doublings_beyond(setup)
        own = t_quantile(self.degrees_of_freedom) * self.relative_error * math.hypot(1, doublings)
        below, above = (math.hypot(end / step_time_s - 1, own) for end in (low_s, high_s))
        rate = setup.images_per_step / step_time_s
        low = rate / (1 + above) if math.isfinite(above) else math.nan
        high = rate / (1 - below) if below < 1 else math.nan
        return Prediction(
            setup=setup,
            step_time_s=step_time_s,
            images_per_second=np.array([rate, low, high]),
            is_extrapolated=doublings > 0 or not self._is_within(setup),
        )

    def errors(self) -> list[float]:
        """Return the relative error of the law at each point."""
        return [point.step_time_s / self.step_time_s(point.setup) - 1 for point in self.points]

    def _ends(self, value: float, factors: Callable[[float], np.ndarray]) -> tuple[float, float]:
        """The ends over all regions; `factors` maps a hidden share to factors of the constants."""
        ranges = [
            find_range(*equations, factors(share), limit=self.limit)
            for share, equations in self.figures.regions.items()
        ]
        lows, highs = zip(*filter(None, ranges), strict=True)
        return min(value, *lows), max(value, *highs)

    def _doublings_beyond(self, setup: Setup) -> float:
        """The doublings of GPUs, images of a GPU and micro-batch beyond the figures."""
        own = np.log2(dataclasses.astuple(setup))
        known = np.log2([dataclasses.astuple(point.setup) for point in self.points])
        beyond = np.maximum(own - known.max(axis=0), known.min(axis=0) - own)
        return float(np.maximum(beyond, 0).sum())

    def _is_within(self, setup: Setup) -> bool:
        """Return True if a setup has at most the largest leverage of a figure.

        The leverage is over all terms that a step may have, including those that are not in the
        law. It finds extrapolation that no single number shows (Montgomery, Peck and Vining,
        Introduction to Linear Regression Analysis, section 3.8).
        """
        rows, _ = self.figures.regions[0.0]
        # A term that no figure has puts a setup with it far beyond the figures.
        sizes = np.maximum(np.linalg.norm(rows, axis=0), ROUNDING**2)
        inverse = np.linalg.pinv(rows / sizes, rcond=ROUNDING)
        setups = (setup, *(point.setup for point in self.points))
        factors = [
            self.figures.factors(one).sum(axis=0) / self.step_time_s(one) / sizes for one in setups
        ]
        told = np.linalg.norm(factors[0] @ inverse @ (rows / sizes))
        leverages = np.linalg.norm(factors @ inverse, axis=1) ** 2
        is_told = told >= (1 - ROUNDING) * np.linalg.norm(factors[0])
        return bool(is_told and leverages[0] <= max(leverages[1:]) + ROUNDING)


def fit_law(points: Sequence[Point], *, gpus_per_node: int = 8) -> StepLaw:
    """Fit the constants by least squares of the relative errors of the step times.

    The points are of one kind of GPU and one kind of work. Too few to fit the terms are refused,
    and so are steps that take no time.
    """
    figures = _Figures(points, gpus_per_node)
    notes: list[str] = []
    several_sizes = len({point.setup.micro_batch for point in points}) > 1
    terms: list[str] = []
    for term in (MICRO_BATCH, *([IMAGE] if several_sizes else []), OVERHEAD):
        if figures.determine([*terms, term]):
            terms.append(term)
        else:
            notes.append(f"{term}: not told apart from the other terms by these points")
    if len(points) <= len(terms):
        raise ConfigError(
            "too few figures to fit the step law and to say how sure it is",
            value=len(points),
            allowed=f"at least {len(terms) + 1}, with different GPU counts or batches",
            flag="TABLE and --where",
        )
    law = figures.choose(terms)
    if not law.terms:
        raise ConfigError(
            "the steps of the figures take no time",
            value=f"{min(point.step_time_s for point in points):.3g} s",
            allowed=f"more than {NO_TIME_S:g} s",
            flag="the columns images_per_second and global_batch",
        )
    notes += [f"{term}: comes out as 0" for term in terms if term not in law.terms]
    if COMMUNICATION not in law.terms:
        notes.append(f"{COMMUNICATION}: not told apart from the other terms by these points")
    if law.hidden_share:
        notes.append(
            f"about {100 * law.hidden_share:.0f} % of the communication hides behind the backward "
            "pass"
        )
    if len(figures.nums_nodes) == 1:
        notes.append(
            "all figures have the same number of nodes: what another one takes is not known"
        )
    is_mixed = (
        max(figures.nums_nodes) > 1 and not figures.have_phases and COMMUNICATION not in law.terms
    )
    names = {OVERHEAD: OVERHEAD_WITH_COMMUNICATION} if is_mixed else {}
    limit, relative_error, degrees = figures.uncertainty(law)
    return StepLaw(
        terms=tuple(names.get(term, term) for term in law.terms),
        seconds=tuple(map(float, law.seconds)),
        hidden_share=law.hidden_share,
        relative_error=relative_error,
        degrees_of_freedom=degrees,
        figures=figures,
        limit=limit,
        notes=tuple(notes),
    )


@dataclasses.dataclass(frozen=True)
class _Fit:
    """Constants above 0 of some terms, their squared error, and the low ends of their intervals."""

    terms: tuple[str, ...]
    hidden_share: float
    seconds: np.ndarray
    square_sum: float
    degrees_of_freedom: int
    lows: np.ndarray


class _Figures:
    """Points as linear equations in the constants of terms."""

    def __init__(self, points: Sequence[Point], gpus_per_node: int) -> None:
        self.points, self._gpus_per_node = tuple(points), gpus_per_node
        self.nums_nodes = sorted({self._num_nodes(point.setup) for point in points})
        self.have_phases = any(point.communication_s is not None for point in points)
        # The exposed share, max(0, share - hidden share), is linear between two of these.
        self.hidden_shares = [
            0.0,
            *(communication_share(number) for number in self.nums_nodes if number > 1),
        ]
        # The equations of all terms, by hidden share.
        self.regions = {
            share: self.equations(ALL_TERMS, share, share) for share in self.hidden_shares
        }

    def _num_nodes(self, setup: Setup) -> int:
        return math.ceil(setup.num_gpus / self._gpus_per_node)

    def factors(self, setup: Setup, hidden_share: float = 0.0, hides_in: float = 0.0) -> np.ndarray:
        """Return the factors of `ALL_TERMS` in a GPU's work and in its waiting, (2, terms).

        With `hides_in`, a share of the communication, in every micro-batch, the constant of a
        micro-batch is the time beyond that. It is not negative: no more can hide.
        """
        work = {
            MICRO_BATCH: setup.num_micro_batches,
            IMAGE: setup.device_batch,
            OVERHEAD: 1,
            COMMUNICATION: hides_in * setup.num_micro_batches,
        }
        share = communication_share(self._num_nodes(setup))
        waiting = {
            NODE: communication_share(min(setup.num_gpus, self._gpus_per_node)),
            COMMUNICATION: max(0.0, share - hidden_share),
            LATENCY: setup.num_gpus - 1,
        }
        return np.array([[part.get(term, 0.0) for term in ALL_TERMS] for part in (work, waiting)])

    def equations(
        self, terms: Sequence[str], hidden_share: float = 0.0, hides_in: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Factors of the constants, (equations, terms), and their sums, over the step time.

        A point is one equation, or two if its communication is known.
        """
        rows, targets = [], []
        for point in self.points:
            factors = self.factors(point.setup, hidden_share, hides_in)
            seconds = [point.step_time_s]
            if point.communication_s is None:
                factors = factors.sum(axis=0, keepdims=True)
            else:
                seconds = [point.step_time_s - point.communication_s, point.communication_s]
            rows += list(factors[:, _columns(terms)] / point.step_time_s)
            targets += [part_s / point.step_time_s for part_s in seconds]
        return np.array(rows), np.array(targets)

    def determine(self, terms: Sequence[str], hidden_share: float = 0.0) -> bool:
        """Return True if the points determine the constant of each of these terms."""
        rows, _ = self.equations(terms, hidden_share)
        sizes = np.linalg.norm(rows, axis=0)
        return bool(sizes.all()) and np.linalg.matrix_rank(rows / sizes) == len(terms)

    def fit(self, terms: Sequence[str], hidden_share: float = 0.0, hides_in: float = 0.0) -> _Fit:
        """Fit the constants of these terms."""
        rows, targets = self.equations(terms, hidden_share, hides_in)
        seconds, square_sum = fit_non_negative(rows, targets)
        kept = seconds > NO_TIME_S
        rows, seconds = rows[:, kept], seconds[kept]
        degrees = len(targets) - len(seconds)
        lows = np.full(len(seconds), -math.inf)
        if degrees > 0:
            errors_s = np.sqrt(square_sum / degrees * np.diag(np.linalg.pinv(rows.T @ rows)))
            lows = seconds - t_quantile(degrees) * errors_s
        names = tuple(term for term, is_kept in zip(terms, kept, strict=True) if is_kept)
        hidden_share = hidden_share if COMMUNICATION in names else 0.0
        return _Fit(names, hidden_share, seconds, square_sum, degrees, lows)

    def choose(self, terms: Sequence[str]) -> _Fit:
        """Fit these terms and the terms for communication that the points or phases show."""
        found: list[_Fit] = []
        more = (NODE, COMMUNICATION, LATENCY) if self.have_phases else (COMMUNICATION, LATENCY)
        subsets = [
            subset
            for size in range(1, len(more) + 1)
            for subset in itertools.combinations(more, size)
        ]
        for share in self.hidden_shares if self.have_phases else [0.0]:
            for added in subsets:
                asked = [*terms, *added]
                if not self.determine(asked, share):
                    continue
                fit = self.fit(asked, share)
                lows = [low for term, low in zip(fit.terms, fit.lows, strict=True) if term in added]
                is_shown = self.have_phases or (len(lows) == len(added) and min(lows) > 0)
                if is_shown and fit.degrees_of_freedom > 0:
                    found.append(fit)
        if not found:
            return self.fit(terms)
        return min(found, key=lambda fit: fit.square_sum / fit.degrees_of_freedom)

    def uncertainty(self, law: _Fit) -> tuple[float, float, int]:
        """Return the limit of the regions, the relative error of a figure and its degrees."""
        fits = [self.fit(ALL_TERMS, share, share) for share in self.hidden_shares]
        best = min(fits, key=lambda fit: fit.square_sum)
        square_sum, degrees = best.square_sum, best.degrees_of_freedom - (best.hidden_share > 0)
        if degrees < 1:
            square_sum, degrees = law.square_sum, law.degrees_of_freedom
        variance = square_sum / degrees
        doubt = max(t_quantile(degrees) ** 2 * variance, len(self.points) * ROUNDING**2)
        return best.square_sum + doubt, math.sqrt(variance), degrees


def _columns(terms: Sequence[str]) -> list[int]:
    names = {OVERHEAD_WITH_COMMUNICATION: OVERHEAD}
    return [ALL_TERMS.index(names.get(term, term)) for term in terms]


def communication_share(num_nodes: int) -> float:
    """The factor of the communication constant for a number of nodes.

    In a ring all-reduce, each of n nodes sends (n - 1) / n of the data twice: once to sum it, once
    to distribute the sums. The constant is the time to send all of the data twice.
    """
    return (num_nodes - 1) / num_nodes
