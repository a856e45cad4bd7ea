"""LoRA beside frozen weights: what it computes, what it is drawn from, and its files."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdbench.models.architecture import resolve_architecture
from sdbench.models.components import make_part
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.lora import Lora, is_lora
from sdbench.models.lora_files import (
    check_lora_files,
    fuse_lora_files,
    lora_weights,
    write_for_diffusers,
)
from sdbench.models.weights import Weights
from sdbench.settings.lora import LoraFile
from tests.refusals import refused

TINY = resolve_architecture("tiny")
UNET_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
LORA = Lora(
    rank=4,
    alpha=6.0,
    layers=(("unet", UNET_LAYERS), ("text_encoder", ("q_proj", "k_proj", "v_proj", "out_proj"))),
)
Q_PROJ = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.weight"
IDS = torch.tensor([[49406, *range(300, 375), 49407]])


def build(lora: Lora | None = None) -> DiffusionModel:
    options = {"attention": "eager", "trained": ("unet", "text_encoder"), "lora": lora}
    return build_model(TINY, seed=3, **options).eval()


@pytest.fixture(scope="module")
def trained() -> DiffusionModel:
    """As training leaves it: B is not zero any more."""
    model, generator = build(LORA), torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


@torch.no_grad()
def outputs(model) -> torch.Tensor:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    return model.unet(latents, torch.tensor([500]), model.text_encoder(IDS)[0]).sample


def write_for_kohya(weights, path: Path, *, lora: Lora) -> None:
    """As networks/lora.py of kohya's sd-scripts writes a file."""
    stored = {}
    for part, prefix in (("unet", "lora_unet_"), ("text_encoder", "lora_te_")):
        for name, weight in weights[part].items():
            layer, _, matrix = name.removesuffix(".weight").rpartition(".")
            place = prefix + layer.replace(".", "_")
            direction = {"lora_A": "lora_down", "lora_B": "lora_up"}[matrix]
            stored[f"{place}.{direction}.weight"] = weight
            stored[f"{place}.alpha"] = torch.tensor(lora.alpha)
    save_file(stored, path, metadata={"format": "pt"})


@pytest.fixture(
    params=[functools.partial(write_for_diffusers, family=TINY.family), write_for_kohya],
    ids=["diffusers", "kohya"],
)
def file(request, trained, tmp_path) -> LoraFile:
    stored = {name: weight for name, weight in weights_of(trained).items() if is_lora(name)}
    path = tmp_path / "lora.safetensors"
    request.param(lora_weights(stored, LORA), path, lora=LORA)
    return LoraFile(str(path))


@pytest.mark.slow
def test_it_begins_as_the_model_and_draws_nothing_of_the_callers() -> None:
    state = torch.get_rng_state()
    plain, with_lora = build(), build(LORA)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(outputs(with_lora), outputs(plain))
    free = [name for name, weight in with_lora.named_parameters() if weight.requires_grad]
    assert free and all(map(is_lora, free))


def test_it_is_in_fp32_and_the_same_beside_weights_of_any_type() -> None:
    drawn = {}
    for dtype in (torch.float32, torch.bfloat16):
        unet = make_part("unet", TINY, weights=Weights(seed=1, dtype=dtype))
        Lora(4, 4.0, (("unet", UNET_LAYERS),)).add_to({"unet": unet}, seed=0)
        assert unet.dtype == dtype
        latents = torch.zeros(1, 4, 8, 8, dtype=dtype)
        states = torch.zeros(1, 77, TINY.parts["unet"]["cross_attention_dim"], dtype=dtype)
        assert unet(latents, torch.tensor([5]), states).sample.dtype == dtype
        drawn[dtype] = {n: w.detach() for n, w in unet.named_parameters() if w.requires_grad}
    fp32, beside_bf16 = drawn.values()
    assert fp32.keys() == beside_bf16.keys()
    assert all(torch.equal(fp32[name], beside_bf16[name]) for name in fp32)
    # As peft draws it: uniform up to 1 / sqrt(width).
    first = fp32["mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.default.weight"]
    limit = first.shape[1] ** -0.5
    assert 0.9 * limit < first.abs().max() <= limit


@pytest.mark.parametrize("layer", ["nope", "conv1", "o_q"])
def test_a_name_of_no_linear_layer_is_refused(layer) -> None:
    with refused("--lora_layers", value=layer):
        lora = Lora(4, 4.0, (("unet", ("to_q", layer)),))
        lora.add_to({"unet": make_part("unet", TINY)}, seed=None)


def added_by_hand(weights: dict, trained: DiffusionModel) -> dict:
    """The weights of a model with alpha / rank B A of what was trained added to them."""
    of = weights_of(trained)
    total = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if (down := of.get(f"{layer}.lora_A.default.weight")) is not None:
            weight = weight + 6.0 / 4 * of[f"{layer}.lora_B.default.weight"] @ down
        total[name] = weight
    return total


@pytest.mark.slow
def test_a_file_is_added_to_the_weights_by_its_share_and_files_add_up(trained, file) -> None:
    plain = weights_of(build())
    whole = added_by_hand(plain, trained)
    num_changed = sum(not torch.equal(whole[name], plain[name]) for name in plain)
    assert num_changed == 80 + 8
    for shares in ((0.5,), (0.25, -1.0)):
        model = build()
        fuse_lora_files(model, [LoraFile(file.path, share) for share in shares])
        fused = weights_of(model)
        assert fused.keys() == plain.keys()
        for name, weight in plain.items():
            expected = weight + sum(shares) * (whole[name] - weight)
            torch.testing.assert_close(fused[name], expected, msg=name)


def test_a_file_may_name_text_encoder_layers_as_either_transformers(trained, tmp_path) -> None:
    """transformers 5.6 and later have no level `text_model.`, and so have files made with it."""
    stored = {name: weight for name, weight in weights_of(trained).items() if is_lora(name)}
    hub, other = tmp_path / "hub.safetensors", tmp_path / "other.safetensors"
    write_for_diffusers(lora_weights(stored, LORA), hub, lora=LORA, family=TINY.family)
    with safe_open(hub, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(hub)
    renamed = {
        name.replace("text_encoder.text_model.", "text_encoder."): tensor
        for name, tensor in tensors.items()
    }
    # 2 layers with 4 projections, each with A and B.
    assert len(renamed.keys() - tensors.keys()) == len(tensors.keys() - renamed.keys()) == 2 * 4 * 2
    save_file(renamed, other, metadata=metadata)
    fused = []
    for file in (hub, other):
        check_lora_files([LoraFile(str(file))], TINY)
        model = build()
        fuse_lora_files(model, [LoraFile(str(file))])
        fused.append(weights_of(model))
    plain = weights_of(build())
    assert all(torch.equal(fused[0][name], weight) for name, weight in fused[1].items())
    assert not torch.equal(fused[0][Q_PROJ], plain[Q_PROJ])


@pytest.mark.slow
def test_a_file_that_is_no_lora_of_the_model_is_refused(file, tmp_path) -> None:
    check_lora_files([file], TINY)
    with refused("--lora", value=file.path):
        check_lora_files([file], resolve_architecture("mini"))
    tensors, metadata = load_file(file.path), {"format": "pt"}
    # A layer that the model has not: diffusers would leave it out.
    more = {re.sub("(up_blocks.)3", r"\g<1>9", name): one.clone() for name, one in tensors.items()}
    assert more.keys() != tensors.keys()
    for name, content in (
        ("missing", None),
        ("weights", {"conv_in.weight": torch.zeros(1)}),
        ("more", tensors | more),
        ("dora", tensors | {"lora_unet_conv_in.dora_scale": torch.ones(1)}),
        ("half", {name: tensor for name, tensor in tensors.items() if "up.weight" not in name}),
    ):
        path = tmp_path / f"{name}.safetensors"
        if content is not None:
            save_file(content, path, metadata=metadata)
        with refused("--lora", value=str(path)):
            check_lora_files([LoraFile(str(path))], TINY)


@pytest.mark.slow
def test_a_file_for_both_text_encoders_of_sdxl_is_added_to_their_weights(tmp_path) -> None:
    architecture = resolve_architecture("tiny-sdxl")
    text_layers = ("q_proj", "v_proj")
    layers = (("unet", ("to_q",)), ("text_encoder", text_layers), ("text_encoder_2", text_layers))
    lora = Lora(rank=2, alpha=6.0, layers=layers)
    trained = build_model(architecture, seed=3)
    lora.add_to({part: trained.get_submodule(part) for part, _ in layers}, seed=1)
    stored = {name: weight.detach() for name, weight in trained.named_parameters() if is_lora(name)}
    for name, weight in stored.items():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    file = tmp_path / "lora.safetensors"
    write_for_diffusers(lora_weights(stored, lora), file, lora=lora, family=architecture.family)
    check_lora_files([LoraFile(str(file))], architecture)
    fused = build_model(architecture, seed=3)
    plain = {name: weight.clone() for name, weight in weights_of(fused).items()}
    fuse_lora_files(fused, [LoraFile(str(file))])
    changed = set()
    for name, weight in weights_of(fused).items():
        layer = name.removesuffix(".weight")
        change = torch.zeros(())
        if (down := stored.get(f"{layer}.lora_A.default.weight")) is not None:
            change = 6.0 / 2 * stored[f"{layer}.lora_B.default.weight"] @ down
            changed.add(name.partition(".")[0])
        torch.testing.assert_close(weight, plain[name] + change, msg=name)
    assert changed == {"unet", "text_encoder", "text_encoder_2"}
