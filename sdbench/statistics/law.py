"""The law of the time of an optimizer step on any number of GPUs.

    step_s = num_micro_batches x time_per_micro_batch_s + overhead_s
    num_micro_batches = ceil(device_batch / micro_batch), device_batch = floor(global_batch / N)

and the images in a step are N x device_batch, less than the global batch if N does not divide it.
The law counts micro-batches because training with small ones is bound by the host: a micro-batch of
1 or 2 images takes nearly the time of one of 4. Figures of several micro-batch sizes add the term
device_batch x time_per_image_s. Figures of several nodes, if they determine it, add (nodes - 1) /
nodes x communication_s: the part of a ring all-reduce between nodes that does not overlap with the
backward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from sdbench.base.errors import ConfigError
from sdbench.statistics.intervals import t_quantile

MICRO_BATCH = "time per micro-batch"
IMAGE = "time per image"
OVERHEAD = "overhead per step"
COMMUNICATION = "communication"
# A constant below this is a rounding error of the fit.
NO_TIME_S = 1e-9


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
    """

    setup: Setup
    images_per_second: float

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
        images_per_second_low: Lower end of the 95 % interval of a figure measured there.
        images_per_second_high: Upper end; None if there is no bound.
        is_extrapolated: Whether its number of GPUs or its micro-batch lies outside the range of the
            figures.
    """

    setup: Setup
    step_time_s: float
    images_per_second: float
    images_per_second_low: float
    images_per_second_high: float | None
    is_extrapolated: bool


@dataclasses.dataclass(frozen=True)
class StepLaw:
    """A fitted law.

    Attributes:
        terms: Names of the terms in it.
        seconds: The constant of each term, in seconds.
        covariance: Covariance of the constants, (terms, terms).
        relative_error: Standard deviation of a figure from the law, as a fraction.
        degrees_of_freedom: Number of points minus number of terms.
        gpus_per_node: GPUs of a node, for the communication term.
        points: The points that were fitted.
        notes: Terms that the points do not determine, in words.
    """

    terms: tuple[str, ...]
    seconds: tuple[float, ...]
    covariance: np.ndarray
    relative_error: float
    degrees_of_freedom: int
    gpus_per_node: int
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    def constant(self, term: str) -> tuple[float, float, float]:
        """The constant of a term with its 95 % interval in seconds: value, low, high."""
        index = self.terms.index(term)
        half = t_quantile(self.degrees_of_freedom) * math.sqrt(self.covariance[index, index])
        return self.seconds[index], max(0.0, self.seconds[index] - half), self.seconds[index] + half

    @property
    def micro_batches(self) -> list[int]:
        """The micro-batch sizes of the points."""
        return sorted({point.setup.micro_batch for point in self.points})

    def predict(self, setup: Setup) -> Prediction:
        """Predict the figure of a setup.

        The interval covers the error of the constants and the deviation of single figures from
        the law.

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
        row = _make_row(setup, self.terms, gpus_per_node=self.gpus_per_node)
        step_time_s = float(row @ np.asarray(self.seconds))
        variance = float(row @ self.covariance @ row) / step_time_s**2
        half = t_quantile(self.degrees_of_freedom) * math.sqrt(variance + self.relative_error**2)
        rate = setup.images_per_step / step_time_s
        gpus = [point.setup.num_gpus for point in self.points]
        sizes = self.micro_batches
        return Prediction(
            setup=setup,
            step_time_s=step_time_s,
            images_per_second=rate,
            images_per_second_low=rate / (1 + half),
            images_per_second_high=rate / (1 - half) if half < 1 else None,
            is_extrapolated=not (
                min(gpus) <= setup.num_gpus <= max(gpus)
                and sizes[0] <= setup.micro_batch <= sizes[-1]
            ),
        )

    def errors(self) -> list[float]:
        """The relative error of the law at each point."""
        return [
            self.predict(point.setup).images_per_second / point.images_per_second - 1
            for point in self.points
        ]


def fit_law(points: Sequence[Point], *, gpus_per_node: int = 8) -> StepLaw:
    """Fit the constants by least squares of the relative errors of the step times.

    Args:
        points: Figures of one kind of GPU and one kind of work.
        gpus_per_node: GPUs of a node.

    Raises:
        ConfigError: If there are too few different points to fit the terms.
    """
    notes: list[str] = []
    several_sizes = len({point.setup.micro_batch for point in points}) > 1
    terms: list[str] = []
    for term in (MICRO_BATCH, *([IMAGE] if several_sizes else []), OVERHEAD):
        if _can_tell(points, [*terms, term], gpus_per_node=gpus_per_node):
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
    law = _fit_terms(points, terms, notes, gpus_per_node=gpus_per_node)
    with_communication = [*law.terms, COMMUNICATION]
    if len(points) > len(with_communication) and _can_tell(
        points, with_communication, gpus_per_node=gpus_per_node
    ):
        longer = _fit_terms(points, with_communication, notes, gpus_per_node=gpus_per_node)
        if COMMUNICATION in longer.terms and longer.constant(COMMUNICATION)[1] > 0:
            return longer
    note = f"{COMMUNICATION}: not told apart from the other terms by these points"
    return dataclasses.replace(law, notes=(*law.notes, note))


def _fit_terms(
    points: Sequence[Point], terms: Sequence[str], notes: Sequence[str], *, gpus_per_node: int
) -> StepLaw:
    from scipy import optimize

    steps_s = np.array([point.step_time_s for point in points])
    rows = _make_rows(points, terms, gpus_per_node=gpus_per_node) / steps_s[:, None]
    # No term has a negative time.
    seconds, _ = optimize.nnls(rows, np.ones(len(points)))
    kept = [term for term, value in zip(terms, seconds, strict=True) if value > NO_TIME_S]
    if kept != list(terms):
        gone = [f"{term}: comes out as 0" for term in terms if term not in kept]
        return _fit_terms(points, kept, [*notes, *gone], gpus_per_node=gpus_per_node)
    degrees = len(points) - len(terms)
    residuals = rows @ seconds - 1
    variance = float(residuals @ residuals) / degrees
    return StepLaw(
        terms=tuple(terms),
        seconds=tuple(map(float, seconds)),
        covariance=variance * np.linalg.inv(rows.T @ rows),
        relative_error=math.sqrt(variance),
        degrees_of_freedom=degrees,
        gpus_per_node=gpus_per_node,
        points=tuple(points),
        notes=tuple(notes),
    )


def _can_tell(points: Sequence[Point], terms: Sequence[str], *, gpus_per_node: int) -> bool:
    rows = _make_rows(points, terms, gpus_per_node=gpus_per_node)
    return np.linalg.matrix_rank(rows) == len(terms)


def _make_rows(points: Sequence[Point], terms: Sequence[str], *, gpus_per_node: int) -> np.ndarray:
    return np.array(
        [_make_row(point.setup, terms, gpus_per_node=gpus_per_node) for point in points]
    )


def communication_share(num_nodes: int) -> float:
    """The factor of the communication constant for a number of nodes.

    In a ring all-reduce, each of n nodes sends (n - 1) / n of the data twice: once to sum it, once
    to distribute the sums. The constant is the time to send all of the data twice.
    """
    return (num_nodes - 1) / num_nodes


def _make_row(setup: Setup, terms: Sequence[str], *, gpus_per_node: int) -> np.ndarray:
    """The factor of each term's constant in the time of a step."""
    num_nodes = math.ceil(setup.num_gpus / gpus_per_node)
    counts = {
        MICRO_BATCH: setup.num_micro_batches,
        IMAGE: setup.device_batch,
        OVERHEAD: 1,
        COMMUNICATION: communication_share(num_nodes),
    }
    return np.array([counts[term] for term in terms], dtype=float)
