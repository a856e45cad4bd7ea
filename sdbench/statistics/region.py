"""`find_range`: the range of a combination of non-negative constants that agree with figures.

Least squares gives one set of constants. Others agree nearly as well, and where the figures cannot
separate two terms, very different ones agree equally well. All within

    |rows x constants - targets|^2 <= limit

are the region of confidence (with limit = least square sum + t^2 x variance, the ends of a linear
combination over it are those of its t interval, as long as no constant is at 0). Its ends are found
by fixing the combination and fitting the rest again: the profile likelihood.
"""

from __future__ import annotations

import math

import numpy as np

# The row that fixes a combination weighs so much that it is met to a part in 1e8.
WEIGHT = 1e4
# Doublings of a combination before its end counts as unbounded.
MAX_DOUBLINGS = 40
PRECISION = 1e-5


def fit_non_negative(rows: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, float]:
    """Fit non-negative constants to rows, (figures, constants); also the sum of squared errors."""
    from scipy import optimize

    # Columns differ by a factor of 1000: GPUs beside an overhead. Columns of zeros stay.
    sizes = np.linalg.norm(rows, axis=0)
    sizes[sizes == 0] = 1
    scaled, _ = optimize.nnls(rows / sizes, targets)
    constants = scaled / sizes
    left = rows @ constants - targets
    return constants, float(left @ left)


def find_range(
    rows: np.ndarray, targets: np.ndarray, factors: np.ndarray, *, limit: float
) -> tuple[float, float] | None:
    """Return the least and the greatest factors x constants; None if no constants agree.

    The rows, (figures, constants), and the factors, (constants,), are not negative. The greatest is
    infinite without a bound.
    """
    from scipy import optimize

    constants, best = fit_non_negative(rows, targets)
    if best > limit:
        return None
    value, size = float(factors @ constants), float(np.linalg.norm(factors))
    with_factors = np.vstack((rows, WEIGHT * factors / size))

    def excess(value: float) -> float:
        """How far the best fit with this value of the combination is beyond the limit.

        It compares the roots of the square sums above the least one: they grow nearly linearly.
        """
        fitted, _ = fit_non_negative(with_factors, np.append(targets, WEIGHT * value / size))
        left = rows @ fitted - targets
        return math.sqrt(max(0.0, float(left @ left) - best)) - math.sqrt(limit - best)

    def end_between(inside: float, outside: float) -> float:
        if excess(inside) >= 0:  # the best fit itself is on the edge
            return inside
        return float(optimize.brentq(excess, inside, outside, rtol=PRECISION))

    low = 0.0 if value == 0 or excess(0.0) <= 0 else end_between(value, 0.0)
    # A constant that no figure contains is unbounded.
    if not rows.any(axis=0)[factors > 0].all():
        return low, math.inf
    inside = value or PRECISION
    for _ in range(MAX_DOUBLINGS):
        if excess(2 * inside) > 0:
            return low, end_between(inside, 2 * inside)
        inside *= 2
    return low, math.inf
