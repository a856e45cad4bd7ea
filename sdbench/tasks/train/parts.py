"""`find_random_parts`: the parts of a model that are random and stay so."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sdbench.plan.resolve import Plan


def note_random_parts(plan: Plan, *, given: Collection[str]) -> str | None:
    """Describe the parts that keep random weights; None without such parts."""
    frozen, made_latents = find_random_parts(plan, given=given)
    notes = []
    if made_latents:
        notes.append(
            f"It is not known which {' and '.join(made_latents)} made the latents; those of "
            f"{plan.architecture.name} are random. python -m sdbench export will need --encoders."
        )
    if frozen:
        notes.append(
            f"Frozen with random weights: {' and '.join(frozen)}. A diffusers folder or a hub id "
            "(--model_name, --model_parts) has trained ones."
        )
    return " ".join(notes) or None


def find_random_parts(plan: Plan, *, given: Collection[str]) -> tuple[list[str], list[str]]:
    """Find the sub-models that keep random weights.

    Args:
        plan: The resolved run.
        given: Sub-models whose weights come from a checkpoint.

    Returns:
        Those that the run uses, and those that stand for the unknown encoders of its latents.
    """
    config: Any = plan.config
    if config.train == "vae":  # there is no other part
        return [], []
    # The weights beside LoRA or a learned token stay as they are.
    is_beside = config.lora_rank is not None or config.learned_token is not None
    trained = () if is_beside else config.trained_parts
    # A run on latents has no encoders that another run could give it.
    is_given = [part for part in given if config.step_has_encoders or part == "unet"]
    ours = (*trained, *is_given)
    random_parts = [part for part in plan.architecture.random_parts if part not in ours]
    made_latents = [part for part in random_parts if config.wants_latents and part != "unet"]
    return [part for part in random_parts if part not in made_latents], made_latents
