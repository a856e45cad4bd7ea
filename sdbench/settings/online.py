"""`OnlineSettings`: encoding by other processes of a Ray cluster while the ranks train."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sdbench.base.errors import ConfigError
from sdbench.settings.data import ONLINE, DataSettings
from sdbench.settings.kinds import NOT_NEGATIVE, POSITIVE, RESOURCES, SWITCH, TEXT
from sdbench.settings.ray import RAY, refuse_without_effect
from sdbench.settings.request import Request
from sdbench.settings.setting import declarations, setting

ANY = "any"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """The actors of Ray Data that prepare batches."""

    GROUP = "Ray Data"

    num_decoders: int = setting(
        POSITIVE,
        1,
        "actors that read, decode and tokenize, with a CPU each",
        before=1,
    )
    num_encoders: int = setting(POSITIVE, 1, "actors that encode images and captions", before=1)
    encoder_resources: Mapping[str, float] | None = setting(
        RESOURCES,
        None,
        "what an encoder takes of a node (default: one GPU where the cluster has some, else one "
        "CPU)",
        only_measures=True,
    )
    encoder_accelerator_type: str = setting(
        TEXT, ANY, "kind of GPU of the encoders as Ray names it, e.g. A10G", before=ANY
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
        before=32,
    )
    max_failed_blocks: int = setting(
        NOT_NEGATIVE,
        0,
        "batches that each rank may miss because reading or encoding them failed; it trains on "
        "the one before again",
        before=0,
    )

    @property
    def step_has_encoders(self) -> bool:
        """Whether a step encodes images and captions itself."""
        return self.latents == ONLINE and not self.online_preprocessing

    @property
    def place_of_encoders(self) -> str:
        """The setting that decides whether a step has encoders, for messages."""
        return "online_preprocessing" if self.online_preprocessing else "latents"


def check_not_streamed(config: DataSettings) -> None:
    """Check that actors of Ray Data may read any samples at any time.

    Raises:
        ConfigError: Files are to be streamed.
    """
    if config.is_streamed:
        raise ConfigError(
            "each actor of Ray Data reads batches of all files, and streamed ones are read on",
            value=config.remote_files,
            allowed="copy",
            flag="--remote_files",
        )


def check_online_settings(request: Request) -> None:
    """Check what --online_preprocessing needs, and that no other setting is idle without it.

    Raises:
        ConfigError: Something is missing, or a setting has no effect.
    """
    config = request.config
    flag = "--online_preprocessing"
    if not config.online_preprocessing:
        names = declarations(OnlineSettings).keys() - declarations(DataSettings).keys()
        refuse_without_effect(request, sorted(names), needed=flag)
        return
    for name, needed in (("engine", RAY), ("latents", ONLINE)):
        if getattr(config, name) != needed:
            raise ConfigError(
                f"{flag} needs --{name} {needed}",
                value=getattr(config, name),
                allowed=f"{needed}, or no {flag}",
                flag=f"--{name} or {flag}",
            )
    if config.num_workers:
        raise ConfigError(
            "actors of Ray Data read the samples",
            value=config.num_workers,
            allowed=f"0, or no {flag}",
            flag=f"--num_workers or {flag}",
        )
    check_not_streamed(config)
    if config.streams is not None:
        raise ConfigError(
            "the shares of several streams are drawn within the training process",
            value=config.streams,
            allowed=f"one data set by --remote, or no {flag}",
            flag=f"--streams or {flag}",
        )
