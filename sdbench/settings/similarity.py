"""`SimilaritySettings`: the prompts of a subject, and the networks that compare its pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sdbench.settings.kinds import TEXT
from sdbench.settings.recipe import WatchSettings
from sdbench.settings.setting import REQUIRED, setting, shared

# Files of a transformers folder with a network for pictures.
NETWORK_FILES = ("config.json", "model.safetensors", "preprocessor_config.json")


def missing_files(folder: Path, *, reads_text: bool) -> list[str]:
    """The files that a transformers folder lacks; with `reads_text` it needs a tokenizer too."""
    needed = [*NETWORK_FILES]
    if reads_text:
        has_tables = (folder / "vocab.json").is_file()
        needed.append("merges.txt" if has_tables else "tokenizer.json")
    return [name for name in needed if not (folder / name).is_file()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilaritySettings:
    """The prompts of a subject, and the networks that compare its pictures."""

    prompt: str = setting(
        TEXT,
        REQUIRED,
        'caption of the subject\'s pictures, with a rare word for it: "photo of a unqtkn dog"',
    )
    class_prompt: str | None = setting(
        TEXT, None, 'the prompt without the rare word: "photo of a dog"; its pictures show drift'
    )
    clip_network: str | None = shared(
        WatchSettings,
        "clip_network",
        help="folder with a CLIPModel in safetensors, which scores how similar pictures are",
        acts_beside=(),
    )
    dino_network: str | None = setting(
        TEXT, None, "folder of transformers with a DINO model in safetensors, which scores the same"
    )
