"""Tables of published profiles: the floor of a step, and the parts of a step above it."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sdbench.base.files import refused_unless_read
from sdbench.base.outside import read_json_object
from sdbench.record.configuration import (
    describe_model,
    describe_other_settings,
    place_of_encoders,
)
from sdbench.record.store import PROFILE
from sdbench.report.runs import describe_devices
from sdbench.report.tables import Table, make_table

CASTS = ("aten::_to_copy", "aten::copy_")
ONE_PASS = "sdbench::adamw_one_pass"


def load_profile(path: Path) -> dict[str, Any]:
    """Read a profile.json."""
    allowed = "profile.json as python -m sdbench profile wrote it"
    also = (AttributeError, LookupError, TypeError, ArithmeticError)
    with refused_unless_read(path, "a profile", allowed=allowed, flag="--folder", also=also):
        profile = read_json_object(path)
        if profile.get("kind") != PROFILE or not isinstance(profile.get("step"), dict):
            raise ValueError("it is not the profile of a step")
        make_limit_tables([profile])
    return profile


def make_limit_tables(profiles: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Tables of floors and of the time above them, from profiles with a needed floor."""
    known = [profile for profile in profiles if "needed_floor_ms" in profile["step"]]
    if not known:
        return []
    return [
        make_table((_work(one) | part(one) for one in known), name=name, caption=caption)
        for name, caption, part in (
            ("floors", "Floors of a step", _floors),
            ("above-the-floor", "The profiled step above the floor that it needs, in ms", _rest),
        )
    ]


def _work(profile: Mapping[str, Any]) -> dict[str, Any]:
    config = profile["config"]
    return {
        "device": describe_devices(profile),
        "model": describe_model(profile),
        "encoders": place_of_encoders(config),
        "px": config["image_size"],
        "preset": config["preset"],
        "precision": config["precision"],
        "images": profile["step"]["num_images"],
        "other settings": describe_other_settings(profile) or "none",
    }


def _floors(profile: Mapping[str, Any]) -> dict[str, Any]:
    step = profile["step"]
    ceilings = profile["ceilings"]
    return {
        "TFLOP/s": ceilings["tflops"][step["ideal_floor_dtype"]],
        "GB/s": ceilings["gb_per_s"],
        "floor of the FLOPs, ms": step["ideal_floor_ms"],
        "needed floor, ms": step["needed_floor_ms"],
        "step, ms": step["step_ms"],
        "images/s": step["images_per_second"],
        "reached, %": 100 * step["needed_floor_ms"] / step["step_ms"],
    }


def _rest(profile: Mapping[str, Any]) -> dict[str, float]:
    """The time of the profiled step above its needed floor, in ms, and its parts."""
    step = profile["step"]
    times_ms: dict[str, float] = collections.defaultdict(float)
    for row in profile["operators"]:
        if row["phase"] == "optimizer" or row["operator"] == ONE_PASS:
            part = "update"
        elif row["gflop"]:
            part = "products"
        else:
            part = "casts" if row["operator"] in CASTS else "others"
        times_ms[part] += row["time_ms"] or 0.0
    one_pass_ms = step["needed_floor_ms"] - step["ideal_floor_ms"]
    return {
        "above the floor": step["profiled_step_ms"] - step["needed_floor_ms"],
        "products and convolutions": times_ms["products"] - step["ideal_floor_ms"],
        "casts and copies": times_ms["casts"],
        "the optimizer": times_ms["update"] - one_pass_ms,
        "other operators": times_ms["others"],
        "no operator: Python, autograd": step["outside_operators_ms"],
    }
