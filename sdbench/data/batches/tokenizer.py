"""Captions to token ids, by transformers' tokenizers for CLIP and T5.

They take the tokenizer folder of a model if there is one. Else CLIP's vocabulary is in
``clip_vocabulary/`` and T5's tokens are bytes, as ByT5 has them, so that no network is needed. The
fast and the slow class of CLIP differ on some non-Latin captions.
"""

from __future__ import annotations

import copy
import functools
import gzip
import json
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from transformers import ByT5Tokenizer, CLIPTokenizerFast, T5TokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sdbench.base.conditions import CLIP, NUM_CLIP_TOKENS, T5, Captions
from sdbench.data.checks import names_byt5, refuse_tokenizer
from sdbench.data.source import BOS_TOKEN_ID, EOS_TOKEN_ID, VOCABULARY_SIZE

END_OF_WORD = "</w>"
BOS_TOKEN = "<|startoftext|>"
EOS_TOKEN = "<|endoftext|>"


class CaptionTokenizer:
    """A callable that turns captions into `num_tokens` ids each: the caption, eos and padding.

    CLIP's begin with bos.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        pad_token_id: int,
        new_token: str | None = None,
        kind: str = CLIP,
        num_tokens: int = NUM_CLIP_TOKENS,
    ) -> None:
        """Load the tokenizer of a folder, or build the one with the built-in vocabulary.

        `pad_token_id` follows eos: SD 2 pads with "!", id 0, and SD 1 with eos, id 49407. A
        `new_token` is a word that becomes one token, after the last of the vocabulary. `kind` is
        one of `sdbench.base.conditions`.
        """
        self.pad_token_id = pad_token_id
        self.num_tokens = num_tokens
        if folder is None:
            tokenizer = ByT5Tokenizer() if kind == T5 else load_carried_tokenizer(pad_token_id)
        else:
            with refuse_tokenizer(folder):
                tokenizer = _load(folder, kind=kind)
        if new_token is not None:
            tokenizer = copy.deepcopy(tokenizer)  # others share the carried one
            tokenizer.add_tokens([new_token])
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, architecture: Any, *, new_token: str | None = None) -> CaptionTokenizer:
        """Return the first tokenizer of a model, which its `Architecture` describes."""
        return cls.of_captions(architecture.captions[0], new_token=new_token)

    @classmethod
    def of_captions(cls, captions: Captions, *, new_token: str | None = None) -> CaptionTokenizer:
        """Return the tokenizer that a description of captions asks for."""
        return cls(
            folder=captions.folder,
            pad_token_id=captions.pad_token_id,
            new_token=new_token,
            kind=captions.kind,
            num_tokens=captions.num_tokens,
        )

    def read_word(self, word: str) -> list[int]:
        """Return the tokens of a word."""
        return self._tokenizer(word, add_special_tokens=False)["input_ids"]

    def __contains__(self, token: str) -> bool:
        return token in self._tokenizer.get_vocab()

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, captions: Sequence[str]) -> np.ndarray:
        """Return (B, num_tokens) int64; a longer caption is cut so that eos is the last id."""
        padded = np.full((len(captions), self.num_tokens), self.pad_token_id, dtype=np.int64)
        if captions:
            encoded = self._tokenizer(list(captions), truncation=True, max_length=self.num_tokens)
            for row, ids in zip(padded, encoded["input_ids"], strict=True):
                row[: len(ids)] = ids
        return padded

    def count_tokens(self, captions: Sequence[str]) -> list[int]:
        """Return the number of tokens of each whole caption, with bos and eos."""
        encoded = self._tokenizer(list(captions), truncation=False, verbose=False)
        return list(map(len, encoded["input_ids"]))

    def for_diffusers(self) -> Any:
        """A copy of the tokenizer for diffusers, which pads and cuts by itself."""
        tokenizer = copy.deepcopy(self._tokenizer)
        if tokenizer.is_fast:
            # That of the last call would be saved with it.
            tokenizer.backend_tokenizer.no_truncation()
        if not isinstance(tokenizer, CLIPTokenizerFast):
            tokenizer.model_max_length = self.num_tokens
        return tokenizer


class CaptionTokenizers:
    """A callable that turns captions into the token ids of each text encoder of a model."""

    def __init__(self, captions: Sequence[Captions], *, new_token: str | None = None) -> None:
        """Make the tokenizers; those of CLIP get the `new_token`, as `CaptionTokenizer` says."""
        self._names = [one.name for one in captions]
        self.tokenizers = tuple(
            CaptionTokenizer.of_captions(one, new_token=new_token if one.kind == CLIP else None)
            for one in captions
        )

    @classmethod
    def of(cls, architecture: Any, *, new_token: str | None = None) -> CaptionTokenizers:
        """Return the tokenizers of a model, which its `Architecture` describes."""
        return cls(architecture.captions, new_token=new_token)

    def __call__(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """Return (B, num_tokens) int64 by the names of `Captions`."""
        return {
            name: tokenizer(captions)
            for name, tokenizer in zip(self._names, self.tokenizers, strict=True)
        }


def _load(folder: Path, *, kind: str) -> CLIPTokenizerFast | ByT5Tokenizer | T5TokenizerFast:
    """Load a tokenizer; its class is chosen here, and no code from the folder is run."""
    if kind == CLIP:
        return CLIPTokenizerFast.from_pretrained(folder, local_files_only=True)
    options = {"local_files_only": True, **_further_tokens(folder)}
    if names_byt5(folder):
        return ByT5Tokenizer.from_pretrained(folder, **options)
    # tokenizer.json says what precedes a caption. If the option were set, transformers would make
    # the tokenizer anew, of another file, with a package that nothing else needs.
    return T5TokenizerFast.from_pretrained(folder, add_prefix_space=None, **options)


def _further_tokens(folder: Path) -> dict[str, Any]:
    """T5's further tokens by the hub's name, if transformers 5 has saved them by a name of its own.

    In transformers 4 that is the name of a mapping.
    """
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = config.get("extra_special_tokens")
    if not isinstance(tokens, list):
        return {}
    return {"additional_special_tokens": tokens, "extra_special_tokens": {}}


@functools.cache
def load_carried_tokenizer(pad_token_id: int) -> CLIPTokenizerFast:
    """Build transformers' tokenizer from the merges in ``clip_vocabulary/``.

    The class takes files in every version (its constructor changed with transformers 5), so they
    are written to a temporary folder. That takes 1 s with transformers 4.57 and 0.1 s with 5, hence
    once per process and pad token. Callers must not change it.
    """
    merges = read_merges()
    vocabulary = {symbol: index for index, symbol in enumerate(list_symbols(merges))}
    assert len(vocabulary) == VOCABULARY_SIZE
    assert (vocabulary[BOS_TOKEN], vocabulary[EOS_TOKEN]) == (BOS_TOKEN_ID, EOS_TOKEN_ID)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        text = "\n".join(["#version: 0.2", *merges, ""])
        Path(folder, "merges.txt").write_text(text, encoding="utf-8")
        # Without a class transformers guesses one from the folder's name, and warns.
        settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": NUM_CLIP_TOKENS}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        tokenizer = CLIPTokenizerFast.from_pretrained(folder, local_files_only=True)
    if tokenizer.pad_token_id != pad_token_id:
        # Each "!" of a caption is then the pad token, as in Stable Diffusion 2.
        tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(pad_token_id)})
    return tokenizer


def read_merges() -> list[str]:
    """Return the 48,894 merges of CLIP, each "left right", most frequent first."""
    packed = resources.files("sdbench.data.batches").joinpath("clip_vocabulary", "merges.txt.gz")
    return gzip.decompress(packed.read_bytes()).decode("utf-8").splitlines()


def list_symbols(merges: list[str]) -> list[str]:
    """Return all symbols in the order of their ids, which CLIP's reference code defines.

    256 bytes, 256 bytes that end a word, 48,894 merged pairs, 2 special tokens: 49,408.
    """
    symbols = bytes_to_unicode().values()
    return [
        *symbols,
        *(symbol + END_OF_WORD for symbol in symbols),
        *(merge.replace(" ", "") for merge in merges),
        BOS_TOKEN,
        EOS_TOKEN,
    ]
