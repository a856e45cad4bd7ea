"""The data set class of mosaicml/diffusion-benchmark, written anew from its steps.

Facts (data.py of mosaicml/diffusion-benchmark @c7f3cff, and the transform of its benchmark.py): PIL
opens the picture and makes it RGB, torchvision's Resize brings it to a square whatever its shape,
ToTensor makes it float32 in [0, 1], and the Python tokenizer of transformers turns one caption at a
time into 77 ids.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from streaming import StreamingDataset
from torchvision import transforms
from transformers import CLIPTokenizer


class ReferenceDataset(StreamingDataset):
    """Samples ``{image: (3, S, S) float32 in [0, 1], caption: (77,) int64}``."""

    def __init__(self, folder: Path, *, image_size: int, tokenizer: CLIPTokenizer) -> None:
        """Read the index of an MDS data set with the columns jpg and caption."""
        super().__init__(local=str(folder), shuffle=False, batch_size=1, predownload=100_000)
        self.tokenizer = tokenizer
        self.transform = transforms.Compose(
            [transforms.Resize((image_size, image_size)), transforms.ToTensor()]
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        picture = Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
        ids = self.tokenizer(
            sample["caption"],
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
        )["input_ids"]
        return {"image": self.transform(picture), "caption": torch.tensor(ids)}


def load_slow_tokenizer(folder: Path) -> CLIPTokenizer:
    """The Python tokenizer over the vocabulary that this suite carries, by files in a folder."""
    from sdbench.data.batches.tokenizer import list_symbols, read_merges

    merges = read_merges()
    vocabulary = {symbol: index for index, symbol in enumerate(list_symbols(merges))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    text = "\n".join(["#version: 0.2", *merges, ""])
    (folder / "merges.txt").write_text(text, encoding="utf-8")
    return CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), pad_token="!", model_max_length=77
    )
