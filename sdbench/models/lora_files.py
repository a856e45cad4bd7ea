"""LoRA files: those of diffusers, PEFT, kohya, LyCORIS and ComfyUI are read, our own are written.

A file has two matrices for each layer and perhaps alpha. Here the name of each layer is looked up
among all names that makers have for the layers of the model, and W becomes W + alpha / rank B A.
diffusers' own conversions are not used: with mixed ranks, or alpha in some layers only, they give
other strengths, and they leave out what they do not know.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.models.normalization import AdaLayerNormContinuous
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sdbench.base.errors import RunError
from sdbench.base.outside import refuse_errors
from sdbench.models.architecture import Architecture
from sdbench.models.components import make_part
from sdbench.models.diffusion import DiffusionModel
from sdbench.models.drawing import make_pipeline, make_sampler
from sdbench.models.family import Family
from sdbench.models.lora import ADAPTER, TEXT_ENCODER, Lora, lora_layers
from sdbench.models.quiet import quiet_diffusers, quiet_transformers
from sdbench.settings.lora import LoraFile

# diffusers' own name.
DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
# How names go on behind that of a layer, with the matrix: A is down, B is up. Longer ones first.
DOWN, UP, MIDDLE, ALPHA = "down", "up", "middle", "alpha"
ENDINGS = {
    # PEFT, and diffusers since 2024; a module of PEFT also has the name of the adapter.
    "lora_A.weight": DOWN,
    "lora_B.weight": UP,
    "lora_A.default.weight": DOWN,
    "lora_B.default.weight": UP,
    # kohya; LyCORIS may have the window of a convolution in a matrix of its own.
    "lora_down.weight": DOWN,
    "lora_up.weight": UP,
    "lora_mid.weight": MIDDLE,
    # diffusers: of a denoiser, of a text encoder, and of 2023, where the layer is `to_q_lora`.
    "lora.down.weight": DOWN,
    "lora.up.weight": UP,
    "lora_linear_layer.down.weight": DOWN,
    "lora_linear_layer.up.weight": UP,
    "down.weight": DOWN,
    "up.weight": UP,
    "alpha": ALPHA,
}
# Where diffusers has alpha, if it is in no tensor.
DIFFUSERS_METADATA = "lora_adapter_metadata"


class _Place(NamedTuple):
    """What one name in a file stands for: layers of a part, whose rows follow one another."""

    part: str
    layers: tuple[str, ...]
    is_original: bool


class _Update(NamedTuple):
    """What a file adds to layers: strength B A, with B (out, rank) and A (rank, in, ...)."""

    place: _Place
    down: Tensor
    up: Tensor
    strength: float

    def of_layers(self, part: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """The weights of the layers, and on their device what is added to each."""
        modules = [part.get_submodule(layer) for layer in self.place.layers]
        device = modules[0].weight.device
        down, up = self.down.to(device).flatten(1), self.up.to(device).flatten(1)
        change = self.strength * (up @ down)
        if self.place.is_original and _has_scale_first(part, self.place):
            # There the rows of the shift are first.
            change = change.roll(len(change) // 2, 0)
        rows = change.split([len(module.weight) for module in modules])
        for module, own in zip(modules, rows, strict=True):
            yield module.weight, own.reshape(module.weight.shape)


def _has_scale_first(part: nn.Module, place: _Place) -> bool:
    parent = place.layers[0].rpartition(".")[0]
    return isinstance(part.get_submodule(parent), AdaLayerNormContinuous)


def check_lora_files(files: Sequence[LoraFile], architecture: Architecture) -> None:
    """Raise a ConfigError unless files have LoRA for a model; its weights are not made."""
    parts = (architecture.family.denoiser, *architecture.text_encoders)
    modules = {part: make_part(part, architecture) for part in parts}
    for file in files:
        _read(file, modules, architecture.family)


@torch.no_grad()
def fuse_lora_files(model: DiffusionModel, files: Sequence[LoraFile]) -> None:
    """Add LoRA from files to the weights of an fp32 model in place; several add up."""
    parts = (model.family.denoiser, *model.family.text_encoders)
    modules = {name: module for name, module in model.named_children() if name in parts}
    for file in files:
        for update in _read(file, modules, model.family):
            for weight, change in update.of_layers(modules[update.place.part]):
                weight += file.weight * change


def _read(file: LoraFile, modules: Mapping[str, nn.Module], family: Family) -> list[_Update]:
    """Read and check all of a file; an error is a ConfigError."""
    refusing = refuse_errors(
        "this LoRA cannot be used",
        value=file.path,
        allowed="safetensors of diffusers, PEFT, kohya, LyCORIS (LoCon) or ComfyUI, trained on "
        "this kind of model",
        flag="--lora",
    )
    with refusing:
        return list(_updates(file, modules, family))


def _updates(file: LoraFile, modules: Mapping[str, nn.Module], family: Family) -> Iterator[_Update]:
    with safe_open(file.path, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        metadata = stored.metadata() or {}
    configs = _peft_configs(file, metadata, names=tensors, family=family)
    places = _places_by_name(modules, family)
    found: dict[_Place, dict[str, Tensor]] = defaultdict(dict)
    strange, twice = [], []
    for name, tensor in tensors.items():
        layer, matrix = _split(name)
        place = places.get(_plain(layer))
        if place is None or matrix is None:
            strange.append(name)
        elif found[place].setdefault(matrix, tensor) is not tensor:
            twice.append(name)
    if strange or not tensors:
        first = strange[0] if strange else "there are none"
        what = f"of {len(tensors)} tensors {len(strange)} are no LoRA of this model"
        raise ValueError(f"{what}: {first}")
    times = Counter((place.part, layer) for place in found for layer in place.layers)
    twice += [layer for (_, layer), number in times.items() if number > 1]
    if twice:
        raise ValueError(f"it has LoRA twice for one layer: {twice[0]}")
    for place, own in found.items():
        yield _make_update(place, own, modules[place.part], configs.get(place.part))


def _make_update(
    place: _Place, own: Mapping[str, Tensor], part: nn.Module, config: Mapping[str, Any] | None
) -> _Update:
    name = f"{place.part}.{place.layers[0]}"
    if missing := {DOWN, UP} - own.keys():
        raise ValueError(f"{name} has no {missing.pop()} matrix")
    down, up = own[DOWN].float(), own[UP].float()
    rank = len(down)
    if MIDDLE in own:
        down = torch.einsum("rsyx,si->riyx", own[MIDDLE].float(), down.flatten(1))
    weights = [part.get_submodule(layer).weight for layer in place.layers]
    shape = (sum(map(len, weights)), *weights[0].shape[1:])
    found = (len(up), *down.shape[1:])
    if up[0].numel() != rank or _without_ones(found) != _without_ones(shape):
        raise ValueError(f"{name} is {shape} and not {found} with rank {rank}")
    strength = _strength(own.get(ALPHA), config, rank=rank, layer=place.layers[0])
    if not all(map(math.isfinite, (strength, float(down.sum()), float(up.sum())))):
        raise ValueError(f"{name} has numbers that are not finite")
    if not down.any():  # a trainer begins with random numbers there, and zeros in the other matrix
        raise ValueError(f"{name} has zeros alone, as in a file whose content has not come")
    return _Update(place, down, up, strength)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    """A shape without the window of 1 x 1 of a convolution, which makers write or leave out."""
    return [length for length in shape if length != 1]


def _strength(
    alpha: Tensor | None, config: Mapping[str, Any] | None, *, rank: int, layer: str
) -> float:
    """The strength of a layer: alpha is in a tensor, in the configuration of PEFT, or the rank."""
    if alpha is not None:
        return float(alpha) / rank
    if config is None:
        return 1.0
    patterns = config.get("alpha_pattern") or {}
    own_alpha = patterns.get(get_pattern_key(patterns, layer), config["lora_alpha"])
    return own_alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _peft_configs(
    file: LoraFile, metadata: Mapping[str, str], *, names: Iterable[str], family: Family
) -> dict[str, dict[str, Any]]:
    """The configurations of PEFT by part, as far as a file has them in it or beside it."""
    configs: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in json.loads(metadata.get(DIFFUSERS_METADATA, "{}")).items():
        part, _, setting = name.partition(".")
        configs[part][setting] = value
    if any(name.startswith("base_model.") for name in names):
        for beside in file.files[1:]:
            configs[family.denoiser] = json.loads(beside.read_text(encoding="utf-8"))
    return configs


def _split(name: str) -> tuple[str, str | None]:
    """The name of the layer in the name of a tensor, and which matrix it is; None: neither."""
    for ending, matrix in ENDINGS.items():
        if name.endswith(f".{ending}"):
            return name.removesuffix(f".{ending}"), matrix
    return name, None


def _plain(name: str) -> str:
    """A name as kohya has it, from which dots cannot be told any more."""
    return name.replace(".", "_")


def _places_by_name(modules: Mapping[str, nn.Module], family: Family) -> dict[str, _Place]:
    """All layers that can have LoRA, by all their names in files, as `_plain` has them."""
    places = {}
    for part, module in modules.items():
        layers = [
            name
            for name, inner in module.named_modules()
            if isinstance(inner, (nn.Linear, nn.Conv2d))
        ]
        named = {
            name: _Place(part, (layer,), is_original=False)
            for layer in layers
            for name in _names_of_layer(layer)
        }
        if part == family.denoiser:
            original = family.original_names(layers)
            named |= {name: _Place(part, some, is_original=True) for name, some in original.items()}
        for beginning in _beginnings(part, family):
            places |= {_plain(beginning + name): place for name, place in named.items()}
    return places


def _names_of_layer(layer: str) -> set[str]:
    """A layer of diffusers or transformers as files name it.

    That is its own name or diffusers' of 2023; transformers 5.6 and later leave out `text_model.`.
    """
    old = re.sub(r"\.to_([qkv]|out)(\.0)?$", r".processor.to_\1_lora", layer)
    old = re.sub(r"\.self_attn\.([qkv]|out)_proj$", r".self_attn.to_\1_lora", old)
    return {name.removeprefix(level) for name in (layer, old) for level in ("", "text_model.")}


def _beginnings(part: str, family: Family) -> tuple[str, ...]:
    """What stands before the names of a part's layers: of diffusers, kohya, ComfyUI and others."""
    if part == family.denoiser:
        return (
            *("", f"{part}.", f"lora_{part}_", "lora_unet_", "lycoris_"),
            *("diffusion_model.", "base_model.model."),
        )
    number = family.text_encoders.index(part) + 1
    if family.parts[part].startswith("T5"):
        others: tuple[str, ...] = ("lora_te3_", "text_encoders.t5xxl.transformer.")
    elif number == 1:
        others = ("lora_te_", "text_encoders.clip_l.transformer.")
    else:
        others = ("text_encoders.clip_g.transformer.",)
    return (f"{part}.", f"lora_te{number}_", *others)


def named_for_file(weights: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """The LoRA of a training run by PEFT's names, with alpha / rank as a factor in B.

    Programs that find no alpha take the rank for it: all of them have the strength of training.
    """
    factors = {"lora_A": 1.0, "lora_B": lora.alpha / lora.rank}
    return {
        name.replace(f".{matrix}.{ADAPTER}.", f".{matrix}."): factor * weight
        for name, weight in weights.items()
        for matrix, factor in factors.items()
        if f".{matrix}." in name
    }


def write_lora(tensors: Mapping[str, Tensor], file: Path, *, architecture: Architecture) -> None:
    """Write what `named_for_file` gives; a RunError unless it is read back as it was written.

    This suite and diffusers read the file, each in its own way.
    """
    save_file(_as_diffusers_reads(tensors), file, metadata={"format": "pt"})
    parts = {name.partition(".")[0] for name in tensors}
    modules = {part: make_part(part, architecture) for part in parts}
    try:
        read_by = {
            "this suite": _matrices(_updates(LoraFile(str(file)), modules, architecture.family)),
            "diffusers": _matrices_by_diffusers(file, modules, architecture),
        }
    except Exception as error:  # diffusers raises all kinds
        raise RunError(f"the LoRA file that was written cannot be read: {error}") from error
    for reader, read in read_by.items():
        wrong = sorted(
            name
            for name in tensors.keys() | read.keys()
            if not _is_same(read.get(name), tensors.get(name))
        )
        if wrong:
            raise RunError(
                f"{reader} reads {len(wrong)} of {len(tensors)} matrices of the LoRA file "
                f"otherwise than they were written, such as {wrong[0]}"
            )


def _is_same(read: Tensor | None, written: Tensor | None) -> bool:
    if read is None or written is None or read.shape != written.shape:
        return False
    # transformers puts the matrices of a model without weights on its device, meta.
    return read.is_meta or torch.equal(read.float(), written.float())


def _matrices(updates: Iterable[_Update]) -> dict[str, Tensor]:
    """The matrices with strength 1, by PEFT's names."""
    found = {}
    for place, down, up, strength in updates:
        if strength == 1:
            name = f"{place.part}.{place.layers[0]}"
            found |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    return found


def _as_diffusers_reads(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by names that diffusers reads: it knows PEFT's of CLIP by those of its attention."""
    named = dict(tensors)
    of_text = [name for name in tensors if name.startswith(f"{TEXT_ENCODER}.")]
    if not any(".self_attn." in name for name in of_text):
        for name in of_text:
            known = name.replace(".lora_A.", ".lora_linear_layer.down.")
            named[known.replace(".lora_B.", ".lora_linear_layer.up.")] = named.pop(name)
    return named


def _matrices_by_diffusers(
    file: Path, modules: Mapping[str, nn.Module], architecture: Architecture
) -> dict[str, Tensor]:
    """The matrices that diffusers' pipeline loads with strength 1, by PEFT's names."""
    sampler = make_sampler(None, architecture.parts["scheduler"])
    pipeline = make_pipeline(architecture, modules, sampler=sampler)
    with quiet_diffusers(), quiet_transformers():
        pipeline.load_lora_weights(
            str(file.parent),
            weight_name=file.name,
            adapter_name=ADAPTER,
            use_safetensors=True,
            local_files_only=True,
        )
    return {
        f"{part}.{name}.{matrix}.weight": getattr(layer, matrix)[ADAPTER].weight
        for part, module in modules.items()
        for name, layer in lora_layers(module).items()
        for matrix in ("lora_A", "lora_B")
        if layer.scaling[ADAPTER] == 1
    }
