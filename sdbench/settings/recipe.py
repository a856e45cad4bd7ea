"""`TrainConfig`, the settings of train.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from sdbench.settings.computing import ComputingSpeedups
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.data import ONLINE, encodes_in_step
from sdbench.settings.kinds import (
    BELOW_1,
    BETWEEN_0_AND_1,
    DURATION,
    FINITE_NUMBER,
    FRACTION,
    NAME,
    NOT_NEGATIVE,
    NOT_NEGATIVE_NUMBER,
    PARTS,
    POSITIVE,
    POSITIVE_NUMBER,
    SHAPES,
    SWITCH,
    TEXT,
    number,
    number_or,
    one_of,
    whole_number,
)
from sdbench.settings.lora import LoraSettings
from sdbench.settings.measuring import LoggingSettings, RunSettings
from sdbench.settings.online import OnlineSettings
from sdbench.settings.open_diffusion import translate
from sdbench.settings.parallel import WHOLE_WEIGHTS, UpdatingSpeedups
from sdbench.settings.ray import RaySettings
from sdbench.settings.request import parse
from sdbench.settings.setting import (
    GIVEN,
    ON,
    Beside,
    Rule,
    declarations,
    only_with,
    setting,
    shared,
)
from sdbench.settings.subject import SubjectSettings
from sdbench.settings.training import (
    EMA_HALF_LIFE_BATCHES,
    BatchSettings,
    ModelSettings,
    UpdateSettings,
)

# Between the prompts of a command line.
PROMPT_SEPARATOR = "|"
AVERAGED = Beside(("use_ema",))
SAMPLED = Beside(("sample_every_batches",))
SCORED = Beside(("score_every_batches",))
DRAWN = Beside(("sample_every_batches", "score_every_batches"))
HAS_ENCODERS = encodes_in_step("drawing needs the encoders in the step")
# All other values are for the denoiser.
SUITS_VAE: dict[str, tuple[Any, ...]] = {
    "latents": (ONLINE,),
    "online_preprocessing": (False,),
    "train_text_encoder": (False,),
    "lora_rank": (None,),
    "sample_every_batches": (None,),
    "score_every_batches": (None,),
    "validation_times": ("middles",),
    "prediction_type": (None,),
    "min_snr_gamma": (None,),
    "noise_offset": (0.0,),
    "zero_terminal_snr": (False,),
    "time_sampling": (None,),
    "time_mean": (None,),
    "time_std": (None,),
    "time_shift": (None,),
    "flow_weighting": (None,),
    "guidance_embedding": (None,),
    "encoder_batch_size": ("microbatch",),
    "activation_checkpointing": ("none",),
    "compile": ("none",),
    "keep_layout": (False,),
    "convolution": ("torch",),
    # FSDP gathers weights in forward() alone, and a VAE has encode() and decode().
    "sharding": WHOLE_WEIGHTS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """How long a run is, and where it is kept."""

    GROUP = "length, folder and resuming"

    max_duration: str | None = setting(
        DURATION,
        None,
        "length of the run in batches, epochs or samples, e.g. 5000ba, 3ep or 100000sp",
        diffusers=("--max_train_steps", "--num_train_epochs"),
        rules=(Rule((None,), lambda s: False, "a training run needs an end"),),
        is_everyday=True,
    )
    run_name: str | None = setting(
        NAME,
        None,
        "folder of the run below --results_dir (default: time, machine and model)",
        is_everyday=True,
    )
    resume: str = setting(
        one_of("never", "auto"),
        "never",
        "auto: continue from the newest intact checkpoint of --run_name, or start if there is none",
        demands={"run_name": (GIVEN, "only a run with a name can be found again")},
        is_everyday=True,
    )
    changed_inputs: str = setting(
        one_of("refuse", "accept"),
        "refuse",
        "if data, files of the model or other inputs have changed since the run was saved: refuse "
        "to continue, or continue with them as they are now",
        acts_beside=(Beside(("resume",)),),
    )
    init_from: str | None = setting(
        TEXT,
        None,
        "run or checkpoint whose weights of the same names this run starts with, e.g. a run at "
        "256 px for one at 512 px, or a trained VAE",
        identifies=True,
    )
    on_bad_loss: str = setting(
        one_of("stop", "skip", "back"),
        "stop",
        "if a loss or the norm of clipped gradients is not finite: stop the run; skip the update "
        "of its step, for which every step waits for the GPU; or go back to the weights of the "
        "last checkpoint and continue with the next data",
    )
    save_every_batches: int | None = setting(
        POSITIVE,
        None,
        "steps between checkpoints (default: one at the end)",
        is_everyday=True,
    )
    keep: int = setting(POSITIVE, 2, "number of newest checkpoints to keep")
    keep_every_batches: int | None = setting(
        POSITIVE,
        None,
        "also keep checkpoints at multiples of this number of steps",
        acts_beside=(Beside(("save_every_batches",)),),
    )
    on_failed_save: str = setting(
        one_of("continue", "stop"),
        "continue",
        "if a checkpoint cannot be written: continue with a warning, or stop",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartSettings(ModelSettings):
    """Which parts of the model are trained, and which do not come from --model_name."""

    GROUP = ModelSettings.GROUP

    model_parts: Mapping[str, Mapping[str, Any]] | None = setting(
        PARTS,
        None,
        "parts (unet, vae, text_encoder, ...) not from --model_name: each with "
        "`pretrained`, a place as for --model_name, or `params`, to build it from",
        identifies=True,
    )
    train: str = setting(
        one_of("diffusion", "vae"),
        "diffusion",
        "what is trained: the U-Net or transformer, or the VAE alone",
        identifies=True,
        demands={
            name: (allowed, "this setting is not for a VAE") for name, allowed in SUITS_VAE.items()
        },
    )
    kl_weight: float = setting(
        NOT_NEGATIVE_NUMBER,
        1e-3,
        "VAE: weight of the latents' KL divergence from a normal distribution, added to the "
        "squared error of the pixels",
        acts_beside=(Beside(("train",)),),
    )

    @property
    def trained_parts(self) -> tuple[str, ...]:
        """The sub-models that are trained."""
        return ("vae",) if self.train == "vae" else super().trained_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateSettings:
    """Learning rate, optimizer and moving average."""

    GROUP = UpdateSettings.GROUP

    text_encoder_lr: float | None = setting(
        POSITIVE_NUMBER,
        None,
        "learning rate of the text encoder, with the schedule of --lr (default: --lr)",
        acts_beside=(Beside(("train_text_encoder", "learned_token")),),
    )
    lr_schedule: str = setting(
        one_of("constant", "cosine", "linear"), "constant", "learning rate after the warm-up"
    )
    lr_warmup_batches: int = setting(
        NOT_NEGATIVE, 0, "steps over which the learning rate rises to --lr"
    )
    lr_end_factor: float = setting(
        FRACTION,
        0.0,
        "share of --lr at the end of the schedules cosine and linear",
        acts_beside=(Beside(("lr_schedule",)),),
    )
    beta1: float = setting(BELOW_1, 0.9, "AdamW: decay of the mean of the gradients")
    beta2: float = setting(BELOW_1, 0.999, "AdamW: decay of the mean of their squares")
    adam_eps: float = setting(
        # A smaller one is 0 in fp32, and 0 / 0 the first step of a weight without a gradient.
        number("a number of at least 1e-37", lambda value: 1e-37 <= value < math.inf),
        1e-8,
        "AdamW: added to the divisor",
    )
    clip_norm: float | None = setting(
        POSITIVE_NUMBER, None, "largest norm of a step's gradients (default: they are not clipped)"
    )
    ema_half_life_batches: int | None = setting(
        POSITIVE,
        None,
        "steps after which a weight's influence on the moving average has halved (default: 1000)",
        acts_beside=(AVERAGED,),
    )
    ema_decay: float | None = setting(
        BETWEEN_0_AND_1,
        None,
        "decay of the moving average per step, in place of the half-life (0.9999 has a half-life "
        "of 6931 steps)",
        demands={"ema_half_life_batches": ((None,), "the half-life follows from the decay")},
        acts_beside=(AVERAGED,),
    )
    ema_warmup: bool = setting(
        SWITCH,
        False,
        "let the average follow faster at first: decay at most (1 + n) / (10 + n) in step n",
        acts_beside=(AVERAGED,),
    )

    @property
    def half_life_batches(self) -> float:
        """Steps after which the influence of a weight on the moving average has halved."""
        if self.ema_decay is not None:
            return math.log(0.5) / math.log(self.ema_decay)
        return self.ema_half_life_batches or EMA_HALF_LIFE_BATCHES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What the network learns to predict, and how errors are weighted."""

    GROUP = "objective"

    prediction_type: str | None = setting(
        one_of("epsilon", "v_prediction", "sample"),
        None,
        "DDPM: what the network predicts (default: that of the model's scheduler)",
        identifies=True,
    )
    min_snr_gamma: float | None = setting(
        POSITIVE_NUMBER, None, "weight losses by min(SNR, gamma) (arXiv 2303.09556; 5 is usual)"
    )
    noise_offset: float = setting(
        NOT_NEGATIVE_NUMBER, 0.0, "scale of additional noise with one value per picture and channel"
    )
    zero_terminal_snr: bool = setting(
        SWITCH, False, "let the last time step be pure noise (arXiv 2305.08891)", identifies=True
    )
    time_sampling: str | None = setting(
        one_of("uniform", "logit_normal"),
        None,
        "rectified flow: distribution of the times of training, 0 to 1 (default: logit_normal for "
        "SD3, as arXiv 2403.03206; uniform for Flux.1, as in MLPerf Training)",
    )
    time_mean: float | None = setting(
        FINITE_NUMBER,
        None,
        "mean of the logit of times that are logit-normal (default: 0)",
    )
    time_std: float | None = setting(
        POSITIVE_NUMBER,
        None,
        "standard deviation of the logit of times that are logit-normal (default: 1)",
    )
    time_shift: float | str | None = setting(
        number_or("resolution"),
        None,
        "rectified flow: move times s towards noise, to a s / (1 + (a - 1) s), by a number a, or "
        "by the resolution as Flux.1 draws: a = exp(0.5) at 256 image tokens and exp(1.15) at 4096 "
        "(default: 1, not moved)",
    )
    flow_weighting: str | None = setting(
        one_of("none", "sigma_sqrt", "cosmap"),
        None,
        "rectified flow: weight of the squared error at time s (arXiv 2403.03206, and diffusers' "
        "compute_loss_weighting_for_sd3): sigma_sqrt: s^-2; cosmap: 2 / (pi (1 - 2 s + 2 s^2)) "
        "(default: none)",
    )
    guidance_embedding: float | None = setting(
        NOT_NEGATIVE_NUMBER,
        None,
        "scale of guidance that Flux.1 dev is told in training (default: 1)",
        identifies=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Evaluation and logging during training; they do not count as training time."""

    GROUP = "looking at the model"

    log_every_batches: int = setting(POSITIVE, 10, "steps between lines of the log")
    validate_every_batches: int | None = setting(
        POSITIVE,
        None,
        "steps between validations",
        demands={"validation_remote": (GIVEN, "validation needs held-out samples")},
    )
    validation_remote: str | None = setting(
        TEXT,
        None,
        "place of held-out samples in the format of --remote; --filters and --class_prompts apply "
        "to them too",
        acts_beside=(Beside(("validate_every_batches", "score_every_batches")),),
    )
    num_validation_images: int = setting(
        POSITIVE,
        64,
        "number of held-out images for a validation",
        acts_beside=(Beside(("validate_every_batches",)),),
    )
    validation_times: str = setting(
        one_of("middles", "starts"),
        "middles",
        "the eight times at which the validation loss is measured: the middles of equal parts of "
        "the schedule, or their starts k / 8, as MLPerf's Flux.1 has them",
        acts_beside=(Beside(("validate_every_batches",)),),
        identifies=True,
    )
    target_loss: float | None = setting(
        POSITIVE_NUMBER,
        None,
        "end the run when the validation loss is at most this, and record after how many samples",
        demands={"validate_every_batches": (GIVEN, "a target needs validations")},
    )
    sample_every_batches: int | None = setting(
        POSITIVE,
        None,
        "steps between grids of pictures",
        demands={"sample_prompts": (GIVEN, "pictures are drawn from prompts"), **HAS_ENCODERS},
        is_everyday=True,
    )
    sample_prompts: str | None = setting(
        TEXT,
        None,
        f"prompts with {PROMPT_SEPARATOR} between two, or a file: .txt with a prompt on each line, "
        ".csv with the columns uid and caption",
        acts_beside=(SAMPLED,),
    )
    sample_shapes: str | None = setting(
        SHAPES,
        None,
        "shapes of the pictures, which the prompts take in turn, e.g. 512x512,640x384 (default: "
        "squares of --image_size)",
        acts_beside=(SAMPLED,),
    )
    num_sample_images: int = setting(
        POSITIVE,
        64,
        "number of prompts to draw, from the first one: a grid of up to 64, and if there "
        "are more also a file for each picture",
        acts_beside=(SAMPLED,),
    )
    sample_guidance: float | None = setting(
        NOT_NEGATIVE_NUMBER,
        None,
        "scale of classifier-free guidance when drawing (default: 7.5, SDXL 5, SD3 7, Flux.1 1)",
        acts_beside=(DRAWN,),
    )
    sample_steps: int = setting(
        POSITIVE, 25, "steps of the DDIM sampler when drawing", acts_beside=(DRAWN,)
    )
    score_every_batches: int | None = setting(
        POSITIVE,
        None,
        "steps between FID and CLIP scores of pictures drawn for the captions of "
        "--validation_remote, with --sample_guidance and --sample_steps",
        demands={"validation_remote": (GIVEN, "scores need held-out samples"), **HAS_ENCODERS},
    )
    num_score_images: int = setting(
        whole_number(2),
        1000,
        "number of held-out pictures, compared with as many drawn ones",
        acts_beside=(SCORED,),
    )
    fid_network: str | None = setting(
        TEXT,
        None,
        "TorchScript file with the network of FID, uint8 pictures (N, 3, H, W) to features (N, "
        "D), e.g. NVIDIA's inception-2015-12-05.pt; it is a program, so use a trusted one",
        acts_beside=(SCORED,),
    )
    clip_network: str | None = setting(
        TEXT,
        None,
        "folder with the CLIPModel of the CLIP score, in safetensors",
        acts_beside=(SCORED,),
    )
    tensorboard: bool = setting(
        SWITCH, False, "write figures and pictures for TensorBoard as well, in the run's folder"
    )


# The fields of the last base come first in the help.
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(
    LoggingSettings,
    UpdatingSpeedups,
    ComputingSpeedups,
    WatchSettings,
    ObjectiveSettings,
    RateSettings,
    UpdateSettings,
    OnlineSettings,
    BatchSettings,
    PartSettings,
    LoraSettings,
    ModelSettings,
    SubjectSettings,
    LengthSettings,
    RaySettings,
    RunSettings,
):
    """Everything that decides a training run. None means: chosen for the machine, then printed."""

    ema_impl: str | None = shared(
        UpdatingSpeedups,
        "ema_impl",
        acts_beside=(AVERAGED,),
        rules=(
            *declarations(UpdatingSpeedups)["ema_impl"].rules,
            only_with(
                ("composer",),
                "Composer's moving average is not kept in checkpoints",
                "foreach",
                use_ema=(False,),
            ),
        ),
    )
    ema_interval_batches: int | None = shared(
        UpdatingSpeedups, "ema_interval_batches", acts_beside=(AVERAGED,)
    )
    cuda_graph: bool = shared(
        ComputingSpeedups,
        "cuda_graph",
        rules=(
            Rule(
                ON,
                lambda s: False,
                "a graph holds the whole step, and train.py acts before the step's update",
            ),
        ),
    )


# Resolved settings of a training step, by either program.
EngineConfig = BenchmarkConfig | TrainConfig
# Reads the command line of train.py, as `request.parse`.
parse_request = functools.partial(parse, TrainConfig, takes_file=True, translate=translate)
