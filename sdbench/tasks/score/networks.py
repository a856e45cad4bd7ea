"""The networks that judge pictures, from local files: one with features for FID, CLIP, and DINO.

No file is unpickled. TorchScript is a program nevertheless, which torch runs: it deserves the trust
that a program gets, and its sha256 is in every result. CLIP and DINO come from safetensors.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, CLIPImageProcessor, CLIPModel

from sdbench.base.errors import ConfigError
from sdbench.data.pipeline.tokenizer import CaptionTokenizer
from sdbench.data.source import EOS_TOKEN_ID
from sdbench.settings.likeness import missing_files

FID_FLAG, CLIP_FLAG, DINO_FLAG = "--fid_network", "--clip_network", "--dino_network"
FID_NETWORK = (
    "a TorchScript file that turns uint8 pictures (N, 3, H, W) into features (N, D), e.g. NVIDIA's "
    "inception-2015-12-05.pt"
)
CLIP_NETWORK = (
    "a folder of transformers' CLIPModel: config.json, model.safetensors, preprocessor_config.json "
    "and tokenizer.json, or vocab.json with merges.txt"
)
DINO_NETWORK = (
    "a folder of transformers with a DINO, DINOv2 or DINOv3: config.json, model.safetensors and "
    "preprocessor_config.json"
)
# Types of transformers' models whose first token stands for the whole picture.
DINO_TYPES = ("vit", "dinov2", "dinov2_with_registers", "dinov3_vit")


class FidNetwork:
    """Features of pictures, by a TorchScript network.

    That of the FID in papers is Inception v3 as TensorFlow published it on 2015-12-05, which NVIDIA
    has converted. It resizes pictures itself, and gives its 2048 features on request.
    """

    def __init__(self, file: Path, *, device: torch.device | str) -> None:
        """Load the network.

        Raises:
            ConfigError: There is no such file, or it is no TorchScript.
        """
        self._file, self._device = file, device
        if not file.is_file():
            raise self._refusal("there is no such file")
        try:
            self._network = torch.jit.load(file, map_location="cpu").eval().to(device)
            arguments = self._network.forward.schema.arguments
        except (RuntimeError, AttributeError):  # with a traceback of C++ for a message
            raise self._refusal("the file holds no TorchScript network") from None
        wants_flag = any(argument.name == "return_features" for argument in arguments)
        self._options = {"return_features": True} if wants_flag else {}

    def try_out(self, image_size: int) -> None:
        """Look at two blank pictures of a size.

        Raises:
            ConfigError: The network does not take them, or what it gives are no features.
        """
        try:
            features = self._look(torch.zeros((2, 3, image_size, image_size), dtype=torch.uint8))
        except RuntimeError:
            what = f"the network fails on pictures of {image_size} px"
            raise self._refusal(what) from None
        if not isinstance(features, Tensor) or not features.is_floating_point():
            raise self._refusal("the network gives no floating-point tensor")
        if features.ndim != 2 or len(features) != 2:
            raise self._refusal(f"the network gives {list(features.shape)} for two pictures")

    def features(self, pictures: Tensor) -> np.ndarray:
        """Features (B, D) in fp64 of uint8 pictures (B, 3, H, W)."""
        return self._look(pictures).double().cpu().numpy()

    @torch.no_grad()
    def _look(self, pictures: Tensor) -> Any:
        with _whole_fp32():
            return self._network(pictures.to(self._device), **self._options)

    def describe(self) -> dict[str, str]:
        """Name and sha256 of the file."""
        return _describe(self._file, self._file)

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(what, value=str(self._file), allowed=FID_NETWORK, flag=FID_FLAG)


class _TransformersNetwork:
    """A model in a folder of transformers, its weights in safetensors."""

    flag: ClassVar[str]
    allowed: ClassVar[str]
    reads_text: ClassVar[bool] = False

    def __init__(self, folder: Path, *, device: torch.device | str) -> None:
        """Load what the folder holds.

        Raises:
            ConfigError: A file is missing or damaged, or weights are.
        """
        self._folder, self._device = folder, device
        missing = missing_files(folder, reads_text=self.reads_text)
        if missing:
            raise self._refusal(f"the folder has no {' and no '.join(missing)}")
        try:
            # transformers draws random numbers while it loads, which are those of the training.
            with torch.random.fork_rng(devices=[]):
                model, absent = self._load()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise self._refusal(f"the folder holds no network that loads ({reason})") from None
        if absent:  # transformers makes them up
            raise self._refusal(f"{len(absent)} weights of the network are missing")
        self._model = model.eval().float().to(device)

    def _load(self) -> tuple[nn.Module, Sequence[str]]:
        """Load model and processor; returns the model and the names of missing weights."""
        raise NotImplementedError

    def describe(self) -> dict[str, str]:
        """Name of the folder, and sha256 of its weights."""
        return _describe(self._folder, self._folder / "model.safetensors")

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(what, value=str(self._folder), allowed=self.allowed, flag=self.flag)


class ClipNetwork(_TransformersNetwork):
    """How near pictures are to their captions and to each other, by a CLIP model."""

    flag, allowed = CLIP_FLAG, CLIP_NETWORK
    reads_text = True

    def _load(self) -> tuple[nn.Module, Sequence[str]]:
        model, report = CLIPModel.from_pretrained(
            self._folder, use_safetensors=True, output_loading_info=True, local_files_only=True
        )
        self._processor = CLIPImageProcessor.from_pretrained(self._folder, local_files_only=True)
        self._tokenize = CaptionTokenizer(folder=self._folder, pad_token_id=EOS_TOKEN_ID)
        return model, report["missing_keys"]

    def try_out(self) -> None:
        """Look at a blank picture.

        Raises:
            ConfigError: The model does not take 77 tokens, or pictures of the size that it asks
                for.
        """
        try:
            self.similarities(torch.zeros((1, 3, 8, 8), dtype=torch.uint8), ["a caption"])
        except (RuntimeError, ValueError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise self._refusal(f"CLIP fails on a picture and a caption ({reason})") from None

    @torch.no_grad()
    def similarities(self, pictures: Tensor, captions: Sequence[str]) -> np.ndarray:
        """Cosines (B,) between the embeddings of pictures and captions, in fp64.

        Args:
            pictures: uint8 (B, 3, H, W).
            captions: As many; of a longer one the first 77 tokens count.
        """
        tokens = torch.from_numpy(self._tokenize(captions))
        with _whole_fp32():
            of_captions = self._model.get_text_features(tokens.to(self._device))
        return (self.embeddings(pictures) * _unit_length(of_captions)).sum(1)

    @torch.no_grad()
    def embeddings(self, pictures: Tensor) -> np.ndarray:
        """Embeddings (B, D) of uint8 pictures (B, 3, H, W), of length 1, in fp64."""
        pixels = self._processor(
            list(pictures.permute(0, 2, 3, 1).cpu().numpy()),
            input_data_format="channels_last",
            return_tensors="pt",
        )["pixel_values"]
        with _whole_fp32():
            return _unit_length(self._model.get_image_features(pixels.to(self._device)))


class DinoNetwork(_TransformersNetwork):
    """How near pictures are to each other, by a DINO model."""

    flag, allowed = DINO_FLAG, DINO_NETWORK

    def _load(self) -> tuple[nn.Module, Sequence[str]]:
        kind = AutoConfig.from_pretrained(self._folder, local_files_only=True).model_type
        if kind not in DINO_TYPES:
            raise ValueError(f"its type is {kind}, and not {', '.join(DINO_TYPES)}")
        model, report = AutoModel.from_pretrained(
            self._folder, use_safetensors=True, output_loading_info=True, local_files_only=True
        )
        self._processor = AutoImageProcessor.from_pretrained(
            self._folder, local_files_only=True, use_fast=True
        )
        # What pools the tokens is not looked at: DINO's own files lack its weights.
        return model, [name for name in report["missing_keys"] if not name.startswith("pooler.")]

    def try_out(self) -> None:
        """Look at a blank picture.

        Raises:
            ConfigError: The model does not take pictures of the size that its folder asks for.
        """
        try:
            self.embeddings(torch.zeros((1, 3, 8, 8), dtype=torch.uint8))
        except (RuntimeError, ValueError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise self._refusal(f"the network fails on a picture ({reason})") from None

    @torch.no_grad()
    def embeddings(self, pictures: Tensor) -> np.ndarray:
        """Embeddings (B, D) of uint8 pictures (B, 3, H, W), of length 1, in fp64.

        The class token of the last layer is the embedding, as in the paper of DINO.
        """
        pixels = self._processor(list(pictures), return_tensors="pt")["pixel_values"]
        with _whole_fp32():
            states = self._model(pixels.to(self._device)).last_hidden_state
        return _unit_length(states[:, 0])


def _unit_length(vectors: Tensor) -> np.ndarray:
    """Vectors (B, D) of length 1, in fp64."""
    return nn.functional.normalize(vectors.double(), dim=1).cpu().numpy()


class Networks(NamedTuple):
    """The networks that were asked for; at least one."""

    fid: FidNetwork | None
    clip: ClipNetwork | None


def open_networks(config: Any, *, device: torch.device | str) -> Networks:
    """Load the networks of --fid_network and --clip_network.

    Args:
        config: Settings with both.
        device: For their weights.

    Raises:
        ConfigError: Neither is given, or one cannot be loaded.
    """
    if config.fid_network is None and config.clip_network is None:
        raise ConfigError(
            "pictures are scored by networks in local files",
            value=None,
            allowed=f"one or both: {FID_NETWORK}; {CLIP_NETWORK}",
            flag=f"{FID_FLAG} or {CLIP_FLAG}",
        )
    return Networks(
        fid=config.fid_network and FidNetwork(Path(config.fid_network), device=device),
        clip=config.clip_network and ClipNetwork(Path(config.clip_network), device=device),
    )


def try_out(networks: Networks, *, image_size: int) -> None:
    """Let the networks look at blank pictures.

    Raises:
        ConfigError: One of them cannot.
    """
    if networks.fid is not None:
        networks.fid.try_out(image_size)
    if networks.clip is not None:
        networks.clip.try_out()


def _describe(place: Path, file: Path) -> dict[str, str]:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(2**20):
            digest.update(piece)
    return {"name": place.resolve().name, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def _whole_fp32() -> Iterator[None]:
    """Let a GPU multiply in fp32, not in TF32, whatever the training is set to."""
    owners = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [owner.allow_tf32 for owner in owners]
    try:
        for owner in owners:
            owner.allow_tf32 = False
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            owner.allow_tf32 = value
