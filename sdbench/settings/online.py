"""`OnlineSettings`: encoding by other processes of a Ray cluster while the ranks train."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sdbench.settings.data import ONLINE, DataSettings
from sdbench.settings.kinds import NOT_NEGATIVE, POSITIVE, RESOURCES, SWITCH, TEXT
from sdbench.settings.setting import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """The actors of Ray Data that prepare batches."""

    GROUP = "Ray Data"

    num_decoders: int = setting(
        POSITIVE,
        1,
        "actors that read, decode and tokenize, with a CPU each",
        only_measures=True,
    )
    num_encoders: int = setting(
        POSITIVE, 1, "actors that encode images and captions", only_measures=True
    )
    encoder_resources: Mapping[str, float] | None = setting(
        RESOURCES,
        None,
        "what an encoder takes of a node (default: one GPU where the cluster has some, else one "
        "CPU)",
        only_measures=True,
    )
    encoder_accelerator_type: str | None = setting(
        TEXT,
        None,
        "kind of GPU of the encoders as Ray names it, e.g. A10G",
        only_measures=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineSettings(ActorSettings, DataSettings):
    """Encoding beside the training, and how batches come from there."""

    GROUP = ActorSettings.GROUP

    online_preprocessing: bool = setting(
        SWITCH,
        False,
        "encode images and captions in actors of Ray Data while the ranks train on what they give "
        "(--engine ray)",
        before=False,
        identifies=True,
    )
    online_encoder_batch_size: int = setting(
        POSITIVE,
        32,
        "images per call of an encoder; at most a rank's batch",
    )
    max_failed_blocks: int = setting(
        NOT_NEGATIVE,
        0,
        "batches that each rank may miss because reading or encoding them failed; it trains on "
        "the one before again",
    )

    @property
    def step_has_encoders(self) -> bool:
        """Whether a step encodes images and captions itself."""
        return self.latents == ONLINE and not self.online_preprocessing
