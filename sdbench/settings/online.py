"""`OnlineSettings`: encoding by other processes of a Ray cluster while the ranks train."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sdbench.settings.data import ONLINE, DataSettings
from sdbench.settings.kinds import NOT_NEGATIVE, POSITIVE, RESOURCES, SWITCH, TEXT
from sdbench.settings.ray import RAY, UNDER_RAY
from sdbench.settings.setting import Beside, setting

ANY = "any"
# data.py and precompute have no --online_preprocessing: their engine is Ray Data.
IN_ACTORS = (Beside(("online_preprocessing",)), UNDER_RAY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """The actors of Ray Data that prepare batches."""

    GROUP = "Ray Data"
    ACTS_BESIDE = IN_ACTORS

    num_decoders: int = setting(
        POSITIVE, 1, "actors that read, decode and tokenize, with a CPU each"
    )
    num_encoders: int = setting(POSITIVE, 1, "actors that encode images and captions")
    encoder_resources: Mapping[str, float] | None = setting(
        RESOURCES,
        None,
        "resources of an encoder (default: one GPU if the cluster has GPUs, else one CPU)",
        only_measures=True,
    )
    encoder_accelerator_type: str = setting(
        TEXT, ANY, "kind of GPU of the encoders as Ray names it, e.g. A10G"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineSettings(ActorSettings, DataSettings):
    """Encoding beside the training, and how batches come from there."""

    GROUP = ActorSettings.GROUP

    online_preprocessing: bool = setting(
        SWITCH,
        False,
        "encode images and captions in actors of Ray Data while the ranks train on the results "
        "(--engine ray)",
        identifies=True,
        demands={
            "engine": ((RAY,), "Ray Data encodes for ranks that Ray Train starts"),
            "latents": ((ONLINE,), "latents that are precomputed need no encoders"),
            "num_workers": ((None, 0), "actors of Ray Data read the samples"),
            "streams": ((None,), "the shares of several streams are drawn in the training process"),
        },
    )
    online_encoder_batch_size: int = setting(
        POSITIVE, 32, "images per call of an encoder; at most a rank's batch", acts_beside=IN_ACTORS
    )
    max_failed_blocks: int = setting(
        NOT_NEGATIVE,
        0,
        "batches that each rank may miss because reading or encoding them failed; it trains on "
        "the previous batch again",
        acts_beside=IN_ACTORS,
    )

    @property
    def step_has_encoders(self) -> bool:
        """Whether a step encodes images and captions itself."""
        return self.latents == ONLINE and not self.online_preprocessing
