"""One training step of SDXL, SD3 and Flux.1, written from papers and diffusers' training scripts.

An independent reference for tests: it calls the modules of diffusers and transformers, and nothing
of `sdbench.models`. Each function takes latents that are scaled and shifted. The sources:

- SDXL: arXiv 2307.01952, examples/text_to_image/train_text_to_image_sdxl.py of diffusers
- SD3: arXiv 2403.03206, examples/dreambooth/train_dreambooth_sd3.py
- Flux.1: examples/dreambooth/train_dreambooth_flux.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

END_OF_TEXT = 49407


def sdxl_loss(
    modules: Mapping[str, nn.Module],
    *,
    latents: Tensor,
    noise: Tensor,
    steps: Sequence[int],
    ids: Sequence[Tensor],
    sizes: Tensor,
) -> Tensor:
    """The U-Net predicts the noise that was mixed in at `steps` of SD's schedule."""
    states_1, _ = clip_states(modules["text_encoder"], ids[0])
    states_2, last = clip_states(modules["text_encoder_2"], ids[1])
    # Root of the variance is linear.
    betas = np.linspace(np.sqrt(0.00085), np.sqrt(0.012), 1000) ** 2
    signal = torch.tensor(np.cumprod(1.0 - betas)[list(steps)], dtype=torch.float32)
    signal = signal[:, None, None, None]
    predicted = modules["unet"](
        sample=torch.sqrt(signal) * latents + torch.sqrt(1.0 - signal) * noise,
        timestep=torch.tensor(steps),
        encoder_hidden_states=torch.cat((states_1, states_2), 2),
        added_cond_kwargs={
            "text_embeds": project_end(modules["text_encoder_2"], last, ids[1]),
            "time_ids": sizes,
        },
        return_dict=False,
    )[0]
    return torch.mean((predicted - noise) ** 2)


def sd3_loss(
    modules: Mapping[str, nn.Module],
    *,
    latents: Tensor,
    noise: Tensor,
    shares: Tensor,
    ids: Sequence[Tensor],
) -> Tensor:
    """The transformer predicts the way from the latents to the noise; `shares` (B,) of noise."""
    clips = ("text_encoder", "text_encoder_2")
    states, pooled = [], []
    for name, of_encoder in zip(clips, ids[:2], strict=True):
        before_last, last = clip_states(modules[name], of_encoder)
        states.append(before_last)
        pooled.append(project_end(modules[name], last, of_encoder))
    t5 = modules["text_encoder_3"].encoder(ids[2])[0]
    num_captions, num_tokens, width = t5.shape
    text = torch.zeros(num_captions, 77 + num_tokens, width)
    first_width, second_width = states[0].shape[2], states[1].shape[2]
    text[:, :77, :first_width] = states[0]
    text[:, :77, first_width : first_width + second_width] = states[1]
    text[:, 77:] = t5
    share = shares.reshape(-1, 1, 1, 1)
    predicted = modules["transformer"](
        hidden_states=latents + share * (noise - latents),
        encoder_hidden_states=text,
        pooled_projections=torch.cat(pooled, 1),
        timestep=1000 * shares,
        return_dict=False,
    )[0]
    return torch.mean((predicted - (noise - latents)) ** 2)


def flux_loss(
    modules: Mapping[str, Any],
    *,
    latents: Tensor,
    noise: Tensor,
    shares: Tensor,
    ids: Sequence[Tensor],
    scale: float | None,
) -> Tensor:
    """As `sd3_loss`, on squares of 2 x 2 latents; dev is told a `scale` of guidance."""
    _, last = clip_states(modules["text_encoder"], ids[0])
    normed = text_model_of(modules["text_encoder"]).final_layer_norm(last)
    pooled = normed[torch.arange(len(last)), ends_of(ids[0])]
    share = shares.reshape(-1, 1, 1, 1)
    predicted = predict_flux(
        modules["transformer"],
        latents + share * (noise - latents),
        shares=shares,
        states=modules["text_encoder_2"].encoder(ids[1])[0],
        pooled=pooled,
        scale=scale,
    )
    return torch.mean((predicted - (noise - latents)) ** 2)


def predict_flux(
    transformer: Any,
    noised: Tensor,
    *,
    shares: Tensor,
    states: Tensor,
    pooled: Tensor,
    scale: float | None = None,
) -> Tensor:
    """The way from latents to noise, as Flux.1 predicts it on squares of 2 x 2 latents."""
    num_rows, num_columns = noised.shape[2] // 2, noised.shape[3] // 2
    places = [[0.0, row, column] for row in range(num_rows) for column in range(num_columns)]
    tokens = transformer(
        # Columns of 4 C numbers, by channel, then by row and column in the square.
        hidden_states=nn.functional.unfold(noised, 2, stride=2).transpose(1, 2),
        encoder_hidden_states=states,
        pooled_projections=pooled,
        timestep=shares,
        img_ids=torch.tensor(places),
        txt_ids=torch.zeros(states.shape[1], 3),
        guidance=None if scale is None else torch.full((len(noised),), scale),
        return_dict=False,
    )[0]
    return nn.functional.fold(tokens.transpose(1, 2), noised.shape[2:], 2, stride=2)


def clip_states(encoder: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the last layer of a CLIP text encoder reads, and what it gives, without a norm."""
    seen: dict[str, Tensor] = {}

    def note(layer: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        seen["read"] = arguments[0]
        seen["given"] = result[0] if isinstance(result, tuple) else result

    hook = text_model_of(encoder).encoder.layers[-1].register_forward_hook(note)
    try:
        encoder(ids)
    finally:
        hook.remove()
    return seen["read"], seen["given"]


def project_end(encoder: Any, last: Tensor, ids: Tensor) -> Tensor:
    """The projected state of the token that ends each caption."""
    normed = text_model_of(encoder).final_layer_norm(last)
    return normed[torch.arange(len(ids)), ends_of(ids)] @ encoder.text_projection.weight.T


def text_model_of(encoder: Any) -> Any:
    """The layers of a CLIP text encoder, which transformers 5 has in the encoder itself."""
    return getattr(encoder, "text_model", encoder)


def ends_of(ids: Tensor) -> Tensor:
    """The place of the first end of text in each caption."""
    return torch.tensor([row.index(END_OF_TEXT) for row in ids.tolist()])
