"""`FeedSettings`, the settings of data.py."""

from __future__ import annotations

import dataclasses
import functools

from sdbench.settings.computing import ComputingSpeedups
from sdbench.settings.data import ONLINE, DataSettings
from sdbench.settings.kinds import NOT_NEGATIVE, POSITIVE, POSITIVE_NUMBER, SECONDS, one_of
from sdbench.settings.measuring import RunSettings
from sdbench.settings.online import ActorSettings, OnlineSettings
from sdbench.settings.ray import RAY, UNDER_RAY, RaySettings
from sdbench.settings.request import parse
from sdbench.settings.setting import setting, shared
from sdbench.settings.training import ModelSettings

TEXT_EMBEDDING_DIM = 1024
DEFAULT_BATCHES = 100
# Batches that the workers have ready when the window begins are at most a tenth of it.
MIN_BATCHES_PER_STORED_BATCH = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayFeedSettings(ActorSettings, RaySettings):
    """What data.py --engine ray measures: Ray Data, and the encoders in it."""

    GROUP = ActorSettings.GROUP
    ACTS_BESIDE = (UNDER_RAY,)

    online_encoder_batch_size: int = shared(OnlineSettings, "online_encoder_batch_size")
    max_failed_blocks: int = shared(OnlineSettings, "max_failed_blocks")
    model_name: str = shared(
        ModelSettings, "model_name", help="model whose encoders encode", is_everyday=False
    )
    model_revision: str | None = shared(ModelSettings, "model_revision")
    random_weights: bool = shared(ModelSettings, "random_weights")
    encoder_dtype: str | None = shared(
        ComputingSpeedups,
        "encoder_dtype",
        presets={},
        rules=(),
        help="number format of the encoders' weights (default: fp16 on GPUs, bf16 or fp32 on CPUs)",
    )
    dist_timeout: float = shared(RunSettings, "dist_timeout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedSettings(RayFeedSettings, DataSettings):
    """Settings of data.py. None means: chosen for the machine, then printed."""

    GROUP = DataSettings.GROUP

    engine: str | None = setting(
        one_of(RAY),
        None,
        "ray: Ray Data reads and encodes batches for emulated trainers in ranks that Ray Train "
        "starts (default: this process and --num_workers prepare batches)",
        demands={
            "num_workers": ((None,), "the --num_decoders of Ray Data load the pictures"),
            "text_embedding_dim": ((TEXT_EMBEDDING_DIM,), "captions are encoded by --model_name"),
            "latents": ((ONLINE,), "Ray Data encodes pictures"),
            "streams": ((None,), "Ray Data reads the pictures of one data set"),
        },
        is_everyday=True,
    )
    num_workers: int | None = setting(
        NOT_NEGATIVE,
        None,
        "loader processes (default: 8, or the number of cores if smaller)",
        is_everyday=True,
    )
    image_size: int = shared(ModelSettings, "image_size", default=512)
    batch_size: int = setting(
        POSITIVE,
        32,
        "images per batch; with --engine ray of all trainers together",
        is_everyday=True,
    )
    text_embedding_dim: int = setting(
        POSITIVE,
        TEXT_EMBEDDING_DIM,
        "width of the text embeddings beside latents (SD 2: 1024, SD 1: 768)",
    )
    seed: int = shared(RunSettings, "seed", help="seed of order, crops, flips and noise")
    num_batches: int | None = setting(
        POSITIVE,
        None,
        f"measured batches (default: {DEFAULT_BATCHES}, or "
        f"{MIN_BATCHES_PER_STORED_BATCH} x num_workers x prefetch_factor if larger)",
    )
    num_warmup_batches: int | None = setting(
        NOT_NEGATIVE,
        None,
        "batches before the measured window, at least num_workers x prefetch_factor (default: one "
        "more than that)",
    )
    max_seconds: float | None = setting(
        POSITIVE_NUMBER, None, "longest duration of the measured window"
    )
    emulate_step_seconds: float | None = setting(
        SECONDS,
        None,
        "seconds to sleep after each batch; reports how long a trainer waits",
        is_everyday=True,
    )
    target_images_per_second: float | None = setting(
        POSITIVE_NUMBER,
        None,
        "report whether the source reaches this rate, and with how many workers",
        demands={
            "emulate_step_seconds": (
                (None,),
                "with an emulated step the rate is that of the trainer, not of the source",
            )
        },
        is_everyday=True,
    )
    results_dir: str = shared(RunSettings, "results_dir")


# Reads the command line of data.py, as `request.parse`.
parse_request = functools.partial(parse, FeedSettings, takes_file=True)
