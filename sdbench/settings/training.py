"""Settings of what is trained: model, batch, optimizer."""

from __future__ import annotations

import dataclasses

from sdbench.settings.data import encodes_in_step
from sdbench.settings.kinds import (
    NOT_NEGATIVE,
    NOT_NEGATIVE_NUMBER,
    POSITIVE,
    POSITIVE_NUMBER,
    SWITCH,
    TEXT,
    WORD,
    positive_or,
    row_of,
)
from sdbench.settings.setting import GIVEN, Beside, Rule, Situation, setting
from sdbench.settings.subject import OF_PICTURES, OF_SUBJECT

# The part that predicts, in `trained_parts`: a U-Net or a transformer, as the model has it.
DENOISER = "denoiser"
# mosaicml/diffusion-benchmark @c7f3cff: EMA(half_life="1000ba").
EMA_HALF_LIFE_BATCHES = 1000


def _is_in_prompt(situation: Situation) -> bool:
    prompt = situation.config.instance_prompt
    return prompt is None or situation.config.learned_token in prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is trained."""

    GROUP = "model"
    IDENTIFIES = True

    model_name: str = setting(
        row_of(
            "sdbench.models.architecture:built_in_names",
            find="sdbench.models.architecture:find_name",
        ),
        "sd2-base",
        "built-in architecture with random weights (sd2-base, sdxl, sd3-medium, flux-schnell, "
        "tiny, ...: docs/models.md), a local diffusers folder, or a hub id",
        is_everyday=True,
        diffusers=("--pretrained_model_name_or_path",),
    )
    model_revision: str | None = setting(
        TEXT, None, "branch, tag or commit of a hub id; the commit is recorded"
    )
    random_weights: bool = setting(
        SWITCH,
        False,
        "draw the weights of a folder or hub id instead of loading them",
    )
    image_size: int | None = setting(
        POSITIVE,
        None,
        "side of the square images in pixels",
        diffusers=("--resolution",),
        is_everyday=True,
    )
    weights_seed: int | None = setting(
        NOT_NEGATIVE, None, "seed of random weights alone (default: --seed)", only_measures=True
    )

    train_text_encoder: bool = setting(
        SWITCH,
        False,
        "train the text encoder of Stable Diffusion 1 or 2 with the U-Net",
        demands=encodes_in_step("encoded captions cannot train the text encoder"),
    )

    learned_token: str | None = setting(
        WORD,
        None,
        "new word of --instance_prompt, e.g. '<dog>', whose embedding is learned: alone (textual "
        "inversion), or with --lora_rank beside LoRA",
        acts_beside=(OF_SUBJECT, OF_PICTURES),
        demands={
            "initial_token": (GIVEN, "a learned token starts from the embedding of another one"),
            "use_synth_data": ((False,), "synthetic captions do not have the token"),
            "init_from": ((None,), "a token starts from --model_name, such as a run's export"),
            "sharding": ((None, "none"), "a single row is not sharded over ranks"),
        },
        rules=(
            Rule(
                GIVEN,
                _is_in_prompt,
                "the prompt does not have the token that is learned",
                allowed="a token of --instance_prompt",
                others=("instance_prompt",),
            ),
            Rule(
                GIVEN,
                lambda s: s.config.lora_rank or not s.config.train_text_encoder,
                "only the token of the text encoder is trained",
                allowed="--no_train_text_encoder, or --lora_rank, which trains LoRA beside it",
                others=("train_text_encoder", "lora_rank"),
            ),
            Rule(
                GIVEN,
                lambda s: s.config.lora_rank or not s.config.class_remote,
                "class pictures teach a learned token nothing: their captions do not have it, and "
                "all other weights are frozen",
                allowed="no --class_remote, or --lora_rank, which trains the U-Net as well",
                others=("class_remote", "lora_rank"),
            ),
        ),
    )
    initial_token: str | None = setting(
        TEXT,
        None,
        "word whose embedding --learned_token starts from, e.g. dog: a single token",
        acts_beside=(Beside(("learned_token",)),),
    )

    @property
    def seed_of_weights(self) -> int:
        """The seed of random weights."""
        return self.seed if self.weights_seed is None else self.weights_seed

    @property
    def trained_parts(self) -> tuple[str, ...]:
        """The sub-models that are trained, or some of whose weights are."""
        has_token = self.learned_token is not None
        if has_token and self.lora_rank is None:
            return ("text_encoder",)
        trains_text = self.train_text_encoder or has_token
        return (DENOISER, "text_encoder") if trains_text else (DENOISER,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How many images a step takes."""

    GROUP = "batch"

    batch_size: int | None = setting(
        POSITIVE,
        None,
        "global batch: images per optimizer step over all ranks",
        identifies=True,
        is_everyday=True,
        diffusers=("--train_batch_size",),
    )
    device_train_microbatch_size: int | str = setting(
        positive_or("auto"),
        "auto",
        "images per forward and backward pass on one rank; auto: the largest that the memory "
        "estimate allows",
        is_everyday=True,
    )
    allow_uneven_batch: bool = setting(
        SWITCH,
        False,
        "reduce a global batch to what the ranks can share evenly, and let the last micro-batch "
        "of a step be smaller; otherwise both are refused",
        only_measures=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How the weights are updated."""

    GROUP = "training"

    use_ema: bool = setting(
        SWITCH,
        False,
        "keep a moving average of the trained weights",
        identifies=True,
        is_everyday=True,
    )
    lr: float = setting(
        POSITIVE_NUMBER, 1e-4, "learning rate", diffusers=("--learning_rate",), is_everyday=True
    )
    weight_decay: float = setting(NOT_NEGATIVE_NUMBER, 1e-3, "AdamW weight decay")
