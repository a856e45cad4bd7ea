"""Settings of buckets: pictures of several shapes, each cropped to the nearest one."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from sdbench.settings.kinds import POSITIVE, Kind, number, one_of
from sdbench.settings.setting import Beside, setting

AUTO = "auto"
ENLARGE, SMALLER, LEAVE_OUT = "enlarge", "smaller_bucket", "leave_out"
WITH_BUCKETS = (Beside(("buckets",)),)
_SIDE = "[1-9][0-9]{0,4}"
_SHARE = r"(?:0?\.[0-9]+|1(?:\.0*)?)"
_FORMS = (
    f"{_SIDE}x{_SIDE}(,{_SIDE}x{_SIDE})*",
    f"{_SIDE}={_SHARE}(,{_SIDE}={_SHARE})*",
)


def _parse_buckets(value: Any) -> str:
    if value is True:  # the flag without a value
        return AUTO
    if value != AUTO and not any(re.fullmatch(form, str(value)) for form in _FORMS):
        raise ValueError
    return value


BUCKETS = Kind(
    "auto, or shapes such as 512x512,640x384, or sizes with their shares of the pictures such as "
    "256=0.25,512=0.75",
    _parse_buckets,
    "auto|WxH,...|SIZE=SHARE,...",
    lambda: (AUTO,),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketSettings:
    """Which shapes there are, and what is done with small pictures."""

    GROUP = "pictures of several shapes"
    CAME_LATER = True

    buckets: str | None = setting(
        BUCKETS,
        None,
        "crop each picture to the nearest of several shapes, not to a square; each batch has one "
        "shape. auto, or the flag alone: shapes with at most as many pixels as the square of "
        "--image_size. Or a list of shapes. Or sizes of squares with their shares of the pictures, "
        "each with its shapes",
        bare=AUTO,
        identifies=True,
        demands={
            "streams": ((None,), "buckets are made of one data set"),
            "remote_files": (("copy",), "buckets are made of files that are read by number"),
            "missing_latents": (("error",), "in buckets each sample has latents of one shape"),
            "online_preprocessing": ((False,), "Ray's encoders take squares"),
            "task": (("pretrain",), "pictures of a subject are squares"),
            "cuda_graph": ((False,), "a captured step has one shape"),
        },
    )
    bucket_step: int | None = setting(
        POSITIVE,
        None,
        "sides of the shapes are multiples of it (default: 64, or what the model needs)",
        acts_beside=WITH_BUCKETS,
        identifies=True,
    )
    max_aspect_ratio: float = setting(
        number("a number of at least 1", lambda value: 1 <= value < float("inf")),
        2.0,
        "longest side of a shape over its shortest",
        acts_beside=WITH_BUCKETS,
        identifies=True,
    )
    small_pictures: str = setting(
        one_of(ENLARGE, SMALLER, LEAVE_OUT),
        ENLARGE,
        "pictures that are smaller than their shape: enlarge them, crop them to the nearest shape "
        "with fewer pixels that they cover, or leave them out; each is counted",
        acts_beside=WITH_BUCKETS,
        identifies=True,
    )
