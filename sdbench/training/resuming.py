"""Checks whether a run may go on from a checkpoint, and names the sub-models that stay random."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.data.formats.identity import HELD_OUT, MODEL, belongings_of, describe_changes, digest
from sdbench.plan.draft import Plan
from sdbench.settings.buckets import BucketSettings
from sdbench.settings.recipe import ObjectiveSettings, TrainConfig
from sdbench.settings.setting import declarations

# Settings that decide a validation loss, beside those that identify a run.
DECIDING_VALIDATION = [
    *("num_validation_images", "filters", "empty_captions", "on_bad_sample", "read_avif"),
    *(one.name for kind in (BucketSettings, ObjectiveSettings) for one in dataclasses.fields(kind)),
]


def compare_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], *, folder: Path
) -> list[str]:
    """Describe the settings that differ.

    A `ConfigError` refuses one that identifies the run, and a checkpoint without today's settings.
    """
    declared = declarations(TrainConfig)
    if others := sorted(before.keys() ^ now.keys()):
        raise ConfigError(
            f"the checkpoint {folder} was saved by a version of the suite with other settings",
            value=", ".join(others),
            allowed="the version that saved it, or another --run_name for another run",
            flag="--run_name",
        )
    changed = [name for name, value in now.items() if before[name] != value]
    for name in changed:
        if declared[name].identifies:
            raise ConfigError(
                f"the checkpoint {folder} belongs to a run with another --{name}",
                value=now[name],
                allowed=f"{before[name]}, or another --run_name for another run",
                flag=f"--{name}",
            )
    return [f"--{name}: {before[name]} before, {now[name]} now" for name in changed]


def compare_inputs(
    before: Mapping[str, Any], now: Mapping[str, Any], *, accepts: bool, folder: Path
) -> list[str]:
    """Describe how two results of `identify` differ; a `ConfigError` refuses it unless accepted."""
    changes = describe_changes(before, now).values()
    if changes and not accepts:
        raise ConfigError(
            f"the run of {folder} would go on with other inputs: {'; '.join(changes)}",
            value="refuse",
            allowed="the inputs of the run, another --run_name for another run, or accept",
            flag="--changed_inputs",
        )
    return [f"{change} (--changed_inputs accept)" for change in changes]


def digest_of_validation(facts: Mapping[str, Any]) -> str:
    """Of the facts of a run, what decides its validation losses beside the trained weights.

    Losses of another digest are not those of this run: they reach no `--target_loss`.
    """
    inputs = facts["inputs"]
    names = (HELD_OUT, belongings_of(HELD_OUT), MODEL)
    return digest(
        [inputs.get(name) for name in names]
        + [facts["config"][name] for name in DECIDING_VALIDATION]
    )


def describe_random_parts(plan: Plan[TrainConfig], *, given: Collection[str]) -> list[str]:
    """Sentences about sub-models that keep random weights; `given` ones are in a checkpoint."""
    config = plan.config
    if config.train == "vae":  # there is no other part
        return []
    # Weights other than LoRA or a learned token are frozen.
    is_beside = config.lora_rank is not None or config.learned_token is not None
    architecture = plan.architecture
    trained = () if is_beside else architecture.modules_of(config.trained_parts)
    denoiser = architecture.family.denoiser
    # A run on latents has no encoders that another run could give it.
    is_given = [part for part in given if config.step_has_encoders or part == denoiser]
    frozen = [part for part in architecture.random_parts if part not in (*trained, *is_given)]
    made_latents = [part for part in frozen if config.wants_latents and part != denoiser]
    frozen = [part for part in frozen if part not in made_latents]
    notes = []
    if made_latents:
        notes.append(
            f"It is not known which {' and '.join(made_latents)} made the latents; those of "
            f"{architecture.name} are random. python -m sdbench export will need --encoders."
        )
    if frozen:
        notes.append(
            f"Frozen with random weights: {' and '.join(frozen)}. A diffusers folder or a hub id "
            "(--model_name, --model_parts) has trained ones."
        )
    return notes
