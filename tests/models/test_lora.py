"""LoRA beside frozen weights: what it computes, and what it is drawn from."""

from __future__ import annotations

import pytest
import torch

from sdbench.models.architecture import resolve_architecture
from sdbench.models.components import make_part
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.lora import Lora, is_lora
from sdbench.models.weights import Weights
from tests.refusals import refused

TINY = resolve_architecture("tiny")
UNET_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
LORA = Lora(
    rank=4,
    alpha=6.0,
    layers=(("unet", UNET_LAYERS), ("text_encoder", ("q_proj", "k_proj", "v_proj", "out_proj"))),
)
IDS = torch.tensor([[49406, *range(300, 375), 49407]])


def build(lora: Lora | None = None) -> DiffusionModel:
    options = {"attention": "eager", "trained": ("unet", "text_encoder"), "lora": lora}
    return build_model(TINY, seed=3, **options).eval()


@torch.no_grad()
def outputs(model) -> torch.Tensor:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    return model.unet(latents, torch.tensor([500]), model.text_encoder(IDS)[0]).sample


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
