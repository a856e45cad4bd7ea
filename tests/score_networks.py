"""Small networks that judge pictures, as the files that users have, and pictures to judge."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
)

from sdbench.data.batches.tokenizer import load_carried_tokenizer
from sdbench.data.source import EOS_TOKEN_ID

CLIP_SIZE_PX = 16
SIDE_PX = 64
NUM_PICTURES = 9


class MeansAndSpreads(torch.nn.Module):
    """Six features: mean and spread of each channel, in units of 255."""

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:  # noqa: D102
        pixels = pictures.float().flatten(2) / 255
        return torch.cat([pixels.mean(2), pixels.std(2)], dim=1)


class OnRequest(torch.nn.Module):
    """Those features on request, as NVIDIA's file gives them, and otherwise something else."""

    def __init__(self) -> None:
        super().__init__()
        self.features = MeansAndSpreads()

    def forward(self, img: torch.Tensor, return_features: bool = False) -> torch.Tensor:  # noqa: D102
        features = self.features(img)
        return features if return_features else torch.ones_like(features)


class OneByOne(torch.nn.Module):
    """Features with sides, as of a network without its last pooling."""

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return pictures.float().mean((2, 3), keepdim=True)


class OfAnotherSize(torch.nn.Module):
    """Takes pictures of 32 px alone."""

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return pictures.float().reshape(pictures.size(0), 3 * 32 * 32)


def write_fid_network(file: Path, network: torch.nn.Module | None = None) -> Path:
    """Write a network as TorchScript."""
    torch.jit.script(network or MeansAndSpreads()).save(str(file))
    return file


def features_of(picture: np.ndarray) -> np.ndarray:
    """The features of `MeansAndSpreads` by numpy; of a picture (H, W, 3)."""
    pixels = picture.reshape(-1, 3) / 255
    return np.concatenate([pixels.mean(0), pixels.std(0, ddof=1)])


def write_clip(folder: Path) -> Path:
    """Write a CLIP with random weights: 16 px, width 8, the whole vocabulary, 77 tokens."""
    sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = CLIPConfig(
        text_config=sizes | {"eos_token_id": 49407, "bos_token_id": 49406},
        vision_config=sizes | {"image_size": CLIP_SIZE_PX, "patch_size": 8},
        projection_dim=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = CLIPModel(config)
        for weight in model.parameters():
            weight.data.normal_(std=0.5)  # so that pictures and captions differ
    model.save_pretrained(folder, safe_serialization=True)
    side = {"height": CLIP_SIZE_PX, "width": CLIP_SIZE_PX}
    CLIPImageProcessor(size={"shortest_edge": CLIP_SIZE_PX}, crop_size=side).save_pretrained(folder)
    load_carried_tokenizer(EOS_TOKEN_ID).save_pretrained(folder)
    return folder


def make_pictures(seed: int, num: int = NUM_PICTURES) -> list[np.ndarray]:
    """Noise of a contrast and a colour of each picture's own."""
    generator = np.random.default_rng(seed)
    pictures = []
    for _ in range(num):
        colour, contrast = generator.uniform(60, 190, 3), generator.uniform(5, 60)
        noise = generator.normal(colour, contrast, (SIDE_PX, SIDE_PX, 3))
        pictures.append(noise.clip(0, 255).astype(np.uint8))
    return pictures


def write_pictures(folder: Path, pictures: list[np.ndarray], captions: list[str]) -> Path:
    """A data set with a table of captions."""
    folder.mkdir()
    with (folder / "captions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("file", "caption"))
        for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            Image.fromarray(picture).save(folder / f"{number:02d}.png")
            table.writerow((f"{number:02d}.png", caption))
    return folder
