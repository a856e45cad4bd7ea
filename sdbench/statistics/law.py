"""The law of the time of an optimizer step on any number of GPUs.

    step_s = num_micro_batches x time_per_micro_batch_s + overhead_s
    num_micro_batches = ceil(device_batch / micro_batch), device_batch = floor(global_batch / N)

and the images in a step are N x device_batch, less than the global batch if N does not divide it.
The law counts micro-batches because training with small ones is bound by the host: a micro-batch of
1 or 2 images takes nearly the time of one of 4. Figures of several micro-batch sizes add the term
device_batch x time_per_image_s. Figures of several nodes, if they determine it, add

    (nodes - 1) / nodes x communication_s, the data that a ring all-reduce sends between nodes, and
    (N - 1) x latency_per_rank_s, the messages that it waits for one after the other
    (Thakur, Rabenseifner and Gropp, 2005: 2 (p - 1) a + 2 (p - 1) / p x n b for p processes).

Where the seconds of communication that a step waits for are known from the phases of records, they
are fitted to these terms by themselves, and the law also has the part of the communication that
hides behind the backward pass of the last micro-batch:

    max(0, (nodes - 1) / nodes - hidden_share) x communication_s.

The interval does not believe that the law is right. It holds for every law with all of these terms,
none negative, that agrees with the figures (`region`). No more hides than a micro-batch takes,
hidden_share x communication_s <= time_per_micro_batch_s; where there is a time per image, its part
of a micro-batch is taken to hide nothing. What no term describes is
added as Kennedy and O'Hagan (2001, Bayesian calibration of computer models) do: the law is off by a
factor that changes smoothly, to first order a power of the number of GPUs. Figures stand about a
doubling apart and are off by the relative error s, so that a power that changes a step by s in a
doubling passes unseen among them; d doublings beyond them it has changed it by d x s. A figure
there deviates from the law by s x sqrt(1 + d^2).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from sdbench.base.errors import ConfigError
from sdbench.statistics.intervals import t_quantile
from sdbench.statistics.region import Region, fit_non_negative

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
# Figures are not known better than this, as a fraction: a fit without any error is none.
ROUNDING = 1e-6
# Figures that are off by more on average do not follow the law.
MAX_MEAN_ERROR = 0.2


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a step is divided among GPUs and micro-batches.

    Attributes:
        num_gpus: GPUs, one rank each.
        device_batch: Images of a step on one GPU.
        micro_batch: Images of a micro-batch on one GPU; the last one may have fewer.
    """

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
    """One figure of a table.

    Attributes:
        setup: How its step is divided.
        images_per_second: Measured images/s of all GPUs.
        communication_s: Seconds of a step that waits for gradients, as its phases have it; None if
            nobody looked.
    """

    setup: Setup
    images_per_second: float
    communication_s: float | None = None

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.setup.images_per_step / self.images_per_second


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction of a law for a setup.

    Attributes:
        setup: The setup.
        step_time_s: Seconds of a step.
        images_per_second: Images/s of all GPUs.
        images_per_second_low: Lower end of the 95 % interval of a figure measured there; None if
            there is no bound but 0.
        images_per_second_high: Upper end; None if there is no bound.
        is_extrapolated: Whether it lies beyond the figures: its number of GPUs, images of a GPU or
            micro-batch, or what they make of the terms together.
    """

    setup: Setup
    step_time_s: float
    images_per_second: float
    images_per_second_low: float | None
    images_per_second_high: float | None
    is_extrapolated: bool


@dataclasses.dataclass(frozen=True)
class StepLaw:
    """A fitted law.

    Attributes:
        terms: Names of the terms in it.
        seconds: The constant of each term, in seconds.
        hidden_share: The part of the communication constant that hides behind the backward pass.
        relative_error: Standard deviation of a figure from the law, as a fraction.
        degrees_of_freedom: Number of figures minus that of the constants above 0 in the fit of all
            terms (Meyer and Woodroofe, 2000, on least squares of constants that are not negative).
        gpus_per_node: GPUs of a node, for the communication term.
        points: The points that were fitted.
        regions: Constants of all terms that agree with the points, by the hidden share.
        notes: Terms that the points do not determine, in words.
    """

    terms: tuple[str, ...]
    seconds: tuple[float, ...]
    hidden_share: float
    relative_error: float
    degrees_of_freedom: int
    gpus_per_node: int
    points: tuple[Point, ...]
    regions: dict[float, Region]
    notes: tuple[str, ...]

    def constant(self, term: str) -> tuple[float, float, float]:
        """The constant of a term with its 95 % interval in seconds: value, low, high.

        The interval is that of what the constant stands for where the figures were taken. Figures
        of one micro-batch size do not tell a micro-batch from its images, so that the time per
        micro-batch has both, and the overhead with communication has that of the most GPUs.
        """
        value = self.seconds[self.terms.index(term)]

        def factors(hidden_share: float) -> np.ndarray:
            if term == OVERHEAD_WITH_COMMUNICATION:
                most = max((point.setup for point in self.points), key=lambda one: one.num_gpus)
                overhead = np.array([one == OVERHEAD for one in ALL_TERMS], dtype=float)
                return overhead + _waiting(most, self.gpus_per_node, hidden_share)
            counts = {term: 1.0}
            if term == MICRO_BATCH:
                counts[COMMUNICATION] = hidden_share
                counts[IMAGE] = 0 if IMAGE in self.terms else max(self.micro_batches)
            return np.array([counts.get(one, 0.0) for one in ALL_TERMS])

        return value, *self._ends(value, factors)

    @property
    def micro_batches(self) -> list[int]:
        """The micro-batch sizes of the points."""
        return sorted({point.setup.micro_batch for point in self.points})

    @property
    def mean_error(self) -> float:
        """The mean of the relative errors at the points, without their signs."""
        return float(np.mean(np.abs(self.errors())))

    def step_time_s(self, setup: Setup) -> float:
        """Seconds of a step by the law, wherever it is."""
        factors = _work(setup) + _waiting(setup, self.gpus_per_node, self.hidden_share)
        return float(factors[_columns(self.terms)] @ np.asarray(self.seconds))

    def predict(self, setup: Setup) -> Prediction:
        """Predict the figure of a setup.

        The interval covers all constants that agree with the figures, the deviation of single
        figures from the law, and its drift beyond the figures.

        Raises:
            ConfigError: If no figure has this micro-batch and the law has no term per image.
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
            step_time_s,
            lambda hidden_share: (
                _work(setup, hidden_share) + _waiting(setup, self.gpus_per_node, hidden_share)
            ),
        )
        doublings = self._doublings_beyond(setup)
        own = t_quantile(self.degrees_of_freedom) * self.relative_error * math.hypot(1, doublings)
        below, above = (math.hypot(end / step_time_s - 1, own) for end in (low_s, high_s))
        rate = setup.images_per_step / step_time_s
        return Prediction(
            setup=setup,
            step_time_s=step_time_s,
            images_per_second=rate,
            images_per_second_low=rate / (1 + above) if math.isfinite(above) else None,
            images_per_second_high=rate / (1 - below) if below < 1 else None,
            is_extrapolated=doublings > 0 or not self._is_within(setup),
        )

    def errors(self) -> list[float]:
        """The relative error of the law at each point."""
        return [point.step_time_s / self.step_time_s(point.setup) - 1 for point in self.points]

    def _ends(self, value: float, factors: Callable[[float], np.ndarray]) -> tuple[float, float]:
        """The least and the greatest value in all regions, from the factors of a hidden share."""
        ranges = [region.range_of(factors(share)) for share, region in self.regions.items()]
        lows, highs = zip(*filter(None, ranges), strict=True)
        return min(value, *lows), max(value, *highs)

    def _doublings_beyond(self, setup: Setup) -> float:
        """How often GPUs, images of a GPU and micro-batch double beyond the figures, together."""
        return sum(
            max(0.0, math.log2(value / max(values)), math.log2(min(values) / value))
            for name in ("num_gpus", "device_batch", "micro_batch")
            for value in [getattr(setup, name)]
            for values in [[getattr(point.setup, name) for point in self.points]]
        )

    def _factors(self, setup: Setup) -> np.ndarray:
        return _work(setup) + _waiting(setup, self.gpus_per_node)

    def _is_within(self, setup: Setup) -> bool:
        """Whether a setup has no more leverage than the figure with the most of it.

        Leverage is over all terms that a step may have, also those that are not in the law. This
        finds the extrapolation that no single number shows (Montgomery, Peck and Vining,
        Introduction to Linear Regression Analysis, section 3.8).
        """
        rows = self.regions[0.0].rows
        sizes = np.linalg.norm(rows, axis=0)
        asked = self._factors(setup) / self.step_time_s(setup)
        if asked[sizes == 0].any():
            return False
        sizes[sizes == 0] = 1
        _, strengths, directions = np.linalg.svd(rows / sizes, full_matrices=False)
        told = strengths > ROUNDING * strengths[0]
        figures = [self._factors(one.setup) / self.step_time_s(one.setup) for one in self.points]
        along = np.array([asked, *figures]) / sizes @ directions[told].T
        is_told = np.linalg.norm(along[0]) >= (1 - ROUNDING) * np.linalg.norm(asked / sizes)
        leverages = np.sum((along / strengths[told]) ** 2, axis=1)
        return bool(is_told and leverages[0] <= max(leverages[1:]) + ROUNDING)


def fit_law(points: Sequence[Point], *, gpus_per_node: int = 8) -> StepLaw:
    """Fit the constants by least squares of the relative errors of the step times.

    Args:
        points: Figures of one kind of GPU and one kind of work.
        gpus_per_node: GPUs of a node.

    Raises:
        ConfigError: If there are too few different points to fit the terms, or steps take no time.
    """
    notes: list[str] = []
    several_sizes = len({point.setup.micro_batch for point in points}) > 1
    terms: list[str] = []
    for term in (MICRO_BATCH, *([IMAGE] if several_sizes else []), OVERHEAD):
        if _can_tell(points, [*terms, term], gpus_per_node):
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
    law = _choose(points, terms, gpus_per_node)
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
        share = f"{100 * law.hidden_share:.0f} %"
        notes.append(f"about {share} of the communication hides behind the backward pass")
    if len({_num_nodes(point.setup, gpus_per_node) for point in points}) == 1:
        notes.append(
            "all figures have the same number of nodes: what another one takes is not known"
        )
    limit, relative_error, degrees = _how_sure(points, law, gpus_per_node)
    has_nodes = any(_num_nodes(point.setup, gpus_per_node) > 1 for point in points)
    is_mixed = has_nodes and not _has_phases(points) and COMMUNICATION not in law.terms
    names = {OVERHEAD: OVERHEAD_WITH_COMMUNICATION} if is_mixed else {}
    return StepLaw(
        terms=tuple(names.get(term, term) for term in law.terms),
        seconds=tuple(map(float, law.seconds)),
        hidden_share=law.hidden_share,
        relative_error=relative_error,
        degrees_of_freedom=degrees,
        gpus_per_node=gpus_per_node,
        points=tuple(points),
        regions={
            hidden_share: Region(
                *_make_equations(
                    points, ALL_TERMS, gpus_per_node, hidden_share, hides_in=hidden_share
                ),
                limit,
            )
            for hidden_share in _hidden_shares(points, gpus_per_node)
        },
        notes=tuple(notes),
    )


@dataclasses.dataclass(frozen=True)
class _Fit:
    """Constants of some terms, none 0, with what is left and the lower ends of their intervals."""

    terms: tuple[str, ...]
    hidden_share: float
    seconds: np.ndarray
    square_sum: float
    degrees_of_freedom: int
    lows: np.ndarray


def _choose(points: Sequence[Point], terms: Sequence[str], gpus_per_node: int) -> _Fit:
    """The terms for communication that the figures or their phases show join the others."""
    plain = _fit_terms(points, terms, gpus_per_node)
    if _has_phases(points):
        hidden_shares, more = _hidden_shares(points, gpus_per_node), (NODE, COMMUNICATION, LATENCY)
    else:
        hidden_shares, more = [0.0], (COMMUNICATION, LATENCY)
    found = []
    for hidden_share in hidden_shares:
        for added in _subsets(more):
            asked = [*terms, *added]
            if not _can_tell(points, asked, gpus_per_node, hidden_share):
                continue
            fit = _fit_terms(points, asked, gpus_per_node, hidden_share)
            lows = [low for term, low in zip(fit.terms, fit.lows, strict=True) if term in added]
            is_shown = _has_phases(points) or (len(lows) == len(added) and min(lows) > 0)
            if is_shown and fit.degrees_of_freedom > 0:
                found.append(fit)
    return min(found, key=lambda fit: fit.square_sum / fit.degrees_of_freedom, default=plain)


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    sizes = range(1, len(names) + 1)
    return [one for size in sizes for one in itertools.combinations(names, size)]


def _has_phases(points: Sequence[Point]) -> bool:
    return any(point.communication_s is not None for point in points)


def _fit_terms(
    points: Sequence[Point],
    terms: Sequence[str],
    gpus_per_node: int,
    hidden_share: float = 0.0,
    *,
    hides_in: float = 0.0,
) -> _Fit:
    rows, targets = _make_equations(points, terms, gpus_per_node, hidden_share, hides_in=hides_in)
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


def _how_sure(points: Sequence[Point], law: _Fit, gpus_per_node: int) -> tuple[float, float, int]:
    """The limit of the region, the relative error of a figure and its degrees of freedom."""
    fits = [
        _fit_terms(points, ALL_TERMS, gpus_per_node, hidden_share, hides_in=hidden_share)
        for hidden_share in _hidden_shares(points, gpus_per_node)
    ]
    best = min(fits, key=lambda fit: fit.square_sum)
    square_sum, degrees = best.square_sum, best.degrees_of_freedom - (best.hidden_share > 0)
    if degrees < 1:
        square_sum, degrees = law.square_sum, law.degrees_of_freedom
    variance = square_sum / degrees
    doubt = max(t_quantile(degrees) ** 2 * variance, len(points) * ROUNDING**2)
    return best.square_sum + doubt, math.sqrt(variance), degrees


def _hidden_shares(points: Sequence[Point], gpus_per_node: int) -> list[float]:
    """The shares of the communication that may hide.

    The share that figures show, one more than hides, is linear between two of these.
    """
    nodes = sorted({_num_nodes(point.setup, gpus_per_node) for point in points})
    return [0.0, *(communication_share(num) for num in nodes if num > 1)]


def _can_tell(
    points: Sequence[Point], terms: Sequence[str], gpus_per_node: int, hidden_share: float = 0.0
) -> bool:
    rows, _ = _make_equations(points, terms, gpus_per_node, hidden_share)
    sizes = np.linalg.norm(rows, axis=0)
    return bool(sizes.all()) and np.linalg.matrix_rank(rows / sizes) == len(terms)


def _make_equations(
    points: Sequence[Point],
    terms: Sequence[str],
    gpus_per_node: int,
    hidden_share: float,
    *,
    hides_in: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Factors of the constants, (equations, terms), and what they add up to, both over the step.

    A point is one equation, or two if its communication is known. For `hides_in` see `_work`.
    """
    rows, targets = [], []
    for point in points:
        work = _work(point.setup, hides_in)
        waiting = _waiting(point.setup, gpus_per_node, hidden_share)
        if point.communication_s is None:
            parts = [(work + waiting, point.step_time_s)]
        else:
            work_s = point.step_time_s - point.communication_s
            parts = [(work, work_s), (waiting, point.communication_s)]
        for factors, seconds in parts:
            rows.append(factors[_columns(terms)] / point.step_time_s)
            targets.append(seconds / point.step_time_s)
    return np.array(rows), np.array(targets)


def _columns(terms: Sequence[str]) -> list[int]:
    names = {OVERHEAD_WITH_COMMUNICATION: OVERHEAD}
    return [ALL_TERMS.index(names.get(term, term)) for term in terms]


def _work(setup: Setup, hides_in: float = 0.0) -> np.ndarray:
    """Factors of the constants in what a GPU does by itself, in the order of `ALL_TERMS`.

    Args:
        setup: The setup.
        hides_in: With a share of the communication in every micro-batch, the constant of a
            micro-batch is what it takes beyond that. It is not negative: no more can hide.
    """
    counts = {
        MICRO_BATCH: setup.num_micro_batches,
        IMAGE: setup.device_batch,
        OVERHEAD: 1,
        COMMUNICATION: hides_in * setup.num_micro_batches,
    }
    return np.array([counts.get(term, 0) for term in ALL_TERMS], dtype=float)


def _waiting(setup: Setup, gpus_per_node: int, hidden_share: float = 0.0) -> np.ndarray:
    """Factors of the constants in what it waits for others, likewise."""
    share = communication_share(_num_nodes(setup, gpus_per_node))
    counts = {
        NODE: communication_share(min(setup.num_gpus, gpus_per_node)),
        COMMUNICATION: max(0.0, share - hidden_share),
        LATENCY: setup.num_gpus - 1,
    }
    return np.array([counts.get(term, 0) for term in ALL_TERMS], dtype=float)


def _num_nodes(setup: Setup, gpus_per_node: int) -> int:
    return math.ceil(setup.num_gpus / gpus_per_node)


def communication_share(num_nodes: int) -> float:
    """The factor of the communication constant for a number of nodes.

    In a ring all-reduce, each of n nodes sends (n - 1) / n of the data twice: once to sum it, once
    to distribute the sums. The constant is the time to send all of the data twice.
    """
    return (num_nodes - 1) / num_nodes
