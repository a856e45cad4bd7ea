"""Which settings suit the part of the model that is trained."""

from __future__ import annotations

from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.settings.data import ONLINE
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.request import Request

# What a user may ask for where the VAE is trained; the rest is about the U-Net.
SUITS_VAE: dict[str, tuple[Any, ...]] = {
    "latents": (ONLINE,),
    "train_text_encoder": (False,),
    "sample_every_batches": (None,),
    "score_every_batches": (None,),
    "prediction_type": (None,),
    "min_snr_gamma": (None,),
    "noise_offset": (0.0,),
    "zero_terminal_snr": (False,),
    "encoder_batch_size": (None, "microbatch"),
    "activation_checkpointing": (None, "none"),
    "compile": (None, "none"),
    # FSDP gathers the weights for the forward pass alone, and a VAE has two methods.
    "sharding": (None, "none", "zero1"),
}


def check_parts(request: Request[TrainConfig]) -> None:
    """Check the settings of a request against --train and --train_text_encoder.

    Raises:
        ConfigError: One of them has no meaning there.
    """
    config = request.config
    if config.train_text_encoder and config.latents != ONLINE:
        raise ConfigError(
            "captions that are encoded already cannot train a text encoder",
            value=config.latents,
            allowed=f"{ONLINE}, or no --train_text_encoder",
            flag="--latents or --train_text_encoder",
        )
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
