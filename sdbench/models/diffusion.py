"""`DiffusionModel`: a module that maps a batch to prediction and target, and its construction.

The order of operations follows mosaicml/diffusion-benchmark: encode, draw noise and time steps,
add the noise, predict it (or the velocity), mean squared error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from sdbench.base.conditions import GUIDANCE, SIZES, TEXT_EMBEDDING
from sdbench.base.errors import ConfigError
from sdbench.models.architecture import Architecture
from sdbench.models.components import make_part
from sdbench.models.learned_token import add_learned_token
from sdbench.models.lora import Lora
from sdbench.models.low_bit import LowBitLinear
from sdbench.models.network import Conditions
from sdbench.models.noising import make_objective
from sdbench.models.noising.noising import Noising, draw_noise
from sdbench.models.objective import PLAIN, Objective
from sdbench.models.weights import ENCODER_DTYPES, PRECISIONS, Weights, autocast
from sdbench.settings.training import DENOISER

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# diffusers' DiagonalGaussianDistribution clamps the log-variance so that exp() cannot overflow.
LOGVAR_MIN, LOGVAR_MAX = -30.0, 20.0

# Added to the seed of a model; that of its denoiser is the seed itself, see also `lora`.
SEED_OFFSETS = {"vae": 1, "text_encoder": 2, "text_encoder_2": 5, "text_encoder_3": 6}

# Makes the context around a phase of the step: vae_encode, text_encode or unet_forward.
PhaseObserver = Callable[[str], contextlib.AbstractContextManager[Any]]


class DiffusionModel(nn.Module):
    """A denoiser, and a VAE and text encoders, which are absent for precomputed latents."""

    def __init__(
        self,
        architecture: Architecture,
        parts: Mapping[str, nn.Module | None],
        *,
        objective: Noising,
        weights_dtype: torch.dtype,
        autocast_dtype: torch.dtype | None,
        memory_format: torch.memory_format,
        phase: PhaseObserver = contextlib.nullcontext,
    ) -> None:
        """Join the sub-models, which are named as in the architecture.

        `weights_dtype` is the type of the denoiser's weights; shards of them may be in fp32.
        `autocast_dtype` is the compute type of the denoiser; None: that of its weights. `phase` is
        entered around each sub-model.
        """
        super().__init__()
        self.family = architecture.family
        self.network = self.family.load_network()
        for name, module in parts.items():
            setattr(self, name, module)
        self._text_encoders = architecture.text_encoders
        self._caption_names = [one.name for one in architecture.captions]
        self._condition_names = [one.name for one in architecture.conditions]
        self.latents = architecture.latents
        self.zeroes_empty_prompt = architecture.zeroes_empty_prompt
        self.objective = objective
        self.weights_dtype = weights_dtype
        self.autocast_dtype = autocast_dtype
        self.memory_format = memory_format
        self._phase = phase

    @property
    def denoiser(self) -> Any:
        """The sub-model that predicts."""
        return getattr(self, self.family.denoiser)

    @property
    def input_dtype(self) -> torch.dtype:
        """The type in which the denoiser takes latents and encoded captions."""
        return self.denoiser.dtype if self.network.casts_inputs else self.weights_dtype

    @property
    def text_encoders(self) -> list[nn.Module]:
        """The encoders of captions, in order; empty if captions are encoded elsewhere."""
        found = [getattr(self, name) for name in self._text_encoders]
        return [] if None in found else found

    def drop_encoders(self, *, keeps_text: bool = False) -> None:
        """Free the VAE and, unless the model `keeps_text`, the text encoders."""
        for name in ("vae", *(() if keeps_text else self._text_encoders)):
            setattr(self, name, None)

    def train(self, mode: bool = True) -> DiffusionModel:
        """Set the mode of the trained sub-models; frozen ones stay in evaluation mode."""
        super().train(mode)
        for module in self.children():
            if not _is_trained(module):
                module.eval()
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Noise the batch's latents and predict what the objective asks for.

        Args:
            batch: `image` (B, 3, H, W), uint8 in 0..255 or float in [-1, 1], and token ids (B, N)
                for each text encoder, `input_ids` for the first; or `latent` (B, C, H/8, W/8),
                scaled, or the VAE's own moments `latent_mean` and `latent_logvar` of that shape,
                and the encoded captions, `text_embedding` (B, N, D) and what else the model's
                family has; captions may be token ids here too. Families that are told the sizes
                of pictures need `sizes` (B, 6). With `loss_weight` (B,) the samples count
                differently.

        Returns:
            What `loss` takes: the prediction in the compute type and the target in fp32, both
            (B, C, H/8, W/8), and the weights (B,) if the objective or `loss_weight` gives some.
        """
        with torch.no_grad():
            latents = self._latents(batch, draw=draw_noise)
        conditions = self.conditions(batch)
        times, noise = self.objective.draw(latents)
        output = self.predict(latents, conditions, times=times, noise=noise)
        weights, of_times = batch.get("loss_weight"), self.objective.weights(times)
        if of_times is not None:
            weights = of_times if weights is None else weights * of_times
        return output if weights is None else (*output, weights)

    def predict(
        self, latents: Tensor, conditions: Conditions, *, times: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Noise scaled latents (B, C, H/8, W/8); return prediction and target as `forward`."""
        noised, target = self.objective.mix(latents, noise, times)
        if self.objective.guidance is not None:
            guidance = torch.full((len(times),), self.objective.guidance, device=times.device)
            conditions = {**conditions, GUIDANCE: guidance}
        with self._phase("unet_forward"), self.autocast(latents.device):
            prediction = self.network.predict(
                self.denoiser,
                noised.to(self.input_dtype, memory_format=self.memory_format),
                times=self.objective.network_times(times),
                conditions=conditions,
            )
        return prediction, target

    @torch.no_grad()
    def encode_means(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Conditions]:
        """The scaled means of a batch's latents, and its conditions, without random numbers."""
        return self._latents(batch, draw=torch.zeros_like), self.conditions(batch)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Turn scaled latents (B, C, H/8, W/8) into images (B, 3, H, W) in fp32, in [-1, 1]."""
        assert self.vae is not None, "images need a model that was built with its encoders"
        with self._encoder_autocast(self.vae):
            restored = self.latents.restore(latents).to(self.vae.dtype)
            return self.vae.decode(restored).sample.float().clamp(-1.0, 1.0)

    @torch.no_grad()
    def encode(self, batch: Mapping[str, Tensor], *, encoder_batch_size: int) -> dict[str, Tensor]:
        """Encode `image` and token ids by frozen encoders, `encoder_batch_size` images per call.

        The captions stay token ids if a text encoder is trained.
        """
        moments = [self.moments(images) for images in batch["image"].split(encoder_batch_size)]
        means, logvars = zip(*moments, strict=True)
        encoded = {"latent_mean": torch.cat(means), "latent_logvar": torch.cat(logvars)}
        captions = {name: batch[name] for name in self._caption_names}
        if SIZES in batch:
            encoded[SIZES] = batch[SIZES]
        if any(map(_is_trained, self.text_encoders)):
            return encoded | captions
        return encoded | self.encode_captions(captions, batch_size=encoder_batch_size)

    def encode_captions(
        self, captions: Mapping[str, Tensor], *, batch_size: int
    ) -> dict[str, Tensor]:
        """Encode token ids (B, N), by the names of a batch, `batch_size` captions per call."""
        pieces = [captions[name].split(batch_size) for name in self._caption_names]
        encoded = [self._encode_text(ids) for ids in zip(*pieces, strict=True)]
        return {name: torch.cat([one[name] for one in encoded]) for name in encoded[0]}

    @staticmethod
    def loss(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean squared error in fp32, weighted by sample if there are weights (B,)."""
        prediction, target = prediction.float(), target.float()
        if weights is None:
            return nn.functional.mse_loss(prediction, target)
        errors = nn.functional.mse_loss(prediction, target, reduction="none")
        return (weights * errors.flatten(1).mean(1)).mean()

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Autocast to the compute type of the denoiser within the block, if there is one."""
        return autocast(device, self.autocast_dtype)

    def _encoder_autocast(self, encoder: Any) -> contextlib.AbstractContextManager[Any]:
        """Autocast as for the denoiser if the encoder is in fp32, as in the reference.

        Not to fp16 where the family's encoders are too wide for it.
        """
        is_too_wide = self.autocast_dtype == torch.float16 and self.family.too_wide_for_fp16
        if encoder.dtype == torch.float32 and not is_too_wide:
            return self.autocast(encoder.device)
        return torch.autocast(encoder.device.type, enabled=False)

    def _latents(self, batch: Mapping[str, Tensor], *, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Scaled latents (B, C, H/8, W/8) in fp32; `draw` gives noise of a shape."""
        if "latent" in batch:
            return batch["latent"].float()
        if "latent_mean" in batch:
            mean, logvar = batch["latent_mean"].float(), batch["latent_logvar"].float()
        else:
            mean, logvar = self.moments(batch["image"])
        return self.latents.normalize(sample_latents(mean, logvar, noise=draw(mean)))

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """As `encode_images`, by the model's VAE."""
        assert self.vae is not None, "images need a model that was built with its encoders"
        with self._phase("vae_encode"), self._encoder_autocast(self.vae):
            return encode_images(self.vae, images, memory_format=self.memory_format)

    def conditions(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the denoiser is told of a batch: encoded captions, and sizes of pictures."""
        if TEXT_EMBEDDING in batch:
            found = {name: batch[name] for name in self._condition_names}
        else:
            found = self._encode_text([batch[name] for name in self._caption_names])
        if self.family.tells_sizes:
            found[SIZES] = batch[SIZES]
        return found

    def _encode_text(self, ids: Sequence[Tensor]) -> dict[str, Tensor]:
        encoders = self.text_encoders
        assert encoders, "captions need a model that was built with its encoders"
        with self._phase("text_encode"), self._encoder_autocast(encoders[0]):
            return self.network.encode_text(encoders, ids)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def encode_images(
    vae: AutoencoderKL, images: Tensor, *, memory_format: torch.memory_format
) -> tuple[Tensor, Tensor]:
    """Encode images, as `to_pixels` takes them, to mean and log-variance of their latents.

    Both are (B, C, H/8, W/8) in fp32, and not scaled.
    """
    images = to_pixels(images, vae.dtype, memory_format=memory_format)
    distribution = vae.encode(images).latent_dist
    return distribution.mean.float(), distribution.logvar.float()


def to_pixels(
    images: Tensor,
    dtype: torch.dtype,
    *,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Convert images (B, 3, H, W), uint8 in 0..255 or float in [-1, 1], to floats in [-1, 1]."""
    if images.dtype == torch.uint8:
        images = images.to(dtype) / 127.5 - 1.0
    return images.to(dtype, memory_format=memory_format)


def sample_latents(mean: Tensor, logvar: Tensor, *, noise: Tensor) -> Tensor:
    """The VAE's latents of these moments: mean + deviation * noise."""
    deviation = torch.exp(0.5 * logvar.clamp(LOGVAR_MIN, LOGVAR_MAX))
    return mean + deviation * noise


def build_model(
    architecture: Architecture,
    *,
    seed: int | None,
    precision: str = "fp32",
    encoder_dtype: str = "fp32",
    memory_format: str = "contiguous",
    attention: str = "sdpa",
    vae_attention: str | None = None,
    encoders: bool = True,
    trained: Collection[str] = (DENOISER,),
    lora: Lora | None = None,
    frozen_bits: str = "same",
    initial_token_id: int | None = None,
    device: str | torch.device = "cpu",
    objective: Objective = PLAIN,
    phase: PhaseObserver = contextlib.nullcontext,
) -> DiffusionModel:
    """Build a model that is ready to train.

    Random weights of the denoiser are drawn on `device`, which is fast; with LoRA, and for the
    encoders in any case, they are drawn on the CPU, see `make_encoder`.

    Args:
        architecture: See `make_part`.
        seed: Of the random weights; None draws nothing, for fake tensors. The caller's random
            generators keep their state.
        precision: One of `PRECISIONS`. The caller sets torch's global switch for TF32.
        encoder_dtype: One of `ENCODER_DTYPES`, for frozen encoders.
        memory_format: One of `MEMORY_FORMATS`, for denoiser and VAE.
        attention: One of `components.ATTENTION`.
        vae_attention: The same for the VAE; None: as the others.
        encoders: Whether to build VAE and text encoders, which precomputed latents do not need.
        trained: Names of the sub-models to train, `DENOISER` for that one; the others are frozen.
        lora: Trained in place of their weights; a name without linear layers is a ConfigError.
        frozen_bits: Beside LoRA, the linear layers of the denoiser get this kind of
            `low_bit.reduce_bits`; ``same``: they stay as they are.
        initial_token_id: Train only a new token of ``text_encoder``, which begins with the row of
            this one; None: no new token.
        device: Of the model.
        objective: What training changes in the noise, the target and the loss.
        phase: Entered around the work of each sub-model.
    """
    numbers = PRECISIONS[precision]
    layout = MEMORY_FORMATS[memory_format]
    denoiser, trained = architecture.family.denoiser, architecture.modules_of(trained)
    weights = Weights(
        seed=seed,
        device=device,
        dtype=numbers.weights,
        memory_format=layout,
        generator_device=None if denoiser in trained and lora is None else "cpu",
        low_bit=None if frozen_bits == "same" else frozen_bits,
    )
    parts: dict[str, Any] = dict.fromkeys(architecture.modules)
    parts[denoiser] = make_part(denoiser, architecture, attention=attention, weights=weights)
    layers = parts[denoiser].modules()
    if frozen_bits != "same" and not any(isinstance(one, LowBitLinear) for one in layers):
        raise ConfigError(
            "no linear layer of this model is large enough for the blocks of this format",
            value=frozen_bits,
            allowed="same | int8, or a larger --model_name",
            flag="--frozen_bits",
        )
    for part in architecture.encoders if encoders else ():
        parts[part] = make_encoder(
            part,
            architecture,
            seed=seed,
            dtype=numbers.weights if part in trained else ENCODER_DTYPES[encoder_dtype],
            memory_format=memory_format,
            attention=(vae_attention or attention) if part == "vae" else attention,
            device=device,
        )
    model = DiffusionModel(
        architecture,
        parts,
        objective=make_objective(
            architecture.family.objective,
            architecture.parts["scheduler"],
            objective,
            flow=architecture.family.flow,
        ),
        weights_dtype=numbers.weights,
        autocast_dtype=numbers.autocast,
        memory_format=layout,
        phase=phase,
    )
    modules = {name: module for name, module in parts.items() if module is not None}
    for name, module in modules.items():
        module.requires_grad_(name in trained)
    if lora is not None:
        lora.add_to(modules, seed=seed)
    if initial_token_id is not None:
        add_learned_token(modules["text_encoder"], initial_id=initial_token_id)
    model.train()
    # The sub-models are on the device already.
    model.objective.to(device)
    return model


def make_encoder(
    part: str,
    architecture: Architecture,
    *,
    seed: int | None,
    dtype: torch.dtype,
    memory_format: str = "contiguous",
    attention: str = "sdpa",
    device: str | torch.device = "cpu",
) -> Any:
    """Make a VAE or a text encoder as `build_model` does, frozen.

    Random weights are drawn on the CPU: no checkpoint has the weights of a frozen encoder, so an
    export, or a run that is resumed elsewhere, has to draw the same.
    """
    # A seed each, so that the weights of a sub-model do not depend on another one's size.
    weights = Weights(
        seed=None if seed is None else seed + SEED_OFFSETS[part],
        device=device,
        dtype=dtype,
        memory_format=MEMORY_FORMATS[memory_format],
        generator_device="cpu",
    )
    module = make_part(part, architecture, attention=attention, weights=weights)
    return module.requires_grad_(False).eval()
