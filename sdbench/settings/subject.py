"""`SubjectSettings`: whether one subject is learned, and what that takes."""

from __future__ import annotations

import dataclasses

from sdbench.settings.data import encodes_in_step
from sdbench.settings.kinds import NOT_NEGATIVE_NUMBER, TEXT, one_of
from sdbench.settings.setting import AllBut, Beside, Rule, setting

PRETRAIN, DREAMBOOTH = "pretrain", "dreambooth"

OF_SUBJECT = Beside(("task",), DREAMBOOTH)
# Synthetic pictures have prompts and a class of their own.
OF_PICTURES = Beside(("remote", "local"))


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
        identifies=True,
        demands={
            **encodes_in_step("the pictures of a subject are encoded when its run begins"),
            "streams": ((None,), "the pictures of a subject are in one place"),
            "num_workers": ((None, 0), "the latents of a subject are on the device already"),
            "on_bad_sample": (("error",), "a subject has too few pictures to leave one out"),
            "train": (("diffusion",), "a subject is learned by the U-Net, not by the VAE"),
        },
    )
    instance_prompt: str | None = setting(
        TEXT,
        None,
        "caption of each picture of the subject, e.g. 'a photo of unqtkn dog' (default: its own)",
        identifies=True,
        acts_beside=(OF_SUBJECT, OF_PICTURES),
    )
    class_remote: str | None = setting(
        TEXT,
        None,
        "where pictures of the subject's class are, so that the model keeps what it knows of it: "
        "half of each batch (Ray's --train_batch_size 2, of pairs, is --batch_size 4 a rank); "
        "--filters and --class_prompts hold for them as well",
        diffusers=("--class_data_dir",),
        acts_beside=(OF_SUBJECT, OF_PICTURES),
    )
    class_prompt: str | None = setting(
        TEXT,
        None,
        "caption of each class picture, e.g. 'a photo of a dog' (default: its own)",
        identifies=True,
        acts_beside=(OF_SUBJECT, OF_PICTURES, Beside(("class_remote",))),
    )
    prior_loss_weight: float = setting(
        NOT_NEGATIVE_NUMBER,
        1.0,
        "weight of the mean loss of the class pictures beside that of the subject's, which is 1",
        acts_beside=(OF_SUBJECT,),
        rules=(
            Rule(
                AllBut([1.0]),
                lambda s: s.config.class_remote or not (s.config.remote or s.config.local),
                "there are no class pictures to weight",
                allowed="only with --class_remote, or with synthetic pictures",
                others=("class_remote",),
                is_about_effect=True,
            ),
        ),
    )

    @property
    def has_subject(self) -> bool:
        """Whether a subject is learned."""
        return self.task == DREAMBOOTH
