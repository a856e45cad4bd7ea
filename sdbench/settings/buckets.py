"""Settings of buckets: pictures of several shapes, each cropped to the nearest one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sdbench.settings.kinds import FRACTION, POSITIVE, SHAPES, Kind, number, one_of
from sdbench.settings.parallel import WITHOUT_GRAPHS
from sdbench.settings.setting import AllBut, Beside, Rule, Situation, setting

AUTO, NONE = "auto", "none"
ENLARGE, SMALLER, LEAVE_OUT = "enlarge", "smaller_bucket", "leave_out"
WITH_BUCKETS = (Beside(("buckets",)),)


def _parse_buckets(value: Any) -> str | None:
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if value == NONE:
        return None
    if value == AUTO:
        return value
    if "=" not in str(value):
        return SHAPES.parse(value)
    read_shares(value)
    return value


def read_shares(text: str) -> dict[int, float]:
    """The shares of the pictures by the sides of squares, in a value such as 256=0.25,512=0.75."""
    parts = [part.split("=") for part in text.split(",")]
    return {POSITIVE.parse(size): FRACTION.parse(share) for size, share in parts}


BUCKETS = Kind(
    "auto | none, or shapes such as 512x512,640x384, or sizes with their shares of the pictures "
    "such as 256=0.25,512=0.75",
    _parse_buckets,
    "auto|WxH,...|SIZE=SHARE,...",
    lambda: (AUTO, NONE),
)


def _are_made(situation: Situation) -> bool:
    """Whether shapes are chosen: stored latents keep those in which they were encoded."""
    config = situation.config
    is_encoded = getattr(config, "latents", "online") == "precomputed"
    return not (is_encoded and (config.remote or config.local))


def _without_effect(default: Any, is_met: Callable[[Situation], Any], problem: str) -> Rule:
    return Rule(
        AllBut([default]),
        is_met,
        problem,
        allowed="no such setting",
        others=("buckets",),
        is_about_effect=True,
    )


def _rules(default: Any, *, of_lists: bool = True) -> tuple[Rule, ...]:
    """The rules of a setting that shapes are made by."""
    kept = _without_effect(default, _are_made, "stored latents keep the shapes of their encoding")
    taken = _without_effect(
        default,
        lambda s: "x" not in (s.config.buckets or ""),
        "a list of shapes is taken as it is",
    )
    return (kept,) if of_lists else (kept, taken)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketSettings:
    """Which shapes there are, and what is done with small pictures."""

    GROUP = "pictures of several shapes"
    IDENTIFIES = True

    buckets: str | None = setting(
        BUCKETS,
        None,
        "crop each picture to the nearest of several shapes, not to a square; each batch has one "
        "shape. auto, or the flag alone: shapes with at most as many pixels as the square of "
        "--image_size. Or a list of shapes. Or sizes of squares with their shares of the pictures, "
        "each with its shapes",
        bare=AUTO,
        is_everyday=True,
        rules=(
            Rule(
                AllBut([None, AUTO]),
                _are_made,
                "stored latents keep the shapes of their encoding",
                allowed=AUTO,
            ),
        ),
        demands={
            "streams": ((None,), "buckets are made of one data set"),
            "remote_files": (("copy",), "buckets are made of files that are read by number"),
            "missing_latents": (("error",), "in buckets each sample has latents of one shape"),
            "online_preprocessing": ((False,), "Ray's encoders take squares"),
            "task": (("pretrain",), "pictures of a subject are squares"),
            "cuda_graph": ((False,), "a captured step has one shape"),
            "compile_mode": (WITHOUT_GRAPHS, "a captured graph has one shape"),
        },
    )
    bucket_step: int | None = setting(
        POSITIVE,
        None,
        "sides of the shapes are multiples of it (default: the largest of 64, 32 and 16 in which "
        "there is the square, or what the model needs)",
        acts_beside=WITH_BUCKETS,
        rules=_rules(None, of_lists=False),
    )
    max_aspect_ratio: float = setting(
        number("a number of at least 1", lambda value: 1 <= value < float("inf")),
        2.0,
        "longest side of a shape over its shortest",
        acts_beside=WITH_BUCKETS,
        rules=_rules(2.0, of_lists=False),
    )
    small_pictures: str = setting(
        one_of(ENLARGE, SMALLER, LEAVE_OUT),
        ENLARGE,
        "pictures that are smaller than their shape: enlarge them, crop them to the nearest shape "
        "with fewer pixels that they cover, or leave them out; each is counted",
        acts_beside=WITH_BUCKETS,
        rules=_rules(ENLARGE),
    )
