"""`Region`: the non-negative constants of a linear model that agree with figures.

Least squares gives one set of constants. Others agree nearly as well, and where the figures cannot
separate two terms, very different ones agree equally well. All within

    |rows x constants - targets|^2 <= limit

are the region of confidence (with limit = least square sum + t^2 x variance, the ends of a linear
combination over it are those of its t interval, as long as no constant is at 0). Its ends are found
by fixing the combination and fitting the rest again: the profile likelihood.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

# The row that fixes a combination weighs so much that it is met to a part in 1e8.
WEIGHT = 1e4
# Doublings of a combination before its end counts as unbounded.
MAX_DOUBLINGS = 40
PRECISION = 1e-5


def fit_non_negative(rows: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, float]:
    """Fit non-negative constants to rows, (figures, constants), and targets, (figures,).

    Returns:
        The constants and the sum of squared residuals.
    """
    from scipy import optimize

    # Columns differ by a factor of 1000: GPUs beside an overhead. Columns of zeros stay.
    sizes = np.linalg.norm(rows, axis=0)
    sizes[sizes == 0] = 1
    scaled, _ = optimize.nnls(rows / sizes, targets)
    constants = scaled / sizes
    left = rows @ constants - targets
    return constants, float(left @ left)


@dataclasses.dataclass(frozen=True)
class Region:
    """Constants that agree with figures.

    Attributes:
        rows: Factors of the constants, none negative, (figures, constants).
        targets: (figures,).
        limit: The largest sum of squares that agrees.
    """

    rows: np.ndarray
    targets: np.ndarray
    limit: float

    def range_of(self, factors: np.ndarray) -> tuple[float, float] | None:
        """Return the least and the greatest factors x constants; None if no constants agree.

        The factors, (constants,), are not negative. The greatest is infinite without a bound.
        """
        constants, best = self._best
        if best > self.limit:
            return None
        value = float(factors @ constants)
        # A constant that no figure contains is unbounded.
        is_unseen = not self.rows.any(axis=0)[factors > 0].all()
        high = math.inf if is_unseen else self._end_above(factors, value)
        return self._end_below(factors, value), high

    @functools.cached_property
    def _best(self) -> tuple[np.ndarray, float]:
        return fit_non_negative(self.rows, self.targets)

    def _end_above(self, factors: np.ndarray, value: float) -> float:
        inside = value or PRECISION
        for _ in range(MAX_DOUBLINGS):
            if self._excess(2 * inside, factors) > 0:
                return self._between(inside, 2 * inside, factors)
            inside *= 2
        return math.inf

    def _end_below(self, factors: np.ndarray, value: float) -> float:
        if value == 0 or self._excess(0.0, factors) <= 0:
            return 0.0
        return self._between(value, 0.0, factors)

    def _between(self, inside: float, outside: float, factors: np.ndarray) -> float:
        from scipy import optimize

        if self._excess(inside, factors) >= 0:  # the best fit itself is on the edge
            return inside
        return float(
            optimize.brentq(self._excess, inside, outside, args=(factors,), rtol=PRECISION)
        )

    def _excess(self, value: float, factors: np.ndarray) -> float:
        """Return how far the best fit with this value of the combination is beyond the limit.

        It compares the roots of the square sums above the least one: they grow nearly linearly.
        """
        size = float(np.linalg.norm(factors))
        rows = np.vstack((self.rows, WEIGHT * factors / size))
        constants, _ = fit_non_negative(rows, np.append(self.targets, WEIGHT * value / size))
        left = self.rows @ constants - self.targets
        _, best = self._best
        beyond = max(0.0, float(left @ left) - best)
        return math.sqrt(beyond) - math.sqrt(self.limit - best)
