"""`resolve_architecture`: finds the architecture and the weights of a model by its name.

A name is that of a file in the folder ``sizes`` of a family, a local diffusers folder, or a hub id.
Only a hub id needs the network. torch is not imported here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shlex
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdbench.base.conditions import (
    CLIP,
    NUM_CLIP_TOKENS,
    T5,
    Captions,
    Condition,
    ModelInputs,
)
from sdbench.base.errors import ConfigError
from sdbench.base.files import fingerprint
from sdbench.base.names import nearest
from sdbench.base.outside import refuse_errors
from sdbench.base.shape import Shape
from sdbench.models.discover import (
    PIPELINE_FILE,
    asks_for_zeros,
    built_in_files,
    detect_family,
    families,
    family_of_file,
    has_all_parts,
    has_denoiser,
    said_pipeline,
)
from sdbench.models.family import Fact, Family
from sdbench.models.latent_space import LatentSpace
from sdbench.models.stored import StoredWeight, by_own_names, read_headers
from sdbench.settings.training import DENOISER

MODEL_FLAG = "--model_name"
PARTS_FLAG = "--model_parts"
REVISION_FLAG = "--model_revision"

# Version of the random weights that a seed gives on a CPU. A change of them increases it, and
# SCHEMA_VERSION of checkpoints, which do not hold frozen random weights. 1: one generator draws all
# of a sub-model. 2: one for each block of 2^18 values. 3: the blocks are numbered by the names of
# weights, so that releases of transformers that draw in another order give the same.
DRAWING = 3

# A built-in model of full width with fewer blocks, e.g. ``flux-dev-2+4-blocks``.
FEWER_BLOCKS = re.compile(r"(?P<whole>.+)-(?P<numbers>[0-9]+(\+[0-9]+)*)-blocks")

# Files that transformers may read of the folder of a tokenizer.
ENDINGS_OF_TOKENIZERS = (".json", ".txt", ".model")

# How long the hub may take to say whether it has a model.
HUB_TIMEOUT_S = 5.0

# The pad tokens of tokenizers, with their ids: CLIP's as Stable Diffusion 2 and 1 have them, T5's.
PAD_TOKEN_IDS = {CLIP: {"!": 0, "<|endoftext|>": 49407}, T5: {"<pad>": 0}}


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """The configurations of one model. Compared by identity, so that it can be a cache's key.

    The repr leaves out where the weights come from.

    Attributes:
        name: Built-in name, folder name or hub id.
        family: What kind of model it is.
        weights_folder: Local diffusers folder with safetensors weights; None: random weights.
        part_folders: The same for parts that come from elsewhere, by part.
        tokenizer_folders: Folders of the model's own tokenizers, by name; others are carried ones.
        zeroes_empty_prompt: Whether pictures without a negative prompt are drawn with zeros in
            place of the encoded empty one.
        revision: Commit of the hub repository that the model came from.
        parts: For each sub-model the configuration of its class, for ``scheduler`` that of a
            scheduler of diffusers, and for each tokenizer `pad_token_id`, the id that fills a
            caption up, and for one of T5 perhaps `num_tokens`, the most that it makes.
    """

    name: str = field(repr=False)
    family: Family = field(repr=False)
    weights_folder: Path | None = field(default=None, repr=False)
    part_folders: Mapping[str, Path | None] = field(default_factory=dict, repr=False)
    tokenizer_folders: Mapping[str, Path] = field(default_factory=dict, repr=False)
    zeroes_empty_prompt: bool = field(default=False, repr=False)
    revision: str | None = field(default=None, repr=False)
    parts: Mapping[str, dict[str, Any]]

    def identify(self, loaded: Iterable[str], *, seed: int) -> dict[str, Any]:
        """Facts by which the model is known again, by names of files in its folder.

        Of configurations the settings, without what says who wrote them; size and checksum of the
        files of tokenizers, and of the weights of the parts that are `loaded`; of those that are
        drawn, by part, the seed and the version of the drawing.
        """
        known = {
            self.family.config_files[part]: _settings_in(config)
            for part, config in self.parts.items()
        }
        for part, folder in self.tokenizer_folders.items():
            for file in sorted(folder.iterdir()):
                if file.suffix in ENDINGS_OF_TOKENIZERS:
                    known[f"{part}/{file.name}"] = fingerprint(file)
        if self.weights_folder is not None:
            index = self.weights_folder / PIPELINE_FILE
            known[PIPELINE_FILE] = fingerprint(index) if index.is_file() else None
        for part in loaded:
            for file in self._weight_files(part):
                known[f"{part}/{file.name}"] = fingerprint(file)
            if self.weights_folder_of(part) is None:
                known[part] = f"random, seed {seed}, drawing {DRAWING}"
        return known

    def _weight_files(self, part: str) -> list[Path]:
        """The files in fp32 that the weights of a part are loaded from; none: they are drawn."""
        folder = self.weights_folder_of(part)
        stem = self.family.weights_stem(part)
        files = [] if folder is None else sorted((folder / part).glob(f"{stem}*.safetensors*"))
        return [file for file in files if ".fp16" not in file.name and ".bf16" not in file.name]

    def identify_tensors(self, part: str) -> str | None:
        """Checksum of the tensors of a part, whatever their names; None: random weights.

        A part that diffusers has loaded and saved again has it too, if its type is the same.
        """
        from safetensors import deserialize

        if self.weights_folder_of(part) is None:
            return None
        sums = [
            zlib.crc32(tensor["data"])
            for file in self._weight_files(part)
            if file.suffix == ".safetensors"
            for _, tensor in deserialize(file.read_bytes())
        ]
        return f"{zlib.crc32(repr(sorted(sums)).encode()):08x}"

    def weights_folder_of(self, part: str) -> Path | None:
        """The diffusers folder with the weights of a part; None: random weights."""
        return self.part_folders.get(part, self.weights_folder)

    def stored_weights(self, part: str) -> dict[str, StoredWeight]:
        """The weights of a part in its files, by the part's own names; none if they are random."""
        folder = self.weights_folder_of(part)
        if folder is None:
            return {}
        stored = read_headers(folder / part, self.family.weights_stem(part), flag=MODEL_FLAG)
        return by_own_names(stored, self.family.parts[part])

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of its sub-models: the denoiser, the VAE, the text encoders in order."""
        return tuple(part for part in self.family.parts if part in self.parts)

    def modules_of(self, roles: Iterable[str]) -> tuple[str, ...]:
        """The names of sub-models, of which `DENOISER` may be named by its role."""
        return tuple(self.family.denoiser if role == DENOISER else role for role in roles)

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """The sub-models that encode captions, in order."""
        return tuple(part for part in self.modules if part in self.family.text_encoders)

    @property
    def encoders(self) -> tuple[str, ...]:
        """The sub-models that encode pictures and captions."""
        return tuple(part for part in self.modules if part != self.family.denoiser)

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """The names of its tokenizers, in the order of the text encoders."""
        return tuple(name for name in self.family.tokenizers if name in self.parts)

    @property
    def random_parts(self) -> tuple[str, ...]:
        """The sub-models with random weights."""
        return tuple(part for part in self.modules if self.weights_folder_of(part) is None)

    @property
    def captions(self) -> tuple[Captions, ...]:
        """How captions become token ids, for each text encoder."""
        return self.family.captions(self)

    def _captions_by(self, tokenizer: str, *, name: str, num_tokens: int) -> Captions:
        """How one of the tokenizers makes the tensor `name` of a batch."""
        encoder = self.parts.get(tokenizer.replace("tokenizer", "text_encoder"), {})
        return Captions(
            name=name,
            kind=self.family.tokenizers[tokenizer],
            num_tokens=num_tokens,
            pad_token_id=self.parts[tokenizer]["pad_token_id"],
            folder=self.tokenizer_folders.get(tokenizer),
            vocabulary_size=encoder.get("vocab_size"),
        )

    def clip_captions(self, tokenizer: str, *, name: str = "input_ids") -> Captions:
        """77 tokens of one of CLIP's tokenizers."""
        return self._captions_by(tokenizer, name=name, num_tokens=NUM_CLIP_TOKENS)

    def t5_captions(self, tokenizer: str, *, name: str, num_tokens: int) -> Captions:
        """`num_tokens` of one of T5's tokenizers, or fewer if it has fewer."""
        own = self.parts[tokenizer].get("num_tokens", num_tokens)
        return self._captions_by(tokenizer, name=name, num_tokens=min(own, num_tokens))

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The tensors of an encoded caption."""
        return self.family.conditions(self)

    @property
    def latents(self) -> LatentSpace:
        """What the denoiser is trained on."""
        return self.family.latent_space(self.parts["vae"])

    @property
    def inputs(self) -> ModelInputs:
        """What the model reads beside pictures."""
        return ModelInputs(
            captions=self.captions,
            conditions=self.conditions,
            latent_channels=self.latents.num_channels,
            latent_std=1 / self.latents.scale,
            tells_sizes=self.family.tells_sizes,
        )

    @property
    def default_image_size(self) -> int:
        """Side in pixels that the model was configured for, 64 x 8 = 512 for SD2-base."""
        return self.family.default_image_size(self)

    def check_image_size(self, size: int) -> None:
        """Raise a ConfigError unless the side of a square image, in pixels, suits the model."""
        self.check_shape(Shape.square(size), flag="--image_size")

    def check_shape(self, shape: Shape, *, flag: str) -> None:
        """Raise a ConfigError that names the flag, unless the sides of an image suit the model."""
        multiple, largest = self.family.size_multiple(self), self.family.max_image_size(self)
        for name, side in shape._asdict().items():
            if side > 0 and side % multiple == 0 and side <= (largest or side):
                continue
            below = max(side // multiple, 1) * multiple
            nearest = f"{below}" if side < multiple else f"{below} or {below + multiple}"
            if largest is not None and side > largest:
                nearest = f"{largest}, the largest"
            what = "image size" if shape == Shape.square(side) else f"{name} of {shape}"
            raise ConfigError(
                f"the {what} does not fit {self.name}",
                value=side,
                allowed=f"multiples of {multiple}, nearest {nearest}",
                flag=flag,
            )


def built_in_names() -> list[str]:
    """Names of the built-in architectures."""
    return sorted(built_in_files())


def find_name(text: str) -> str:
    """The name of the model that a text means: that of a built-in one in any case, or the text.

    What names no model here is refused, but hub ids and paths are not looked at. It is called for
    each command line, before anything heavy is imported.
    """
    names = built_in_names()
    if text in names or "/" in text or os.path.exists(text):
        return text
    name = text.lower()  # as all built-in names are
    cut = FEWER_BLOCKS.fullmatch(name)
    if (name if cut is None else cut["whole"]) in names:
        return name
    raise _no_such_model(text)


def is_beside_program(model_name: str) -> bool:
    """Whether a model is built in or in a folder beside the program: the same on all machines."""
    return "/" not in model_name


def resolve_architecture(
    model_name: str, *, revision: str | None = None, random_weights: bool = False
) -> Architecture:
    """Find the architecture and the weights of a model.

    `model_name` is a built-in name in any case, perhaps with fewer blocks
    (``flux-dev-2+4-blocks``), a local diffusers folder, or a hub id (`owner/name`), which may have
    a revision: a branch, tag or commit. With `random_weights` the weights of a folder or hub id are
    not loaded; hub ids of built-in architectures then need no network.

    Raises:
        ConfigError: There is no such model, a part of it is missing, its weights are in a format
            that can carry code, or it is of no family of this suite.
    """
    names, model_name = built_in_names(), find_name(model_name)
    is_folder = os.path.isdir(model_name)  # False also for a text that cannot be a path
    cut = None if is_folder else FEWER_BLOCKS.fullmatch(model_name)
    if cut is not None and cut["whole"] not in names:
        cut = None
    if revision is not None and (model_name in names or is_folder or cut):
        raise ConfigError(
            "only a model from the hub has revisions",
            value=revision,
            allowed=f"no revision with {model_name}",
            flag=REVISION_FLAG,
        )
    if model_name in names:
        return _load_built_in(model_name)
    if cut is not None:
        return _load_fewer_blocks(model_name, cut["whole"], cut["numbers"])
    if is_folder:
        folder = Path(model_name).resolve()
        if (folder / "checkpoints").is_dir() and not (folder / "vae").exists():
            raise _refusal(
                "this is the folder of a run of train.py, and not a model",
                model_name,
                f"its model; export it first: `python -m sdbench export {shlex.quote(model_name)}`",
            )
        single_file = next(folder.glob("*.safetensors"), None)
        is_of_diffusers = (folder / "config.json").exists() or any(folder.glob("*/config.json"))
        if single_file is not None and not is_of_diffusers:
            raise _single_file(str(single_file))
        return _load_folder(folder, name=folder.name, random_weights=random_weights)
    if os.path.isfile(model_name):
        raise _single_file(model_name)
    if re.fullmatch(r"(?![.~])[^/]+/[^/]+", model_name) is None:
        raise _no_such_model(model_name)
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


def _settings_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration, as JSON has them, without what says who wrote it."""
    return {
        key: value if isinstance(value, str | int | None) else json.dumps(value, sort_keys=True)
        for key, value in config.items()
        if not key.startswith("_") and key != "transformers_version"
    }


def _refusal(what: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(what, value=value, allowed=allowed, flag=MODEL_FLAG)


def _no_such_model(given: str) -> ConfigError:
    names = built_in_names()
    meant = nearest(given.lower(), names)
    allowed = f"{', '.join(names)}, a diffusers folder, or a hub id owner/name"
    allowed += f", the nearest is {meant}" if meant else ""
    return _refusal("there is no such model", given, allowed)


def _single_file(path: str) -> ConfigError:
    return _refusal(
        "this is a single file, and the parts of a model are read from a folder",
        path,
        "a folder; diffusers makes one of a .safetensors file: `from_single_file` of the model's "
        "pipeline, then `save_pretrained`",
    )


def _read_built_in(name: str) -> dict[str, Any]:
    return json.loads(built_in_files()[name].read_text(encoding="utf-8"))


@functools.cache
def _load_built_in(name: str) -> Architecture:
    content, family = _read_built_in(name), family_of_file(built_in_files()[name])
    parts = {part: content[part] for part in family.config_files if part in content}
    return Architecture(name=name, family=family, parts=parts)


@functools.cache
def _load_fewer_blocks(name: str, whole: str, numbers: str) -> Architecture:
    architecture = _load_built_in(whole)
    denoiser, keys = architecture.family.denoiser, architecture.family.block_counts
    config = architecture.parts[denoiser]
    counts = dict(zip(keys, map(int, numbers.split("+")), strict=False))
    is_right = len(keys) == numbers.count("+") + 1
    if not is_right or not all(0 < counts[key] <= config[key] for key in keys):
        ranges = " + ".join(f"1 to {config[key]}" for key in keys)
        raise _refusal(
            f"{whole} has no such part of its blocks",
            name,
            f"{whole}-N-blocks with {ranges} for N" if keys else f"{whole} as a whole",
        )
    parts = {**architecture.parts, denoiser: {**config, **counts}}
    return dataclasses.replace(architecture, name=name, parts=parts)


def _load_folder(
    folder: Path, *, name: str, random_weights: bool, revision: str | None = None
) -> Architecture:
    family = _find_family(folder)
    # An optional encoder is there with its tokenizer, or both are not.
    has_optional = any((folder / part).exists() for part in family.optional if part in family.parts)
    absent = () if has_optional else family.optional
    files = {part: file for part, file in family.config_files.items() if part not in absent}
    parts = {part: _read_part(folder, file, files.values()) for part, file in files.items()}
    for part in family.parts if not random_weights else ():
        if part in parts:
            read_headers(folder / part, family.weights_stem(part), flag=MODEL_FLAG)
    tokenizers = {part: kind for part, kind in family.tokenizers.items() if part in parts}
    pad_tokens = {part: _pad_token(parts[part]) for part in tokenizers}
    with refuse_errors(
        "the configurations of the model folder make no model",
        value=str(folder),
        allowed="config.json files as they were saved",
        flag=MODEL_FLAG,
    ):
        facts = family.facts(parts, folder)
    facts += [
        (f"pad token of the {part}", token, PAD_TOKEN_IDS[tokenizers[part]])
        for part, token in pad_tokens.items()
    ]
    _check_facts(facts, family=family, folder=folder)
    parts |= {
        part: {"pad_token_id": PAD_TOKEN_IDS[tokenizers[part]][token]}
        | _num_tokens(parts[part], kind=tokenizers[part])
        for part, token in pad_tokens.items()
    }
    return Architecture(
        name=name,
        family=family,
        weights_folder=None if random_weights else folder,
        zeroes_empty_prompt=family.may_zero_empty_prompt and asks_for_zeros(folder),
        tokenizer_folders={part: folder / part for part in tokenizers},
        revision=revision,
        parts=parts,
    )


def _find_family(folder: Path) -> Family:
    """The family of a folder, by its parts; a ConfigError if its model_index.json has another.

    One whose denoiser is there, or is all that is known, is checked by its parts, which may lack.
    """
    found, said = detect_family(folder), said_pipeline(folder)
    named = next((one for one in families().values() if one.pipeline == said), None)
    if named is None:
        return found or next(iter(families().values()))
    if found in (None, named) or (not has_all_parts(folder, named) and has_denoiser(folder, named)):
        return named
    raise _refusal(
        f"the parts of {folder} are not those of the pipeline that its {PIPELINE_FILE} names",
        said,
        f"{found.pipeline}, or the parts of a {said}",
    )


def _pad_token(tokenizer: Mapping[str, Any]) -> Any:
    token = tokenizer.get("pad_token")
    return token["content"] if isinstance(token, dict) else token


def _num_tokens(tokenizer: Mapping[str, Any], *, kind: str) -> dict[str, int]:
    """The most tokens that a tokenizer of T5 says it makes; CLIP's number is that of positions."""
    number = tokenizer.get("model_max_length")
    return {"num_tokens": number} if kind == T5 and isinstance(number, int) and number > 0 else {}


def _read_part(folder: Path, file: str, files: Iterable[str]) -> dict[str, Any]:
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
            f"a folder as diffusers saves it, with {', '.join(files)}",
        ) from error


def _check_facts(facts: Iterable[Fact], *, family: Family, folder: Path) -> None:
    for what, value, allowed in facts:
        if value not in allowed:
            raise _refusal(
                f"the {what} of {folder} is not that of {family.title}",
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

    wanted = []
    for family in families().values():
        wanted += [*family.config_files.values()]
        wanted += [f"{name}/*.{end}" for name in family.tokenizers for end in ("json", "txt")]
        # In one file, or in several with an index.
        stems = [] if random_weights else [f"{p}/{family.weights_stem(p)}" for p in family.parts]
        ends = (".safetensors", ".safetensors.index.json", "-*-of-*.safetensors")
        wanted += [f"{stem}{end}" for stem in stems for end in ends]
    wanted = [*dict.fromkeys([PIPELINE_FILE, *wanted])]
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
