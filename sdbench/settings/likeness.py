"""`LikenessSettings`: what a subject is called, and the networks that judge pictures of it."""

from __future__ import annotations

import dataclasses

from sdbench.settings.kinds import TEXT
from sdbench.settings.recipe import WatchSettings
from sdbench.settings.setting import REQUIRED, setting, shared

PROMPT_SEPARATOR = "|"
# What a folder of transformers has for a network that looks at pictures.
NETWORK_FILES = ("config.json", "model.safetensors", "preprocessor_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LikenessSettings:
    """What a subject is called, and the networks that judge pictures of it."""

    prompt: str = setting(
        TEXT, REQUIRED, 'what its pictures show, with a rare word: "photo of a unqtkn dog"'
    )
    class_prompt: str | None = setting(
        TEXT, None, 'the same without the word: "photo of a dog"; its pictures tell of drift'
    )
    clip_network: str | None = shared(
        WatchSettings,
        "clip_network",
        help="folder with a CLIPModel, in safetensors: scores how alike pictures are",
        acts_beside=(),
    )
    dino_network: str | None = setting(
        TEXT, None, "folder of transformers with a DINO, in safetensors: scores the same"
    )
