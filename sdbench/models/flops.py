"""`count_flops` counts the FLOPs of training on one image.

They are counted on the meta device, where attention is two matrix products. For fused attention
torch's counter gives zero on a CPU; on a GPU it includes the recomputation of flash attention in
the backward pass, which is not work of the model.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from sdbench.models.replay import Step, build_model, make_batch


@functools.cache  # counting takes about a second
def count_flops(step: Step) -> int:
    """Count matrix products and convolutions of a step on one image, without computing them.

    A multiply-add counts as two. Neither number formats, kernels nor recomputation change the
    count; weights without gradients take no work for these.
    """
    plain = dataclasses.replace(
        step,
        **{"precision": "fp32", "encoder_dtype": "fp32", "activation_checkpointing": "none"},
        **{"attention": "sdpa", "vae_attention": "sdpa", "on_cuda": False},
    )
    model = build_model(plain, device="meta")
    with torch.device("meta"):
        batch = make_batch(plain, num_images=1)
    with FlopCounterMode(display=False) as counter:
        model.loss(*model(batch)).backward()
    return counter.get_total_flops()
