"""Buckets: the shapes that pictures are cropped to, and the bucket of each picture.

A picture goes to the shape of the nearest proportions: the smallest distance of the logarithms of
width / height, the larger shape if two are equally near. It is resized to cover the shape, and what
is outside of it is cut off.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.base.shape import Shape
from sdbench.base.units import counted
from sdbench.settings.buckets import AUTO, ENLARGE, SMALLER, BucketSettings, read_shares
from sdbench.settings.kinds import read_shapes

if TYPE_CHECKING:
    import numpy as np

# The step of SDXL's own shapes, and of mosaicml/diffusion's.
STEP_PX = 64
# A side has at least so many steps, so that there are other shapes than the square.
MIN_STEPS = 4
# A picture of which more than this share would be cut off is not used.
MAX_CUT_OFF = 0.5
# In place of a bucket's number: why a sample is not used.
TOO_SMALL, UNSERVED, UNREADABLE = -1, -2, -3
REASONS = {
    TOO_SMALL: "smaller than its shape",
    UNSERVED: "of proportions that no bucket serves",
    UNREADABLE: "not readable",
}
ROWS_AT_ONCE = 2**16


class Budget(NamedTuple):
    """Shapes of about equally many pixels, and the share of the pictures that go to them."""

    share: float
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Buckets:
    """The shapes of a run; `small_pictures` is the setting."""

    budgets: tuple[Budget, ...]
    small_pictures: str

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes, each once."""
        return tuple(dict.fromkeys(shape for budget in self.budgets for shape in budget.shapes))

    def assign(self, sizes: np.ndarray, *, seed: int) -> np.ndarray:
        """Return the number of each picture's bucket in `shapes`, or `TOO_SMALL` or `UNSERVED`.

        `sizes` are widths and heights in pixels, (N, 2). With several budgets, `seed` decides which
        pictures go to which.
        """
        import numpy as np  # --help does without

        bounds = np.cumsum([budget.share for budget in self.budgets])[:-1]
        chances = np.random.default_rng([seed, len(self.budgets)]).random(len(sizes))
        budget_of = np.searchsorted(bounds, chances, side="right")
        # A row takes several hundred bytes meanwhile.
        parts = [
            self._assign(
                sizes[first : first + ROWS_AT_ONCE], budget_of[first : first + ROWS_AT_ONCE]
            )
            for first in range(0, len(sizes), ROWS_AT_ONCE)
        ]
        return np.concatenate([np.empty(0, dtype=np.int16), *parts])

    def _assign(self, sizes: np.ndarray, budget_of: np.ndarray) -> np.ndarray:
        import numpy as np

        shapes = np.array(self.shapes)
        num_pixels = shapes.prod(1)
        # (N, shapes): distance of the proportions, and whether the picture covers the shape.
        ratios = np.log(shapes[:, 0] / shapes[:, 1])
        distances = abs(np.log(sizes[:, :1] / sizes[:, 1:]) - ratios)
        is_near = distances <= -math.log(1 - MAX_CUT_OFF)
        covers = (sizes[:, None] >= shapes).all(2)
        is_of_budget = np.array(
            [[shape in budget.shapes for shape in self.shapes] for budget in self.budgets]
        )[budget_of]
        nearest = _choose(distances, num_pixels, allowed=is_of_budget)
        rows = np.arange(len(sizes))
        is_far = ~is_near[rows, nearest]
        if self.small_pictures != ENLARGE:
            is_small = ~covers[rows, nearest] & ~is_far
            smaller = covers & is_near & (num_pixels < num_pixels[nearest][:, None])
            has_smaller = smaller.any(1) & (self.small_pictures == SMALLER)
            found = _choose(distances, num_pixels, allowed=smaller)
            nearest = np.where(is_small, np.where(has_smaller, found, TOO_SMALL), nearest)
        return np.where(is_far, UNSERVED, nearest).astype(np.int16)


def _choose(distances: np.ndarray, num_pixels: np.ndarray, *, allowed: np.ndarray) -> np.ndarray:
    """Return for each row the allowed shape of the smallest distance, the largest of those."""
    import numpy as np

    # Distances that differ by rounding are equal; else one of two mirrored shapes wins by chance.
    rounded = np.where(allowed, distances.round(9), np.inf)
    is_best = rounded == rounded.min(1, keepdims=True)
    return np.where(is_best, num_pixels, -1).argmax(1)


def make_buckets(settings: BucketSettings, *, image_size: int, multiple: int) -> Buckets:
    """Return the buckets that `BucketSettings` ask for, for a model.

    `multiple` is the number of pixels that its sides are multiples of.

    Raises:
        ConfigError: The shares do not add up to 1, or no shape is left.
    """
    text = settings.buckets
    if text == AUTO:
        budgets = [Budget(1.0, _list_shapes(settings, image_size, multiple))]
    elif "=" in text:
        budgets = [
            Budget(share, _list_shapes(settings, size, multiple))
            for size, share in read_shares(text).items()
        ]
    else:
        budgets = [Budget(1.0, tuple(dict.fromkeys(read_shapes(text))))]
    total = sum(budget.share for budget in budgets)
    if abs(total - 1) > 1e-6:
        raise ConfigError(
            f"the shares of the buckets add up to {total:g}",
            value=text,
            allowed="shares that add up to 1, e.g. 256=0.25,512=0.75",
            flag="--buckets",
        )
    return Buckets(tuple(budgets), settings.small_pictures)


def _list_shapes(settings: BucketSettings, image_size: int, multiple: int) -> tuple[Shape, ...]:
    """Return the shapes with at most as many pixels as a square, each as large as its width allows.

    At 512 px in steps of 64: 512 x 512, 576 x 448, 640 x 384 and their mirror images.
    """
    step = settings.bucket_step
    if step is None:
        # The largest in which there is the square itself.
        steps = (STEP_PX, STEP_PX // 2, STEP_PX // 4)
        fitting = [
            one
            for one in steps
            if one % multiple == 0 and image_size % one == 0 and image_size >= MIN_STEPS * one
        ]
        step = fitting[0] if fitting else multiple
    elif step % multiple:
        raise ConfigError(
            "the step of the buckets does not suit the model",
            value=step,
            allowed=f"multiples of {multiple}",
            flag="--bucket_step",
        )
    longest = math.isqrt(int(image_size**2 * settings.max_aspect_ratio))
    found = set()
    for width in range(step, longest + 1, step):
        height = image_size**2 // width // step * step
        if height and max(width, height) <= settings.max_aspect_ratio * min(width, height):
            found |= {Shape(width, height), Shape(height, width)}
    if not found:
        raise ConfigError(
            "there is no shape with so few pixels in these steps",
            value=f"{image_size} px in steps of {step}",
            allowed=f"a size of at least {step}",
            flag="--image_size or --bucket_step",
        )
    return tuple(
        sorted(found, key=lambda shape: (abs(math.log(shape.width / shape.height)), shape))
    )


def size_of_budget(buckets: str | None) -> int | None:
    """Return the side of the square with as many pixels as the largest bucket, where it is told.

    `buckets` is the setting; None with ``auto``, which asks for the setting image_size.
    """
    if buckets is None or buckets == AUTO:
        return None
    if "=" in buckets:
        return max(read_shares(buckets))
    return max(math.isqrt(shape.num_pixels) for shape in read_shapes(buckets))


@dataclass(frozen=True, eq=False)
class Mixture:
    """The buckets that a data set fills, and the bucket of each of its samples.

    Attributes:
        shapes: Of the filled buckets.
        bucket_of: Their number by sample; for one that is not used a key of `REASONS`.
        sizes: Width and height of each picture in pixels, (N, 2); of encoded samples their shapes.
        num_enlarged: Pictures that are smaller than their shape.
    """

    shapes: tuple[Shape, ...]
    bucket_of: np.ndarray
    sizes: np.ndarray
    num_enlarged: int = 0

    @property
    def num_left_out(self) -> int:
        """Samples that are not used."""
        return int((self.bucket_of < 0).sum())

    @functools.cached_property
    def counts(self) -> list[int]:
        """Samples in each bucket."""
        import numpy as np

        used = self.bucket_of[self.bucket_of >= 0]
        return np.bincount(used, minlength=len(self.shapes)).tolist()

    @property
    def shares(self) -> list[float]:
        """Share of the samples in each bucket."""
        counts = self.counts
        return [count / sum(counts) for count in counts]

    @property
    def largest(self) -> Shape:
        """The shape of most pixels."""
        return max(self.shapes, key=lambda shape: shape.num_pixels)

    def split(self, indices: Iterable[int]) -> list[list[int]]:
        """Return the samples that are used, in lists of one shape."""
        lists: list[list[int]] = [[] for _ in self.shapes]
        for index in indices:
            if (bucket := int(self.bucket_of[index])) >= 0:
                lists[bucket].append(index)
        return [of_bucket for of_bucket in lists if of_bucket]

    def describe(self, batch_size: int) -> str:
        """Say in a sentence or more which shapes there are, and what is enlarged and left out."""
        counts = dict(zip(self.shapes, self.counts, strict=True))
        if len(counts) == 1:
            (shape,) = counts
            told = f"All pictures have the shape {shape}"
            is_square = shape.width == shape.height
            told += ": buckets change nothing, and cost nothing." if is_square else "."
        else:
            listed = ", ".join(
                f"{shape} {share:.1%}" for shape, share in zip(counts, self.shares, strict=True)
            )
            told = f"Pictures of {len(counts)} shapes: {listed}."
        small = [str(shape) for shape, count in counts.items() if count < batch_size]
        if small:
            told += (
                f" Fewer than a batch of {batch_size} have {', '.join(small)}: their batches are "
                "filled over several epochs, so their first steps come late."
            )
        if self.num_enlarged:
            told += f" {counted(self.num_enlarged, 'picture is', 'pictures are')} enlarged."
        for number, reason in REASONS.items():
            if count := int((self.bucket_of == number).sum()):
                told += f" Left out, as each is {reason}: {count} of {len(self.bucket_of)}."
        return told

    def samples_by_shape(self) -> dict[str, int]:
        """Return the number of samples of each bucket."""
        return {str(shape): count for shape, count in zip(self.shapes, self.counts, strict=True)}

    def for_record(self) -> dict[str, Any]:
        """Return the facts of a record."""
        return {
            "num_samples": self.samples_by_shape(),
            "num_enlarged": self.num_enlarged,
            "num_left_out": self.num_left_out,
        }

    def mean(self, values: Sequence[float]) -> float:
        """Return the mean over the samples of a value of each bucket."""
        return sum(share * value for share, value in zip(self.shares, values, strict=True))

    def num_batches(self, num_epochs: int, *, batch_size: int) -> int:
        """Return the full batches, each of one bucket, in the first epochs of a run."""
        return sum(num_epochs * count // batch_size for count in self.counts)


def fill_buckets(shapes: Sequence[Shape], bucket_of: np.ndarray, *, sizes: np.ndarray) -> Mixture:
    """Make a mixture of those shapes that have samples."""
    import numpy as np

    is_used = bucket_of >= 0
    used, numbers = np.unique(bucket_of[is_used], return_inverse=True)
    renumbered = bucket_of.astype(np.int16)
    renumbered[is_used] = numbers
    wanted = np.array(shapes)[bucket_of[is_used]]
    return Mixture(
        tuple(shapes[number] for number in used),
        renumbered,
        sizes=sizes,
        num_enlarged=int((sizes[is_used] < wanted).any(1).sum()),
    )
