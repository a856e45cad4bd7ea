"""Which settings suit the part of the model that is trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.plan.resolve import Plan
from sdbench.settings.data import ONLINE
from sdbench.settings.parallel import WHOLE_WEIGHTS
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.request import Request

# What a user may ask for where the VAE is trained; the rest is about the U-Net.
SUITS_VAE: dict[str, tuple[Any, ...]] = {
    "latents": (ONLINE,),
    "online_preprocessing": (False,),
    "train_text_encoder": (False,),
    "lora_rank": (None,),
    "sample_every_batches": (None,),
    "score_every_batches": (None,),
    "prediction_type": (None,),
    "min_snr_gamma": (None,),
    "noise_offset": (0.0,),
    "zero_terminal_snr": (False,),
    "encoder_batch_size": (None, "microbatch"),
    "activation_checkpointing": (None, "none"),
    "compile": (None, "none"),
    "keep_layout": (None, False),
    "convolution": (None, "torch"),
    # FSDP gathers the weights for the forward pass alone, and a VAE has two methods.
    "sharding": (None, *WHOLE_WEIGHTS),
}


def check_parts(request: Request[TrainConfig]) -> None:
    """Check the settings of a request against --train.

    Raises:
        ConfigError: One of them has no meaning there.
    """
    config = request.config
    if config.train != "vae":
        return
    for name, allowed in SUITS_VAE.items():
        value = getattr(config, name)
        if request.is_users(name) and value not in allowed:
            raise ConfigError(
                "a VAE is not trained with this",
                value=value,
                allowed=" | ".join(str(known) for known in allowed if known is not None)
                or "nothing",
                flag=f"--{name}",
            )


def note_random_parts(plan: Plan, *, given: Collection[str]) -> str | None:
    """A text about the parts that are random and stay so; None where there are none.

    Args:
        plan: Of the run.
        given: Sub-models whose weights come from a checkpoint.
    """
    frozen, made_latents = find_random_parts(plan, given=given)
    notes = []
    if made_latents:
        notes.append(
            f"Nothing says which {' and '.join(made_latents)} made the latents; those of "
            f"{plan.architecture.name} are random. python -m sdbench export will need --encoders."
        )
    if frozen:
        notes.append(
            f"Frozen with random weights: {' and '.join(frozen)}. A diffusers folder or a hub id "
            "(--model_name, --model_parts) has trained ones."
        )
    return " ".join(notes) or None


def find_random_parts(plan: Plan, *, given: Collection[str]) -> tuple[list[str], list[str]]:
    """The sub-models that are random and stay so, and the random ones in the place of unknown ones.

    Args:
        plan: Of the run.
        given: Sub-models whose weights come from a checkpoint.

    Returns:
        Those that the run draws, and those that stand for what has made its latents.
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
