"""Make sdbench/forecast/known_steps.json, so that `memory` and `predict` need no replay of it.

    python tools/make_known_steps.py sdxl flux-schnell

replays all steps of these models that `python -m sdbench memory --model_name MODEL` asks for, also
with ``--latents precomputed``, and puts them into the file; other models in it stay, unless they
were replayed with other versions. It takes minutes for each model.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sdbench.forecast import memory_tables
from sdbench.forecast.known_steps import KNOWN_STEPS_FILE
from sdbench.forecast.memory_tables import find_needs, list_levers
from sdbench.models import memory, replay
from sdbench.settings.fitting import MemorySettings
from sdbench.settings.request import parse

LATENTS = ("online", "precomputed")
PACKAGES = ("torch", "diffusers", "transformers", "peft")


def find_steps(model: str, latents: str) -> dict[str, dict[str, Any]]:
    """The profiles of all steps that `memory` asks for, by `key_of` the steps."""
    found = {}

    def profile_step(step: replay.Step) -> replay.StepProfile:
        profile = replay.profile_step(step)
        if replay.key_of(step) not in found:
            sizes = sorted(Counter(profile.trained_sizes).items())
            content = {**dataclasses.asdict(profile), "trained_sizes": sizes}
            found[replay.key_of(step)] = content
            print(model, latents, len(found), flush=True)
        return profile

    memory.profile_step = profile_step
    argv = ["--model_name", model, "--latents", latents]
    _, first = find_needs(parse(MemorySettings, argv, prog="memory", description="", epilog=""))
    list(list_levers(first))
    return found


def main(models: list[str]) -> None:
    """Add models to the file, each when it is done."""
    versions = {name: version(name) for name in PACKAGES}
    content: dict[str, Any] = json.loads(KNOWN_STEPS_FILE.read_text(encoding="utf-8"))
    if content["versions"] != versions:
        content = {"versions": versions, "models": [], "steps": {}}
    memory_tables.use_known_steps = lambda: None  # all are replayed anew
    for model in models:
        for latents in LATENTS:
            content["steps"] |= find_steps(model, latents)
        content["models"] = sorted({*content["models"], model})
        steps = (f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in content["steps"].items())
        head = (f" {json.dumps(key)}: {json.dumps(content[key])}" for key in ("versions", "models"))
        text = ",\n".join([*head, ' "steps": {\n' + ",\n".join(steps)])
        KNOWN_STEPS_FILE.write_text(f"{{\n{text}\n }}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
