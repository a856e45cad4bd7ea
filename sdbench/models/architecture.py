"""`resolve_architecture`: finds the architecture and the weights of a model by its name.

A name is that of a file in `architectures/`, a local diffusers folder, or a hub id. Only a hub id
needs the network. torch is not imported here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdbench.base.conditions import Captions, Condition
from sdbench.base.errors import ConfigError
from sdbench.base.files import crc32_of
from sdbench.base.names import nearest
from sdbench.base.outside import shorten
from sdbench.models.family import Family
from sdbench.models.objective import PREDICTION_TYPES

ARCHITECTURES_FOLDER = Path(__file__).parent / "sd" / "sizes"
MODEL_FLAG = "--model_name"
REVISION_FLAG = "--model_revision"

# Version of the random weights that a seed gives on a CPU. A change of them increases it, and
# SCHEMA_VERSION of checkpoints, which do not hold frozen random weights. 1: one generator draws all
# of a sub-model. 2: one for each block of 2^18 values.
DRAWING = 2

# How long the hub may take to say whether it has a model.
HUB_TIMEOUT_S = 5.0

CONFIG_FILES = {
    "unet": "unet/config.json",
    "vae": "vae/config.json",
    "text_encoder": "text_encoder/config.json",
    "scheduler": "scheduler/scheduler_config.json",
    "tokenizer": "tokenizer/tokenizer_config.json",
}
WEIGHT_STEMS = {
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
}
# Conditioning inputs of a U-Net that Stable Diffusion 1 and 2 do not have.
OTHER_CONDITIONS = (
    *("class_embed_type", "num_class_embeds", "addition_embed_type", "encoder_hid_dim"),
)
# The pad tokens of Stable Diffusion 2 and 1, with their ids in CLIP's vocabulary.
PAD_TOKEN_IDS = {"!": 0, "<|endoftext|>": 49407}


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """The configurations of one model. Compared by identity, so that it can be a cache's key.

    The configurations are for diffusers' UNet2DConditionModel, AutoencoderKL and DDPMScheduler and
    for transformers' CLIPTextModel. The repr leaves out where the weights come from.

    Attributes:
        name: Built-in name, folder name or hub id.
        weights_folder: Local diffusers folder with safetensors weights; None: random weights.
        part_folders: The same for parts that come from elsewhere, by part.
        tokenizer_folder: Folder of the model's own tokenizer; None: CLIP's.
        revision: Commit of the hub repository that the model came from.
        tokenizer: `pad_token_id`, the id that fills a caption up to 77 tokens.
    """

    name: str = field(repr=False)
    weights_folder: Path | None = field(default=None, repr=False)
    part_folders: Mapping[str, Path | None] = field(default_factory=dict, repr=False)
    tokenizer_folder: Path | None = field(default=None, repr=False)
    revision: str | None = field(default=None, repr=False)
    unet: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]
    scheduler: dict[str, Any]
    tokenizer: dict[str, Any]

    def identify_weights(self, parts: Iterable[str]) -> dict[str, str]:
        """Checksums of the weight files of parts; parts with random weights are left out."""
        known = {}
        for part in parts:
            folder = self.weights_folder_of(part)
            if folder is not None:
                files = sorted((folder / part).glob("*.safetensors"))
                sums = ["{:08x}:{}".format(*crc32_of(file)) for file in files]
                known[part] = " ".join(sums)
        return known

    def weights_folder_of(self, part: str) -> Path | None:
        """The diffusers folder with the weights of a part; None: random weights."""
        return self.part_folders.get(part, self.weights_folder)

    @property
    def random_parts(self) -> tuple[str, ...]:
        """The parts with random weights."""
        return tuple(part for part in WEIGHT_STEMS if self.weights_folder_of(part) is None)

    @property
    def family(self) -> Family:
        """What kind of model it is."""
        from sdbench.models.sd.family import StableDiffusion

        return StableDiffusion()

    @property
    def captions(self) -> tuple[Captions, ...]:
        """How captions become token ids, for each text encoder."""
        return (
            Captions(pad_token_id=self.tokenizer["pad_token_id"], folder=self.tokenizer_folder),
        )

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The tensors of an encoded caption."""
        return (Condition(shape=(77, self.unet["cross_attention_dim"])),)

    @property
    def tells_sizes(self) -> bool:
        """Whether the model is told the sizes of each picture, `conditions.SIZES`."""
        return False

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return self.vae["latent_channels"]

    @property
    def latent_factor(self) -> int:
        """Pixels per latent along a side: the VAE halves between blocks, 2^3 = 8 with four."""
        return 2 ** (len(self.vae["block_out_channels"]) - 1)

    @property
    def default_image_size(self) -> int:
        """Side in pixels that the U-Net was configured for, 64 x 8 = 512 for SD2-base."""
        return self.unet["sample_size"] * self.latent_factor

    def check_image_size(self, size: int) -> None:
        """Raise a ConfigError unless the side of a square image, in pixels, suits VAE and U-Net.

        It is a multiple of 8 (VAE) x 8 (U-Net, four blocks) = 64 for SD.
        """
        multiple = self.latent_factor * 2 ** (len(self.unet["block_out_channels"]) - 1)
        if size > 0 and size % multiple == 0:
            return
        below = max(size // multiple, 1) * multiple
        nearest = f"{below}" if size < multiple else f"{below} or {below + multiple}"
        raise ConfigError(
            f"the image size does not fit {self.name}",
            value=size,
            allowed=f"multiples of {multiple}, nearest {nearest}",
            flag="--image_size",
        )


def built_in_names() -> list[str]:
    """Names of the architectures in `architectures/`."""
    return sorted(path.stem for path in ARCHITECTURES_FOLDER.glob("*.json"))


def is_beside_program(model_name: str) -> bool:
    """Whether a model is built in or in a folder beside the program: the same on all machines."""
    return "/" not in model_name


def resolve_architecture(
    model_name: str, *, revision: str | None = None, random_weights: bool = False
) -> Architecture:
    """Find the architecture and the weights of a model.

    `model_name` is a built-in name, a local diffusers folder, or a hub id (`owner/name`), which may
    have a revision: a branch, tag or commit. With `random_weights` the weights of a folder or hub
    id are not loaded; hub ids of built-in architectures then need no network.

    Raises:
        ConfigError: There is no such model, a part of it is missing, its weights are in a format
            that can carry code, or it is not a Stable Diffusion 1 or 2.
    """
    names = built_in_names()
    is_folder = os.path.isdir(model_name)  # False also for a text that cannot be a path
    if revision is not None and (model_name in names or is_folder):
        raise ConfigError(
            "only a model from the hub has revisions",
            value=revision,
            allowed=f"no revision with {model_name}",
            flag=REVISION_FLAG,
        )
    if model_name in names:
        return _load_built_in(model_name)
    if is_folder:
        folder = Path(model_name).resolve()
        if (folder / "checkpoints").is_dir() and not (folder / "unet").exists():
            raise _refusal(
                "this is the folder of a run of train.py, and not a model",
                model_name,
                f"its model; export it first: `python -m sdbench export {shlex.quote(model_name)}`",
            )
        return _load_folder(folder, name=folder.name, random_weights=random_weights)
    if re.fullmatch(r"(?![.~])[^/]+/[^/]+", model_name) is None:
        meant = nearest(model_name, names)
        allowed = f"{', '.join(names)}, a diffusers folder, or a hub id owner/name"
        allowed += f", the nearest is {meant}" if meant else ""
        raise _refusal("there is no such model", model_name, allowed)
    built_in = next((name for name in names if model_name in _read_built_in(name)["hub_ids"]), None)
    if random_weights and built_in is not None and revision is None:
        return _load_built_in(built_in)
    folder = _download(
        model_name, revision=revision, random_weights=random_weights, built_in=built_in
    )
    # A folder of the hub's cache is named after the commit.
    return _load_folder(
        folder, name=model_name, random_weights=random_weights, revision=folder.name
    )


def _refusal(what: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(what, value=value, allowed=allowed, flag=MODEL_FLAG)


@contextlib.contextmanager
def refuse_errors(what: str, *, value: Any, allowed: str, flag: str = MODEL_FLAG) -> Iterator[None]:
    """Make a ConfigError of any error of the block: diffusers and transformers raise all kinds."""
    try:
        yield
    except Exception as error:
        said = shorten(" ".join(str(error).split()), length=200)
        raise ConfigError(f"{what} ({said})", value=value, allowed=allowed, flag=flag) from error


def _read_built_in(name: str) -> dict[str, Any]:
    return json.loads((ARCHITECTURES_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def _load_built_in(name: str) -> Architecture:
    content = _read_built_in(name)
    return Architecture(name=name, **{part: content[part] for part in CONFIG_FILES})


def _load_folder(
    folder: Path, *, name: str, random_weights: bool, revision: str | None = None
) -> Architecture:
    parts = {part: _read_part(folder, file) for part, file in CONFIG_FILES.items()}
    for part, stem in WEIGHT_STEMS.items() if not random_weights else ():
        files = (f"{stem}.safetensors", f"{stem}.safetensors.index.json")
        if not any((folder / part / file).is_file() for file in files):
            raise _refusal(
                "the model folder has no safetensors weights, and other formats can carry code",
                str(folder / part),
                " or ".join(files),
            )
        for file in (folder / part).glob("*.safetensors"):
            _check_whole(file)
    token = parts["tokenizer"].get("pad_token")
    token = token["content"] if isinstance(token, dict) else token
    _check_parts(parts, pad_token=token, folder=folder)
    parts["tokenizer"] = {"pad_token_id": PAD_TOKEN_IDS[token]}
    return Architecture(
        name=name,
        weights_folder=None if random_weights else folder,
        tokenizer_folder=folder / "tokenizer",
        revision=revision,
        **parts,
    )


def _read_part(folder: Path, file: str) -> dict[str, Any]:
    try:
        # Schedulers are saved with -Infinity, which is out of the bounds of `sdbench.base.outside`.
        content = json.loads((folder / file).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        return content
    except (OSError, ValueError) as error:
        raise _refusal(
            f"the model folder has no {file} that can be read ({error})",
            str(folder),
            f"a folder as diffusers saves it, with {', '.join(CONFIG_FILES.values())}",
        ) from error


def _check_whole(file: Path) -> None:
    """Read the header of a file of weights, which says how long the file is."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise _refusal(
            f"a file of weights is damaged or cut off ({error})",
            str(file),
            "the whole file: copy or download it again",
        ) from None


def _check_parts(parts: dict[str, dict[str, Any]], *, pad_token: Any, folder: Path) -> None:
    unet, vae, text_encoder = parts["unet"], parts["vae"], parts["text_encoder"]
    # Schedulers that were saved before the key existed mean "epsilon".
    prediction_type = parts["scheduler"].get("prediction_type", "epsilon")
    # Not equal in SDXL, whose U-Net reads the concatenated states of two text encoders.
    width = (text_encoder.get("hidden_size"),)
    latent_channels = (vae.get("latent_channels"),)
    second_encoder = "text_encoder_2" if (folder / "text_encoder_2").exists() else None
    facts = [
        ("second text encoder", second_encoder, (None,)),
        ("U-Net class", unet.get("_class_name"), ("UNet2DConditionModel",)),
        ("VAE class", vae.get("_class_name"), ("AutoencoderKL",)),
        ("text encoder type", text_encoder.get("model_type"), ("clip_text_model",)),
        ("prediction type", prediction_type, PREDICTION_TYPES),
        ("U-Net's cross_attention_dim", unet.get("cross_attention_dim"), width),
        ("pad token", pad_token, PAD_TOKEN_IDS),
        # Nine in inpainting models.
        ("U-Net's in_channels", unet.get("in_channels"), latent_channels),
        ("U-Net's out_channels", unet.get("out_channels"), latent_channels),
        # Inputs of U-Nets of other families, beside time and text.
        *((f"U-Net's {name}", unet.get(name), (None,)) for name in OTHER_CONDITIONS),
    ]
    for what, value, allowed in facts:
        if value not in allowed:
            raise _refusal(
                f"the {what} of {folder} is not that of a Stable Diffusion 1 or 2 model",
                value,
                " or ".join("none" if one is None else str(one) for one in allowed),
            )


def _download(
    model_name: str, *, revision: str | None, random_weights: bool, built_in: str | None
) -> Path:
    """Download a model, or take it from the hub's cache if the hub cannot be reached.

    Only configurations, tokenizer and fp32 safetensors, which cannot carry code.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    weights = [
        f"{part}/{stem}{end}"
        for part, stem in WEIGHT_STEMS.items()
        for end in (".safetensors", ".safetensors.index.json", "-*-of-*.safetensors")
    ]
    wanted = [*CONFIG_FILES.values(), "tokenizer/*.json", "tokenizer/*.txt"]
    wanted += [] if random_weights else weights
    try:
        return _fetch(model_name, revision=revision, allow_patterns=wanted)
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"the hub model {model_name} has no such revision",
            value=revision,
            allowed="one of its branches, tags or commits",
            flag=REVISION_FLAG,
        ) from error
    except Exception as error:  # of the hub, or of its client library
        allowed = f"{', '.join(built_in_names())}, a local diffusers folder, a hub id in reach, "
        allowed += "with your token in HF_TOKEN where a login is asked for"
        if built_in is not None:
            allowed += f", or --random_weights, which builds {built_in} with random weights"
        what = f"the model cannot be loaded from the hub ({type(error).__name__})"
        raise _refusal(what, model_name, allowed) from error


def _fetch(model_name: str, **options: Any) -> Path:
    """Fetch files from the hub, or from its cache if the hub does not answer in time."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    fetch = functools.partial(huggingface_hub.snapshot_download, model_name, **options)
    try:
        # `snapshot_download` asks the same, and would wait for the answer without end.
        huggingface_hub.HfApi().repo_info(
            model_name, revision=options["revision"], timeout=HUB_TIMEOUT_S
        )
    except RevisionNotFoundError:
        raise
    except Exception as error:  # of the hub, or of its client library
        try:
            return Path(fetch(local_files_only=True))
        except LocalEntryNotFoundError:
            raise error from None
    return Path(fetch())
