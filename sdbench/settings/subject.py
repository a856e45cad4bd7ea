"""`SubjectSettings`: whether one subject is learned, and what that takes."""

from __future__ import annotations

import dataclasses

from sdbench.base.errors import ConfigError
from sdbench.settings.data import ONLINE
from sdbench.settings.kinds import NOT_NEGATIVE_NUMBER, TEXT, one_of
from sdbench.settings.ray import refuse_without_effect
from sdbench.settings.request import Request
from sdbench.settings.setting import declarations, setting

PRETRAIN, DREAMBOOTH = "pretrain", "dreambooth"

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
    )
    class_remote: str | None = setting(
        TEXT,
        None,
        "where pictures of the subject's class are, so that the model keeps what it knows of it: "
        "half of the pictures of each batch; --filters and --class_prompts hold for them as well",
        before=None,
    )
    class_prompt: str | None = setting(
        TEXT,
        None,
        "caption of each class picture, e.g. 'a photo of a dog' (default: its own)",
        before=None,
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


def check_subject_settings(request: Request) -> None:
    """Check what --task dreambooth can be combined with, and that no other setting is idle.

    Raises:
        ConfigError: A setting contradicts another one, or has no effect.
    """
    config = request.config
    if not config.has_subject:
        names = declarations(SubjectSettings).keys() - {"task"}
        refuse_without_effect(request, sorted(names), needed="--task dreambooth")
        return
    for name, (allowed, reason) in SUITS_SUBJECT.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise ConfigError(
                reason,
                value=value,
                allowed=" | ".join(str(known) for known in allowed if known is not None)
                or "nothing",
                flag=f"--{name} or --task",
            )
    if config.use_synth_data or config.data_format == "synthetic":
        names = ("instance_prompt", "class_remote", "class_prompt")
        refuse_without_effect(request, names, needed="--remote")
    elif config.class_remote is None:
        names = ("class_prompt", "prior_loss_weight")
        refuse_without_effect(request, names, needed="--class_remote")
