"""`SubjectSettings`: whether one subject is learned, and what that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.settings.data import ONLINE
from sdbench.settings.kinds import NOT_NEGATIVE_NUMBER, TEXT, one_of
from sdbench.settings.ray import refuse_without_effect
from sdbench.settings.request import Request
from sdbench.settings.setting import declarations, setting

PRETRAIN, DREAMBOOTH = "pretrain", "dreambooth"
TOKEN_FLAG = "--learned_token"

# What a user may ask for with --task dreambooth, and why not more.
SUITS_SUBJECT: dict[str, tuple[tuple, str]] = {
    "latents": ((ONLINE,), "the latents of a subject are made when its run begins"),
    "online_preprocessing": ((False,), "the latents of a subject are made when its run begins"),
    "streams": ((None,), "a subject's pictures come from one place"),
    "num_workers": ((None, 0), "a subject's latents are on the device, and nothing is loaded"),
    "horizontal_flip_probability": ((0.0,), "each picture of a subject is encoded once"),
    "caption_drop_probability": ((0.0,), "each picture of a subject keeps its prompt"),
    "on_bad_sample": (("error",), "none of the few pictures of a subject can be left out"),
    "train": (("diffusion",), "a subject is learned by the U-Net, not by the VAE"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubjectSettings:
    """What is learned, and the pictures of a subject's class."""

    GROUP = "what is learned"

    task: str = setting(
        one_of(PRETRAIN, DREAMBOOTH),
        PRETRAIN,
        "pretrain: pictures with their captions; dreambooth: the subject of a few pictures. Their "
        "largest squares (--crop) are encoded once, when the run begins, and the latents stay on "
        "the device",
        before=PRETRAIN,
        identifies=True,
    )
    instance_prompt: str | None = setting(
        TEXT,
        None,
        "caption of each picture of the subject, e.g. 'a photo of unqtkn dog' (default: its own)",
        before=None,
        identifies=True,
    )
    class_remote: str | None = setting(
        TEXT,
        None,
        "where pictures of the subject's class are, so that the model keeps what it knows of it: "
        "half of each batch (Ray's --train_batch_size 2, of pairs, is --batch_size 4 a rank); "
        "--filters and --class_prompts hold for them as well",
        before=None,
    )
    class_prompt: str | None = setting(
        TEXT,
        None,
        "caption of each class picture, e.g. 'a photo of a dog' (default: its own)",
        before=None,
        identifies=True,
    )
    prior_loss_weight: float = setting(
        NOT_NEGATIVE_NUMBER,
        1.0,
        "weight of the mean loss of the class pictures beside that of the subject's, which is 1",
        before=1.0,
    )

    @property
    def has_subject(self) -> bool:
        """Whether a subject is learned."""
        return self.task == DREAMBOOTH


# The same with --learned_token.
SUITS_TOKEN: dict[str, tuple[tuple, str]] = {
    "train_text_encoder": ((False,), "of the text encoder the token alone is trained"),
    "lora_rank": ((None,), "a token is trained alone, without LoRA"),
    "class_remote": ((None,), "class pictures teach a token nothing: no caption of theirs has it"),
    "use_synth_data": ((False,), "synthetic captions do not have the token"),
    "init_from": ((None,), "a token begins as one of the model: the export of a run is a model"),
    "sharding": ((None, "none"), "a single row is not shared out over ranks"),
}


def check_subject_settings(request: Request) -> None:
    """Check what --task dreambooth can be combined with, and that no other setting is idle.

    Raises:
        ConfigError: A setting contradicts another one, or has no effect.
    """
    config = request.config
    if not config.has_subject:
        names = declarations(SubjectSettings).keys() - {"task"} | {"learned_token"}
        refuse_without_effect(request, sorted(names), needed="--task dreambooth")
    if config.learned_token is None:
        refuse_without_effect(request, ["initial_token"], needed=TOKEN_FLAG)
    if not config.has_subject:
        return
    _check_suits(config, SUITS_SUBJECT, flag="--task")
    if config.learned_token is not None:
        _check_suits(config, SUITS_TOKEN, flag=TOKEN_FLAG)
        _check_token(config)
    is_synthetic = config.use_synth_data or config.data_format == "synthetic"
    if is_synthetic or not (config.remote or config.local):  # the latter becomes synthetic, too
        names = ("instance_prompt", "class_remote", "class_prompt", "learned_token")
        refuse_without_effect(request, names, needed="--remote")
    elif config.class_remote is None:
        names = ("class_prompt", "prior_loss_weight")
        refuse_without_effect(request, names, needed="--class_remote")


def _check_suits(config: Any, suits: Mapping[str, tuple[tuple, str]], *, flag: str) -> None:
    for name, (allowed, reason) in suits.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise ConfigError(
                reason,
                value=value,
                allowed=" | ".join(str(known) for known in allowed if known is not None)
                or "nothing",
                flag=f"--{name} or {flag}",
            )


def _check_token(config: Any) -> None:
    token = config.learned_token
    if any(character.isspace() for character in token):
        raise ConfigError(
            "a token is one word", value=token, allowed="a word such as <dog>", flag=TOKEN_FLAG
        )
    if config.initial_token is None:
        raise ConfigError(
            "a token that is learned begins as another one",
            value=None,
            allowed="a word such as dog",
            flag="--initial_token",
        )
    if config.instance_prompt is not None and token not in config.instance_prompt:
        raise ConfigError(
            "the captions do not have the token that is learned",
            value=config.instance_prompt,
            allowed=f"a caption with {token}",
            flag=f"--instance_prompt or {TOKEN_FLAG}",
        )
