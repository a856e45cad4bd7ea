"""LoRA files: each layer has its own strength, whoever made the file, and what is written is read.

What is expected is summed up by numpy from the matrices, layer by layer, beside the code that is
tested. All weights of the models are zero: what is in them afterwards is what was added.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sdbench.base.errors import RunError
from sdbench.models import lora_files
from sdbench.models.architecture import Architecture, resolve_architecture
from sdbench.models.components import make_part
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.drawing import make_pipeline, make_sampler
from sdbench.models.lora import Lora, is_lora
from sdbench.models.lora_files import (
    DIFFUSERS_NAME,
    check_lora_files,
    fuse_lora_files,
    named_for_file,
    write_lora,
)
from sdbench.settings.lora import LoraFile
from tests.refusals import refused

FAMILIES = {"sd": "tiny", "sdxl": "tiny-sdxl", "sd3": "tiny-sd3", "flux": "tiny-flux"}
# (rank, alpha) of one layer after another, over and over; None: the file has no alpha for it.
PATTERNS = {
    "one rank, one alpha": ((4, 6.0),),
    "ranks and alphas": ((4, 1.0), (8, 8.0), (2, 16.0)),
    "alpha in some": ((4, 1.0), (8, None), (4, 8.0), (2, None)),
    "ranks, no alpha": ((4, None), (8, None)),
}


class Layer(NamedTuple):
    """LoRA of one layer, or of several in one: their rows follow one another."""

    part: str
    names: tuple[str, ...]
    down: Tensor
    up: Tensor
    alpha: float | None

    @property
    def name(self) -> str:
        (name,) = self.names
        return name


@functools.cache
def architecture_of(family: str) -> Architecture:
    return resolve_architecture(FAMILIES[family])


@functools.cache
def model_of(family: str) -> DiffusionModel:
    return build_model(architecture_of(family), seed=None).requires_grad_(False)


def added(family: str, files: Iterable[LoraFile]) -> dict[str, np.ndarray]:
    """What files add to the weights of a model, by those that have changed."""
    model = model_of(family)
    for weight in model.parameters():
        weight.zero_()
    fuse_lora_files(model, list(files))
    return {
        name.removesuffix(".weight"): weight.numpy().copy()
        for name, weight in model.named_parameters()
        if weight.any()
    }


def by_numpy(layers: Iterable[Layer]) -> dict[str, np.ndarray]:
    """alpha / rank B A of each layer; without alpha B A."""
    expected = {}
    for layer in layers:
        down, up = layer.down.double().numpy(), layer.up.double().numpy()
        strength = 1.0 if layer.alpha is None else layer.alpha / down.shape[0]
        whole = strength * np.tensordot(up.reshape(up.shape[:2]), down, 1)
        for name, rows in zip(layer.names, np.split(whole, len(layer.names)), strict=True):
            expected[f"{layer.part}.{name}"] = rows
    return expected


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        np.testing.assert_allclose(
            found[name], one.reshape(found[name].shape), rtol=1e-4, atol=1e-4, err_msg=name
        )


def layers_of(family: str, pattern: str, *, kind: type = nn.Linear) -> list[Layer]:
    """Layers of all parts that have LoRA, with random matrices."""
    generator = torch.Generator().manual_seed(4)
    layers = []
    for part, module in model_of(family).named_children():
        found = [(name, one) for name, one in module.named_modules() if isinstance(one, kind)]
        for number, (name, inner) in enumerate(found if part not in ("vae", "objective") else ()):
            # Some of the layers, of each kind.
            if number % (7 if len(found) > 60 else 3):
                continue
            rank, alpha = PATTERNS[pattern][len(layers) % len(PATTERNS[pattern])]
            rows, *inside = inner.weight.shape
            down = torch.randn(rank, *inside, generator=generator)
            up = torch.randn(rows, rank, *(1 for _ in inside[1:]), generator=generator)
            layers.append(Layer(part, (name,), down, up, alpha))
    assert layers
    return layers


def tensors_at(place: str, layer: Layer, *, down: str, up: str) -> dict[str, Tensor]:
    tensors = {f"{place}.{down}.weight": layer.down, f"{place}.{up}.weight": layer.up}
    return tensors | ({} if layer.alpha is None else {f"{place}.alpha": torch.tensor(layer.alpha)})


# What a file of a maker has for a layer.


def as_kohya(layer: Layer, family: str) -> dict[str, Tensor]:
    """networks/lora.py of sd-scripts, and LyCORIS."""
    begin = {
        "text_encoder": "lora_te" if family == "sd" else "lora_te1",
        "text_encoder_2": "lora_te3" if family == "flux" else "lora_te2",
        "text_encoder_3": "lora_te3",
    }.get(layer.part, "lora_unet")
    place = f"{begin}_{layer.name.replace('.', '_')}"
    return tensors_at(place, layer, down="lora_down", up="lora_up")


def as_locon_with_window(layer: Layer, family: str) -> dict[str, Tensor]:
    """LyCORIS with a matrix for the window, when the convolution has one."""
    tensors = as_kohya(layer, family)
    rank, width, *window = layer.down.shape
    if window == [3, 3]:
        (name,) = (name for name in tensors if "lora_down" in name)
        # A' (rank, in) and the middle (rank, rank, 3, 3), whose product is A.
        narrow = torch.randn(rank, width, generator=torch.Generator().manual_seed(width))
        middle = torch.randn(rank, rank, 3, 3, generator=torch.Generator().manual_seed(rank))
        layer.down.copy_(torch.einsum("rsyx,si->riyx", middle, narrow))
        tensors[name] = narrow[..., None, None]
        tensors[name.replace("lora_down", "lora_mid")] = middle
    return tensors


def as_peft(layer: Layer, family: str) -> dict[str, Tensor]:
    """diffusers' scripts today, ai-toolkit and others; some have tensors of alpha."""
    return tensors_at(f"{layer.part}.{layer.name}", layer, down="lora_A", up="lora_B")


def as_diffusers(layer: Layer, family: str) -> dict[str, Tensor]:
    """diffusers' scripts of 2024, whose denoisers and text encoders differ."""
    kind = "lora_linear_layer" if layer.part.startswith("text") else "lora"
    place = f"{layer.part}.{layer.name}"
    return tensors_at(place, layer, down=f"{kind}.down", up=f"{kind}.up")


def as_comfy(layer: Layer, family: str) -> dict[str, Tensor]:
    """ComfyUI's names before the layers."""
    encoder = {
        "text_encoder": "clip_l",
        "text_encoder_2": "t5xxl" if family == "flux" else "clip_g",
        "text_encoder_3": "t5xxl",
    }.get(layer.part)
    begin = f"text_encoders.{encoder}.transformer" if encoder else "diffusion_model"
    return tensors_at(f"{begin}.{layer.name}", layer, down="lora_down", up="lora_up")


MAKERS: dict[str, Callable[[Layer, str], dict[str, Tensor]]] = {
    "kohya": as_kohya,
    "PEFT": as_peft,
    "diffusers": as_diffusers,
    "ComfyUI": as_comfy,
}


def written(path: Path, tensors: dict[str, Tensor], **metadata: str) -> LoraFile:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt", **metadata})
    return LoraFile(str(path))


def made_by(maker: Callable, layers: Iterable[Layer], family: str, path: Path) -> LoraFile:
    return written(path, {n: t for one in layers for n, t in maker(one, family).items()})


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_has_its_own_strength(family, maker, pattern, tmp_path) -> None:
    layers = layers_of(family, pattern)
    file = made_by(MAKERS[maker], layers, family, tmp_path / "lora.safetensors")
    assert_same(added(family, [file]), by_numpy(layers))


@pytest.mark.parametrize("maker", [as_kohya, as_locon_with_window, as_peft])
@pytest.mark.parametrize("pattern", ["ranks and alphas", "alpha in some"])
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_convolutions_have_their_own_strength(family, pattern, maker, tmp_path) -> None:
    layers = layers_of(family, pattern, kind=nn.Conv2d)
    file = made_by(maker, layers, family, tmp_path / "locon.safetensors")
    assert {len(layer.down.shape) for layer in layers} == {4}
    assert_same(added(family, [file]), by_numpy(layers))


# What kohya's files of SDXL, SD3 and Flux.1 call some layers, as the models' authors do. Several of
# ours are one of theirs, and of some the first half of the rows is the second half of ours.
ORIGINAL = {
    "sdxl": {
        "input_blocks.0.0": "conv_in",
        "input_blocks.3.1.transformer_blocks.0.attn1.to_q": (
            "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
        ),
        "middle_block.1.transformer_blocks.1.ff.net.0.proj": (
            "mid_block.attentions.0.transformer_blocks.1.ff.net.0.proj"
        ),
        "middle_block.2.out_layers.3": "mid_block.resnets.1.conv2",
        "input_blocks.2.0.op": "down_blocks.0.downsamplers.0.conv",
        "output_blocks.1.2.conv": "up_blocks.0.upsamplers.0.conv",
        "output_blocks.5.0.emb_layers.1": "up_blocks.2.resnets.1.time_emb_proj",
        "label_emb.0.2": "add_embedding.linear_2",
        "time_embed.0": "time_embedding.linear_1",
        "out.2": "conv_out",
    },
    "sd3": {
        "joint_blocks.0.x_block.attn.qkv": (
            "transformer_blocks.0.attn.to_q transformer_blocks.0.attn.to_k "
            "transformer_blocks.0.attn.to_v"
        ),
        "joint_blocks.1.context_block.attn.qkv": (
            "transformer_blocks.1.attn.add_q_proj transformer_blocks.1.attn.add_k_proj "
            "transformer_blocks.1.attn.add_v_proj"
        ),
        "joint_blocks.0.context_block.adaLN_modulation.1": (
            "transformer_blocks.0.norm1_context.linear"
        ),
        "joint_blocks.1.context_block.adaLN_modulation.1": (
            "halves transformer_blocks.1.norm1_context.linear"
        ),
        "final_layer.adaLN_modulation.1": "halves norm_out.linear",
    },
    "flux": {
        "double_blocks.1.txt_attn.qkv": (
            "transformer_blocks.1.attn.add_q_proj transformer_blocks.1.attn.add_k_proj "
            "transformer_blocks.1.attn.add_v_proj"
        ),
        "single_blocks.1.linear1": (
            "single_transformer_blocks.1.attn.to_q single_transformer_blocks.1.attn.to_k "
            "single_transformer_blocks.1.attn.to_v single_transformer_blocks.1.proj_mlp"
        ),
        "single_blocks.0.linear2": "single_transformer_blocks.0.proj_out",
        "double_blocks.0.processor.proj_lora2": "transformer_blocks.0.attn.to_add_out",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "txt_in": "context_embedder",
        "final_layer.adaLN_modulation.1": "halves norm_out.linear",
    },
}


@pytest.mark.parametrize("begin", ["lora_unet_", "diffusion_model."])
@pytest.mark.parametrize("family", ORIGINAL)
def test_layers_by_the_names_of_the_authors_get_their_rows(family, begin, tmp_path) -> None:
    generator = torch.Generator().manual_seed(9)
    denoiser = architecture_of(family).family.denoiser
    module = model_of(family).get_submodule(denoiser)
    tensors, expected = {}, {}
    for number, (original, ours) in enumerate(ORIGINAL[family].items()):
        names = ours.removeprefix("halves ").split()
        weights = [module.get_submodule(name).weight for name in names]
        rank, alpha = PATTERNS["ranks and alphas"][number % 3]
        down = torch.randn(rank, *weights[0].shape[1:], generator=generator)
        up = torch.randn(sum(map(len, weights)), rank, generator=generator)
        place = begin + (original if begin.endswith(".") else original.replace(".", "_"))
        tensors[f"{place}.lora_down.weight"] = down
        tensors[f"{place}.lora_up.weight"] = up.view(*up.shape, *(1 for _ in down.shape[2:]))
        tensors[f"{place}.alpha"] = torch.tensor(alpha)
        whole = alpha / rank * np.tensordot(up.numpy(), down.numpy(), 1)
        if ours.startswith("halves "):
            whole = np.concatenate([whole[len(whole) // 2 :], whole[: len(whole) // 2]])
        first = 0
        for name, weight in zip(names, weights, strict=True):
            expected[f"{denoiser}.{name}"] = whole[first : first + len(weight)]
            first += len(weight)
    assert_same(added(family, [written(tmp_path / "file.safetensors", tensors)]), expected)


class _Checkpoint(dict[str, Tensor]):
    """A checkpoint that has something for each name, as the converters of diffusers want it."""

    def pop(self, name: str) -> Tensor:
        return super().pop(name, torch.zeros(6))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_the_authors_are_those_that_diffusers_converts(family) -> None:
    """For each name of the whole table, by the converters of diffusers for checkpoints."""
    architecture = architecture_of(family)
    denoiser = architecture.family.denoiser
    layers = [
        name
        for name, inner in make_part(denoiser, architecture).named_modules()
        if isinstance(inner, (nn.Linear, nn.Conv2d))
    ]
    originals = architecture.family.original_names(layers)
    # The converter of Flux.1 has the widths of the published models.
    numbers = {
        layer: torch.full((12288 if layer.endswith("proj_mlp") else 3072, 1), float(number))
        for number, layer in enumerate(layers)
    }
    checkpoint = _Checkpoint(
        {
            f"{name}.{kind}": torch.cat([numbers[layer] for layer in some])
            for name, some in originals.items()
            for kind in ("weight", "bias")
            if "processor" not in name
        }
    )
    if family in ("sd", "sdxl"):
        whole = {f"model.diffusion_model.{name}": one for name, one in checkpoint.items()}
        config = architecture.parts["unet"]
        converted = single_file_utils.convert_ldm_unet_checkpoint(whole, config)
    else:
        checkpoint |= {"context_embedder.weight": numbers["context_embedder"]}
        convert = f"convert_{family}_transformer_checkpoint_to_diffusers"
        converted = getattr(single_file_utils, convert)(checkpoint)
    named = {layer for some in originals.values() for layer in some}
    assert named == set(layers) - ({"context_embedder"} if family == "sd3" else set())
    for layer in named:
        assert torch.equal(converted[f"{layer}.weight"], numbers[layer]), layer


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_files_of_diffusers_of_2023_have_layers_by_the_names_of_processors(family, tmp_path):
    layers = [
        layer
        for layer in layers_of(family, "ranks, no alpha")
        if layer.name.endswith(("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "out_proj"))
    ]
    tensors = {}
    for part, (name,), down, up, _ in layers:
        place, _, last = name.replace("to_out.0", "to_out").rpartition(".")
        last = "to_" + last.removeprefix("to_").removesuffix("_proj")
        between = "" if part.startswith("text") else ".processor"
        tensors[f"{part}.{place}{between}.{last}_lora.down.weight"] = down
        tensors[f"{part}.{place}{between}.{last}_lora.up.weight"] = up
    assert {layer.part for layer in layers} >= {"unet", "text_encoder"}
    assert_same(added(family, [written(tmp_path / "old.safetensors", tensors)]), by_numpy(layers))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_alpha_may_be_in_the_configuration_of_peft_in_the_file_or_beside_it(use_rslora, tmp_path):
    layers = [layer for layer in layers_of("sd", "ranks, no alpha") if layer.part == "unet"]
    config = {"lora_alpha": 3.0, "alpha_pattern": {}, "r": 4, "use_rslora": use_rslora}
    known = []
    for number, layer in enumerate(layers):
        alpha = 3.0
        if number % 2:
            alpha = config["alpha_pattern"][layer.name] = 1.0 + number
        rank = len(layer.down)
        # By rslora (arXiv 2312.03732) alpha is divided by the root of the rank.
        known.append(layer._replace(alpha=alpha * math.sqrt(rank) if use_rslora else alpha))
    tensors = {n: t for one in layers for n, t in as_peft(one, "sd").items()}
    said = json.dumps({f"unet.{name}": value for name, value in config.items()})
    inside = written(tmp_path / "inside.safetensors", tensors, lora_adapter_metadata=said)
    assert_same(added("sd", [inside]), by_numpy(known))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    by_peft = {name.replace("unet.", "base_model.model.", 1): one for name, one in tensors.items()}
    beside = written(tmp_path / "adapter_model.safetensors", by_peft)
    assert_same(added("sd", [beside]), by_numpy(known))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_matrices_of_few_bits_are_multiplied_in_fp32(dtype, tmp_path) -> None:
    layers = [
        layer._replace(down=layer.down.to(dtype).float(), up=layer.up.to(dtype).float())
        for layer in layers_of("sd", "ranks and alphas")
    ]
    tensors = {n: t.to(dtype) for one in layers for n, t in as_peft(one, "sd").items()}
    assert_same(added("sd", [written(tmp_path / "few.safetensors", tensors)]), by_numpy(layers))


def test_files_are_added_by_their_shares(tmp_path) -> None:
    layers = layers_of("sd", "ranks and alphas")
    file = made_by(as_kohya, layers, "sd", tmp_path / "lora.safetensors")
    whole = by_numpy(layers)
    found = added("sd", [LoraFile(file.path, 0.25), LoraFile(file.path, -1.0)])
    assert_same(found, {name: -0.75 * one for name, one in whole.items()})


def test_a_file_may_name_text_encoder_layers_as_either_transformers(tmp_path) -> None:
    """transformers 5.6 and later have no level `text_model.`, and so have files made with it."""
    layers = [one for one in layers_of("sd", "ranks and alphas") if one.part == "text_encoder"]
    hub = {name: one for layer in layers for name, one in as_peft(layer, "sd").items()}
    other = {name.replace(".text_model.", "."): one for name, one in hub.items()}
    assert other.keys().isdisjoint(hub)
    for number, tensors in enumerate((hub, other)):
        file = written(tmp_path / f"{number}.safetensors", tensors)
        assert_same(added("sd", [file]), by_numpy(layers))


def _without(tensors: dict[str, Tensor], ending: str) -> dict[str, Tensor]:
    return {name: one for name, one in tensors.items() if not name.endswith(ending)}


PLACE = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
BAD_FILES: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "no tensors": ("there are none", lambda tensors: {}),
    "other weights": ("conv_in.weight", lambda tensors: {"conv_in.weight": torch.zeros(1)}),
    "a layer more": (
        "up_blocks_9",
        lambda tensors: tensors | {"lora_unet_up_blocks_9_to_q.lora_up.weight": torch.zeros(1)},
    ),
    "DoRA": ("dora_scale", lambda tensors: tensors | {f"{PLACE}.dora_scale": torch.ones(48)}),
    "LoHa": ("hada_w1_a", lambda tensors: tensors | {f"{PLACE}.hada_w1_a": torch.ones(48)}),
    "no B": ("no up", lambda tensors: _without(tensors, "lora_up.weight")),
    "alpha alone": ("no ", lambda tensors: tensors | {f"{PLACE[:-1]}k.alpha": torch.ones(())}),
    "twice": (
        "twice",
        lambda tensors: (
            tensors
            | {
                "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight": (
                    torch.zeros(2, 48)
                )
            }
        ),
    ),
    "not finite": (
        "not finite",
        lambda tensors: tensors | {f"{PLACE}.lora_up.weight": torch.full((48, 4), math.nan)},
    ),
    "zeros where its download has not come": (
        "zeros alone",
        lambda tensors: tensors | {f"{PLACE}.lora_down.weight": torch.zeros(4, 48)},
    ),
    "wider": (
        "(48, 48) and not (48, 47)",
        lambda tensors: tensors | {f"{PLACE}.lora_down.weight": torch.zeros(4, 47)},
    ),
    "ranks that differ": (
        "rank 3",
        lambda tensors: tensors | {f"{PLACE}.lora_down.weight": torch.zeros(3, 48)},
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_what_is_no_whole_lora_of_the_model_is_refused_and_says_why(case, tmp_path) -> None:
    good = {f"{PLACE}.lora_down.weight": torch.ones(4, 48), f"{PLACE}.alpha": torch.ones(())}
    good[f"{PLACE}.lora_up.weight"] = torch.ones(48, 4)
    check_lora_files([written(tmp_path / "good.safetensors", good)], architecture_of("sd"))
    said, change = BAD_FILES[case]
    file = written(tmp_path / "bad.safetensors", change(good))
    with refused("--lora", value=file.path) as caught:
        check_lora_files([file], architecture_of("sd"))
    assert said in caught.value.what


def test_a_file_that_is_missing_or_of_another_model_is_refused(tmp_path) -> None:
    layers = layers_of("sdxl", "ranks, no alpha")
    file = made_by(as_kohya, layers, "sdxl", tmp_path / "xl.safetensors")
    for path, architecture in ((file.path, "sd"), (str(tmp_path / "missing"), "sdxl")):
        with refused("--lora", value=path):
            check_lora_files([LoraFile(path)], architecture_of(architecture))


# Lists of layers of diffusers' training scripts, and others that were read in part or not at all.
ATTENTION = "to_k to_q to_v to_out.0"
JOINT = "attn.add_k_proj attn.add_q_proj attn.add_v_proj attn.to_add_out attn.to_k attn.to_out.0"
JOINT += " attn.to_q attn.to_v"
EXPORTS = {
    "sd-default": ("sd", ATTENTION, "q_proj k_proj v_proj out_proj"),
    "sd-mlp-of-text": ("sd", f"{ATTENTION} proj_in proj_out", "fc1 fc2"),
    "sd-no-attention": ("sd", "linear_1 time_emb_proj ff.net.2", "q_proj fc1"),
    "sdxl-default": ("sdxl", ATTENTION, ""),
    "sdxl-more": ("sdxl", f"{ATTENTION} proj_in ff.net.0.proj linear_2", ""),
    "sd3-default": ("sd3", JOINT, ""),
    "sd3-more": ("sd3", "add_k_proj proj_out context_embedder norm1.linear norm_out.linear", ""),
    "flux-default": (
        "flux",
        f"{JOINT} ff.net.0.proj ff.net.2 ff_context.net.0.proj ff_context.net.2",
        "",
    ),
    "flux-more": ("flux", "x_embedder context_embedder proj_mlp proj_out norm.linear linear_1", ""),
    "flux-one-name": ("flux", "transformer_blocks.1.attn.to_q", ""),
}
SLOW_EXPORTS = ("sd-default", "sdxl-default")


def trained_lora(family: str, layers: str, text_layers: str) -> tuple[Lora, dict[str, Tensor]]:
    """A LoRA with these lists, and random matrices by the names in a checkpoint."""
    architecture = architecture_of(family)
    parts = {architecture.family.denoiser: layers, "text_encoder": text_layers}
    lists = tuple((part, tuple(some.split())) for part, some in parts.items() if some)
    lora = Lora(rank=3, alpha=7.0, layers=lists)
    modules = {part: make_part(part, architecture) for part, _ in lists}
    lora.add_to(modules, seed=None)
    generator = torch.Generator().manual_seed(6)
    weights = {
        f"{part}.{name}": torch.randn(weight.shape, generator=generator)
        for part, module in modules.items()
        for name, weight in module.named_parameters()
    }
    return lora, {name: weight for name, weight in weights.items() if is_lora(name)}


def by_diffusers(family: str, folder: Path) -> dict[str, np.ndarray]:
    """What diffusers' pipeline adds to weights that are zero, by those that have changed."""
    architecture = architecture_of(family)
    parts = {
        part: make_part(part, architecture).to_empty(device="cpu")
        for part in (architecture.family.denoiser, *architecture.text_encoders)
    }
    for part in parts.values():
        for weight in part.parameters():
            weight.detach().zero_()
    sampler = make_sampler(None, architecture.parts["scheduler"])
    pipeline = make_pipeline(architecture, parts, sampler=sampler)
    pipeline.load_lora_weights(folder, weight_name=DIFFUSERS_NAME)
    pipeline.fuse_lora(pipeline._lora_loadable_modules)
    pipeline.unload_lora_weights()
    return {
        f"{part}.{name.removesuffix('.weight')}": weight.detach().numpy()
        for part, module in parts.items()
        for name, weight in module.named_parameters()
        if weight.any()
    }


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case in SLOW_EXPORTS else ())
        for case in EXPORTS
    ],
)
def test_what_is_written_is_read_by_diffusers_and_here_whatever_the_layers(case, tmp_path):
    family, *lists = EXPORTS[case]
    lora, weights = trained_lora(family, *lists)
    file = tmp_path / DIFFUSERS_NAME
    write_lora(named_for_file(weights, lora), file, architecture=architecture_of(family))
    expected = {
        name.removesuffix(".lora_A.default.weight"): 7
        / 3
        * weights[name.replace("lora_A", "lora_B")].numpy()
        @ down.numpy()
        for name, down in weights.items()
        if "lora_A" in name
    }
    assert len(expected) == len(weights) / 2 > 0
    with safe_open(file, "pt") as stored:
        # Readers that know no metadata have the strength too.
        assert stored.metadata() == {"format": "pt"}
    assert_same(added(family, [LoraFile(str(file))]), expected)
    assert_same(by_diffusers(family, tmp_path), expected)
    namings = {name.rpartition(".lora_")[2] for name in load_file(file)}
    if case != "sd-mlp-of-text":  # diffusers reads no PEFT's names there
        assert namings == {"A.weight", "B.weight"}


@pytest.mark.parametrize(
    ("reader", "spoilt"),
    [
        ("this suite", lambda tensors: dict(list(tensors.items())[2:])),
        ("this suite", lambda tensors: {name: 1.5 * one for name, one in tensors.items()}),
        # As names were mixed, of which diffusers reads one kind without a word.
        (
            "diffusers",
            lambda tensors: {
                name.replace("to_q.lora_A", "to_q.lora.down").replace(
                    "to_q.lora_B", "to_q.lora.up"
                ): one
                for name, one in tensors.items()
            },
        ),
    ],
    ids=["a layer is lost", "other numbers", "two namings"],
)
def test_a_file_that_is_not_read_as_it_was_written_is_an_error(
    reader, spoilt, monkeypatch, tmp_path
) -> None:
    architecture = architecture_of("sd3")
    lora, weights = trained_lora("sd3", "attn.to_q add_k_proj", "")

    def save(tensors, file, metadata) -> None:
        save_file(spoilt(tensors), file, metadata=metadata)

    monkeypatch.setattr(lora_files, "save_file", save)
    tensors = named_for_file(weights, lora)
    with pytest.raises(RunError, match=f"{reader} reads"):
        write_lora(tensors, tmp_path / DIFFUSERS_NAME, architecture=architecture)
