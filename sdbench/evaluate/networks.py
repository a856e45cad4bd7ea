"""The networks that score pictures, from local files: one for the features of FID, and CLIP.

No file is unpickled; CLIP comes from safetensors. TorchScript is a program that torch runs:
use only files that you trust. Its sha256 is in every result.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPModel

from sdbench.base.errors import ConfigError
from sdbench.base.outside import refuse_errors
from sdbench.data.batches.tokenizer import CaptionTokenizer
from sdbench.data.source import EOS_TOKEN_ID
from sdbench.models.quiet import quiet_transformers
from sdbench.models.stored import compare_weights, read_headers
from sdbench.models.weights import check_content

CLIP_FILES = ("config.json", "model.safetensors", "preprocessor_config.json")


@contextlib.contextmanager
def _whole_fp32() -> Iterator[None]:
    """Compute without gradients, on a GPU in fp32 and not in TF32, whatever the training uses."""
    owners = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [owner.allow_tf32 for owner in owners]
    try:
        for owner in owners:
            owner.allow_tf32 = False
        with torch.no_grad():
            yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            owner.allow_tf32 = value


class Network:
    """A network for pictures in local files; subclasses load it, and run it in `_forward`."""

    flag: ClassVar[str]
    allowed: ClassVar[str]  # to be named by the flag

    def __init__(self, place: Path, *, weights: Path, device: torch.device | str) -> None:
        """Take a file or folder, and the file in it that has the weights."""
        self._place, self._weights, self._device = place, weights, device

    def try_out(self, image_size: int) -> Any:
        """Run the network on two blank pictures of a size, and return its output."""
        blank = torch.zeros((2, 3, image_size, image_size), dtype=torch.uint8)
        try:
            return self._forward(blank)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise self._refusal(
                f"the network fails on pictures of {image_size} px ({reason})"
            ) from None

    def describe(self) -> dict[str, str]:
        """Name of the file or folder, and sha256 of the weights."""
        digest = hashlib.sha256()
        with self._weights.open("rb") as opened:
            while piece := opened.read(2**20):
                digest.update(piece)
        return {"name": self._place.resolve().name, "sha256": digest.hexdigest()}

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(what, value=str(self._place), allowed=self.allowed, flag=self.flag)


class FidNetwork(Network):
    """Features of pictures, by a TorchScript network.

    FID in papers uses Inception v3 as TensorFlow published it on 2015-12-05, which NVIDIA has
    converted. It resizes pictures itself, and gives its 2048 features on request.
    """

    flag = "--fid_network"
    allowed = (
        "a TorchScript file that turns uint8 pictures (N, 3, H, W) into features (N, D), e.g. "
        "NVIDIA's inception-2015-12-05.pt"
    )

    def __init__(self, file: Path, *, device: torch.device | str) -> None:
        """Load the network; a `ConfigError` refuses a file that is no TorchScript."""
        super().__init__(file, weights=file, device=device)
        if not file.is_file():
            raise self._refusal("there is no such file")
        try:
            self._network = torch.jit.load(file, map_location="cpu").eval().to(device)
            arguments = self._network.forward.schema.arguments
        except (RuntimeError, AttributeError):  # with a traceback of C++ for a message
            raise self._refusal("the file holds no TorchScript network") from None
        wants_flag = any(argument.name == "return_features" for argument in arguments)
        self._options = {"return_features": True} if wants_flag else {}

    def try_out(self, image_size: int) -> Any:
        """Check that the network gives features, too."""
        features = super().try_out(image_size)
        shape = list(getattr(features, "shape", ()))
        if len(shape) != 2 or shape[0] != 2 or not features.is_floating_point():
            raise self._refusal(f"the network returns {shape or features!r} for two pictures")
        return features

    def features(self, pictures: Tensor) -> np.ndarray:
        """Features (B, D) in fp64 of uint8 pictures (B, 3, H, W)."""
        return self._forward(pictures).double().cpu().numpy()

    @_whole_fp32()
    def _forward(self, pictures: Tensor) -> Any:
        return self._network(pictures.to(self._device), **self._options)


class ClipNetwork(Network):
    """Compares pictures with captions, by a CLIP model in safetensors."""

    flag = "--clip_network"
    allowed = (
        "a folder of transformers' CLIPModel: config.json, model.safetensors, "
        "preprocessor_config.json and tokenizer.json, or vocab.json with merges.txt"
    )

    def __init__(self, folder: Path, *, device: torch.device | str) -> None:
        """Load the model; a `ConfigError` refuses files or weights that are missing or damaged."""
        super().__init__(folder, weights=folder / "model.safetensors", device=device)
        has_tables = (folder / "vocab.json").is_file()
        needed = (*CLIP_FILES, "merges.txt" if has_tables else "tokenizer.json")
        missing = [name for name in needed if not (folder / name).is_file()]
        if missing:
            raise self._refusal(f"the folder has no {' and no '.join(missing)}")
        refusing = refuse_errors(
            "the network in the folder cannot be loaded",
            value=str(folder),
            allowed=self.allowed,
            flag=self.flag,
        )
        # transformers draws random numbers while it loads, which belong to the training.
        with torch.random.fork_rng(devices=[]), refusing:
            self._load_model(folder)
            self._processor = CLIPImageProcessor.from_pretrained(folder, local_files_only=True)
            self._tokenize = CaptionTokenizer(folder=folder, pad_token_id=EOS_TOKEN_ID)

    def _load_model(self, folder: Path) -> None:
        """Load the model; transformers alone would draw missing weights at random."""
        stored = read_headers(folder, "model", flag=self.flag)
        with quiet_transformers():
            model, report = CLIPModel.from_pretrained(
                folder,
                use_safetensors=True,
                output_loading_info=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
            )
        # transformers 4 reports names alone, and 5 both shapes with each.
        misshapen = {one if isinstance(one, str) else one[0] for one in report["mismatched_keys"]}
        missing, left_over = (
            set(report[f"{fault}_keys"]) - misshapen for fault in ("missing", "unexpected")
        )
        shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
        in_file = {name: one.shape for name, one in stored.items()}
        compare_weights(
            shapes,
            {
                **{name: shape for name, shape in shapes.items() if name not in missing},
                **{name: in_file.get(name, ()) for name in left_over | misshapen},
            },
            what="the weights of the CLIPModel are not those of its config.json",
            value=str(folder),
            allowed=self.allowed,
            flag=self.flag,
        )
        for name, weight in model.named_parameters():
            check_content(weight.detach(), name, file=self._weights, flag=self.flag)
        self._model = model.eval().float().to(self._device)

    def _forward(self, pictures: Tensor) -> np.ndarray:
        return self.similarities(pictures, ["a caption"] * len(pictures))

    @_whole_fp32()
    def similarities(self, pictures: Tensor, captions: Sequence[str]) -> np.ndarray:
        """Cosines (B,) between the embeddings of uint8 pictures (B, 3, H, W) and captions, in fp64.

        The first 77 tokens of each caption count.
        """
        tokens = torch.from_numpy(self._tokenize(captions))
        # As `get_text_features`, whose output is another one in transformers 5.
        pooled = self._model.text_model(tokens.to(self._device)).pooler_output
        of_captions = self._model.text_projection(pooled)
        pixels = self._processor(
            list(pictures.permute(0, 2, 3, 1).cpu().numpy()),
            input_data_format="channels_last",
            return_tensors="pt",
        )["pixel_values"]
        pooled = self._model.vision_model(pixels.to(self._device)).pooler_output
        of_pictures = self._model.visual_projection(pooled)
        return (_unit_length(of_pictures) * _unit_length(of_captions)).sum(1)


def _unit_length(vectors: Tensor) -> np.ndarray:
    """Vectors (B, D) of length 1, in fp64."""
    return nn.functional.normalize(vectors.double(), dim=1).cpu().numpy()


KINDS: dict[str, type[Network]] = {"fid": FidNetwork, "clip": ClipNetwork}


def open_networks(
    places: Mapping[str, str | None],
    *,
    image_size: int,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Load the networks, at least one, whose places are told by kind; try them on blank pictures.

    The default device is the GPU, if there is one.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    networks = {
        kind: KINDS[kind](Path(place), device=device)
        for kind, place in places.items()
        if place is not None
    }
    if not networks:
        raise ConfigError(
            "pictures are scored by networks in local files",
            value=None,
            allowed=f"one or both: {'; '.join(network.allowed for network in KINDS.values())}",
            flag=" or ".join(network.flag for network in KINDS.values()),
        )
    for network in networks.values():
        network.try_out(image_size)
    return networks
