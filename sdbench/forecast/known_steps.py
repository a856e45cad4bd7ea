"""Replays of training steps of built-in models that were made beforehand, for `memory`, `predict`.

``python tools/make_known_steps.py MODEL ...`` makes known_steps.json: for each model the steps that
`memory` asks for, with the encoders in the step and with precomputed latents. A replay depends on
the versions of torch, diffusers, transformers and peft, which the file has.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from sdbench.models import replay

KNOWN_STEPS_FILE = Path(__file__).with_suffix(".json")


@functools.cache
def load_known_steps() -> dict[str, Any]:
    """What the file has: `models` and their `latents`, `versions`, and `steps` by `key_of`."""
    content = json.loads(KNOWN_STEPS_FILE.read_text(encoding="utf-8"))
    for profile in content["steps"].values():
        sizes = profile["trained_sizes"]
        profile["trained_sizes"] = [size for size, count in sizes for _ in range(count)]
    return content


def use_known_steps() -> None:
    """Have steps that the file has not replayed."""
    replay.KNOWN.update(load_known_steps()["steps"])


def versions_of(step: replay.Step) -> dict[str, str] | None:
    """The versions that a step was replayed with, if it is in the file."""
    content = load_known_steps()
    return content["versions"] if replay.key_of(step) in content["steps"] else None
