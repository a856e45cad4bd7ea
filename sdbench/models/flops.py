"""Counts the FLOPs of training on one image.

They are counted on the meta device, where attention is two matrix products. For fused attention
torch's counter gives zero on a CPU; on a GPU it includes the recomputation of flash attention in
the backward pass, which is not work of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from sdbench.models.architecture import Architecture
from sdbench.models.components import PARTS, make_part
from sdbench.models.learned_token import add_learned_token
from sdbench.models.lora import Lora


class FlopsPerImage(NamedTuple):
    """Floating-point operations for one image; a multiply-add counts as two.

    Those of the text encoder include its backward pass if it is trained.
    """

    unet_forward_backward: int
    vae_encode: int
    text_encode: int


@functools.cache  # counting takes about a second
def count_flops(
    architecture: Architecture,
    *,
    image_size: int,
    trained: Sequence[str] = ("unet",),
    lora: Lora | None = None,
    learns_token: bool = False,
) -> FlopsPerImage:
    """Count matrix products and convolutions of one image, without computing them.

    The arguments are those of `replay.Step`; weights without gradients take no work for these.
    """
    latent_size = image_size // architecture.latent_factor
    num_tokens = architecture.text_encoder["max_position_embeddings"]
    width = architecture.unet["cross_attention_dim"]
    unet, vae, text_encoder = (make_part(part, architecture) for part in PARTS)
    if lora is not None:
        lora.add_to({"unet": unet, "text_encoder": text_encoder}, seed=None)
    if learns_token:
        unet.requires_grad_(False)
        add_learned_token(text_encoder, initial_id=0)
    trains_text = "text_encoder" in trained
    with torch.device("meta"):
        image = torch.empty(1, architecture.vae["in_channels"], image_size, image_size)
        ids = torch.empty(1, num_tokens, dtype=torch.int64)
        latent = torch.empty(1, architecture.unet["in_channels"], latent_size, latent_size)
        text_states = torch.empty(1, num_tokens, width, requires_grad=trains_text)
        timestep = torch.empty(1, dtype=torch.int64)
        flops = FlopsPerImage(
            unet_forward_backward=_count(
                lambda: unet(latent, timestep, text_states).sample.sum().backward()
            ),
            vae_encode=_count(torch.no_grad()(lambda: vae.encode(image))),
            text_encode=_count(
                (lambda: text_encoder(ids)[0].sum().backward())
                if trains_text
                else torch.no_grad()(lambda: text_encoder(ids))
            ),
        )
    return flops


@functools.cache
def count_vae_flops(architecture: Architecture, *, image_size: int) -> int:
    """Count the operations of training the VAE on one image, as `count_flops`."""
    vae = make_part("vae", architecture)
    with torch.device("meta"):
        image = torch.empty(1, architecture.vae["in_channels"], image_size, image_size)
        return _count(lambda: vae(image).sample.sum().backward())


def _count(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()
