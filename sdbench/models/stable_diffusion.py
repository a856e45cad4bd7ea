"""`StableDiffusion`: a module that maps a batch to prediction and target, and its construction.

The order of operations follows mosaicml/diffusion-benchmark: encode, draw noise and time steps,
add the noise, predict it (or the velocity), mean squared error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMScheduler
from torch import Tensor, nn

from sdbench.models.architecture import Architecture
from sdbench.models.components import make_part
from sdbench.models.learned_token import add_learned_token
from sdbench.models.lora import Lora
from sdbench.models.objective import EPSILON, PLAIN, SAMPLE, VELOCITY, Objective, min_snr_weights
from sdbench.models.weights import ENCODER_DTYPES, PRECISIONS, Weights, autocast

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# diffusers' DiagonalGaussianDistribution clamps the log-variance so that exp() cannot overflow.
LOGVAR_MIN, LOGVAR_MAX = -30.0, 20.0

# Makes the context around a phase of the step: vae_encode, text_encode or unet_forward.
PhaseObserver = Callable[[str], contextlib.AbstractContextManager[Any]]


class StableDiffusion(nn.Module):
    """U-Net, VAE and text encoder; the latter two are absent for precomputed latents."""

    def __init__(
        self,
        *,
        unet: nn.Module,
        vae: nn.Module | None,
        text_encoder: nn.Module | None,
        scheduler: DDPMScheduler,
        scaling_factor: float,
        autocast_dtype: torch.dtype | None,
        memory_format: torch.memory_format,
        objective: Objective = PLAIN,
        phase: PhaseObserver = contextlib.nullcontext,
    ) -> None:
        """Join the sub-models.

        `scaling_factor` brings latents to about unit variance. `autocast_dtype` is the compute
        type of the U-Net; None: that of its weights. `phase` is entered around each sub-model.
        """
        super().__init__()
        self.unet = unet
        self.vae = vae
        self.text_encoder = text_encoder
        self.scaling_factor = scaling_factor
        self.scheduler = scheduler
        self.prediction_type: str = scheduler.config.prediction_type
        self.offset_noise = objective.offset_noise
        self.autocast_dtype = autocast_dtype
        self.memory_format = memory_format
        self._phase = phase
        # In fp64: 1 - alphas_cumprod is small, and inaccurate in fp32, at the first time steps.
        power = scheduler.alphas_cumprod.double()
        weights = None
        if objective.min_snr_gamma is not None:
            weights = min_snr_weights(
                power, gamma=objective.min_snr_gamma, prediction_type=self.prediction_type
            ).float()
        # Not persistent: the schedule is configuration and does not belong in a checkpoint.
        self.register_buffer("signal_scale", power.sqrt().float(), persistent=False)
        self.register_buffer("noise_scale", (1.0 - power).sqrt().float(), persistent=False)
        self.register_buffer("loss_weights", weights, persistent=False)

    def train(self, mode: bool = True) -> StableDiffusion:
        """Set the mode of the trained sub-models; frozen ones stay in evaluation mode."""
        super().train(mode)
        for module in self.children():
            if not _is_trained(module):
                module.eval()
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Noise the batch's latents and predict what was added.

        Args:
            batch: `image` (B, 3, H, W), uint8 in 0..255 or float in [-1, 1], and `input_ids`
                (B, 77); or `latent` (B, 4, H/8, W/8), scaled, or the VAE's own moments
                `latent_mean` and `latent_logvar` of that shape, and `text_embedding` (B, 77, D);
                captions may be `input_ids` here too. With `loss_weight` (B,) the samples count
                differently.

        Returns:
            What `loss` takes: the prediction in the compute type and the target in fp32, both
            (B, 4, H/8, W/8), and with min-SNR weighting or `loss_weight` the weights (B,).
        """
        with torch.no_grad():
            latents = self._latents(batch, draw=_draw_noise)
        text_states = self.text_states(batch)
        num_train_timesteps = len(self.signal_scale)
        timesteps = torch.randint(0, num_train_timesteps, (len(latents),), device=latents.device)
        noise = _draw_noise(latents)
        if self.offset_noise:
            noise = noise + self.offset_noise * _draw_noise(latents[:, :, :1, :1])
        output = self.predict(latents, text_states, timesteps=timesteps, noise=noise)
        weights = batch.get("loss_weight")
        if self.loss_weights is not None:
            of_timesteps = self.loss_weights[timesteps]
            weights = of_timesteps if weights is None else weights * of_timesteps
        return output if weights is None else (*output, weights)

    def predict(
        self, latents: Tensor, text_states: Tensor, *, timesteps: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Noise scaled latents (B, 4, H/8, W/8); return prediction and target as `forward`."""
        signal_scale = self.signal_scale[timesteps].view(-1, 1, 1, 1)
        noise_scale = self.noise_scale[timesteps].view(-1, 1, 1, 1)
        noised = signal_scale * latents + noise_scale * noise
        if self.prediction_type == VELOCITY:
            # Salimans and Ho 2022 (arXiv 2202.00512): v = alpha eps - sigma x.
            target = signal_scale * noise - noise_scale * latents
        else:
            target = {EPSILON: noise, SAMPLE: latents}[self.prediction_type]
        with self._phase("unet_forward"), self.autocast(latents.device):
            prediction = self.unet(
                noised.to(self.unet.dtype, memory_format=self.memory_format),
                timesteps,
                text_states.to(self.unet.dtype),
            ).sample
        return prediction, target

    @torch.no_grad()
    def encode_means(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The scaled means of a batch's latents, and its text states, without random numbers."""
        return self._latents(batch, draw=torch.zeros_like), self.text_states(batch)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Turn scaled latents (B, 4, H/8, W/8) into images (B, 3, H, W) in fp32, in [-1, 1]."""
        assert self.vae is not None, "images need a model that was built with its encoders"
        with self._encoder_autocast(self.vae):
            unscaled = (latents / self.scaling_factor).to(self.vae.dtype)
            return self.vae.decode(unscaled).sample.float().clamp(-1.0, 1.0)

    @torch.no_grad()
    def encode(self, batch: Mapping[str, Tensor], *, encoder_batch_size: int) -> dict[str, Tensor]:
        """Encode `image` and `input_ids` by frozen encoders, `encoder_batch_size` images per call.

        The captions stay `input_ids` if the text encoder is trained.
        """
        assert self.text_encoder is not None
        moments = [self.moments(images) for images in batch["image"].split(encoder_batch_size)]
        means, logvars = zip(*moments, strict=True)
        encoded = {"latent_mean": torch.cat(means), "latent_logvar": torch.cat(logvars)}
        if _is_trained(self.text_encoder):
            return encoded | {"input_ids": batch["input_ids"]}
        texts = [
            self.text_states({"input_ids": input_ids})
            for input_ids in batch["input_ids"].split(encoder_batch_size)
        ]
        return encoded | {"text_embedding": torch.cat(texts)}

    @staticmethod
    def loss(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean squared error in fp32, weighted by sample if there are weights (B,)."""
        prediction, target = prediction.float(), target.float()
        if weights is None:
            return nn.functional.mse_loss(prediction, target)
        errors = nn.functional.mse_loss(prediction, target, reduction="none")
        return (weights * errors.flatten(1).mean(1)).mean()

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Autocast to the compute type of the U-Net within the block, if there is one."""
        return autocast(device, self.autocast_dtype)

    def _encoder_autocast(self, encoder: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Autocast as for the U-Net if the encoder is in fp32, as in the reference."""
        if encoder.dtype == torch.float32:
            return self.autocast(encoder.device)
        return torch.autocast(encoder.device.type, enabled=False)

    def _latents(self, batch: Mapping[str, Tensor], *, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Scaled latents (B, 4, H/8, W/8) in fp32; `draw` gives noise of a shape."""
        if "latent" in batch:
            return batch["latent"].float()
        if "latent_mean" in batch:
            mean, logvar = batch["latent_mean"].float(), batch["latent_logvar"].float()
        else:
            mean, logvar = self.moments(batch["image"])
        return sample_latents(mean, logvar, noise=draw(mean), scaling_factor=self.scaling_factor)

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """As `encode_images`, by the model's VAE."""
        assert self.vae is not None, "images need a model that was built with its encoders"
        with self._phase("vae_encode"), self._encoder_autocast(self.vae):
            return encode_images(self.vae, images, memory_format=self.memory_format)

    def text_states(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Last hidden states (B, 77, D) of the captions."""
        if "text_embedding" in batch:
            return batch["text_embedding"]
        assert self.text_encoder is not None, "captions need a model built with its encoders"
        with self._phase("text_encode"), self._encoder_autocast(self.text_encoder):
            return self.text_encoder(batch["input_ids"])[0]


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def encode_images(
    vae: AutoencoderKL, images: Tensor, *, memory_format: torch.memory_format
) -> tuple[Tensor, Tensor]:
    """Encode images, as `to_pixels` takes them, to mean and log-variance of their latents.

    Both are (B, 4, H/8, W/8) in fp32, and not scaled.
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


def sample_latents(mean: Tensor, logvar: Tensor, *, noise: Tensor, scaling_factor: float) -> Tensor:
    """Latents of these moments: (mean + deviation * noise) * scaling_factor."""
    deviation = torch.exp(0.5 * logvar.clamp(LOGVAR_MIN, LOGVAR_MAX))
    return (mean + deviation * noise) * scaling_factor


def _draw_noise(like: Tensor) -> Tensor:
    """Standard normal fp32 noise; randn_like's would depend on the layout of `like`."""
    return torch.randn(like.shape, device=like.device)


def build_stable_diffusion(
    architecture: Architecture,
    *,
    seed: int | None,
    precision: str = "fp32",
    encoder_dtype: str = "fp32",
    memory_format: str = "contiguous",
    attention: str = "sdpa",
    vae_attention: str | None = None,
    encoders: bool = True,
    trained: Collection[str] = ("unet",),
    lora: Lora | None = None,
    initial_token_id: int | None = None,
    device: str | torch.device = "cpu",
    objective: Objective = PLAIN,
    phase: PhaseObserver = contextlib.nullcontext,
) -> StableDiffusion:
    """Build a model that is ready to train.

    Random weights of the U-Net are drawn on `device`, which is fast; with LoRA, and for the
    encoders in any case, they are drawn on the CPU, see `make_encoder`.

    Args:
        architecture: See `make_part`.
        seed: Of the random weights; None draws nothing, for fake tensors. The caller's random
            generators keep their state.
        precision: One of `PRECISIONS`. The caller sets torch's global switch for TF32.
        encoder_dtype: One of `ENCODER_DTYPES`, for frozen encoders.
        memory_format: One of `MEMORY_FORMATS`, for U-Net and VAE.
        attention: One of `components.ATTENTION`.
        vae_attention: The same for the VAE; None: as the others.
        encoders: Whether to build VAE and text encoder, which precomputed latents do not need.
        trained: Names of the sub-models to train; the others are frozen.
        lora: Trained in place of their weights; a name without linear layers is a ConfigError.
        initial_token_id: Train only a new token of ``text_encoder``, which begins with the row of
            this one; None: no new token.
        device: Of the model.
        objective: What training changes in the noise, the target and the loss.
        phase: Entered around the work of each sub-model.
    """
    numbers = PRECISIONS[precision]
    layout = MEMORY_FORMATS[memory_format]
    weights = Weights(
        seed=seed,
        device=device,
        dtype=numbers.weights,
        memory_format=layout,
        generator_device=None if "unet" in trained and lora is None else "cpu",
    )
    unet = make_part("unet", architecture, attention=attention, weights=weights)
    vae = text_encoder = None
    if encoders:
        make = functools.partial(
            make_encoder,
            architecture=architecture,
            seed=seed,
            memory_format=memory_format,
            device=device,
        )
        dtype = ENCODER_DTYPES[encoder_dtype]
        text_dtype = numbers.weights if "text_encoder" in trained else dtype
        vae = make("vae", dtype=dtype, attention=vae_attention or attention)
        text_encoder = make("text_encoder", dtype=text_dtype, attention=attention)
    model = StableDiffusion(
        unet=unet,
        vae=vae,
        text_encoder=text_encoder,
        scheduler=DDPMScheduler.from_config(objective.schedule(architecture.scheduler)),
        scaling_factor=architecture.vae["scaling_factor"],
        autocast_dtype=numbers.autocast,
        memory_format=layout,
        objective=objective,
        phase=phase,
    )
    for name, module in model.named_children():
        module.requires_grad_(name in trained)
    if lora is not None:
        lora.add_to(dict(model.named_children()), seed=seed)
    if initial_token_id is not None:
        assert text_encoder is not None
        add_learned_token(text_encoder, initial_id=initial_token_id)
    model.train()
    # The sub-models are on the device already.
    for name, buffer in model.named_buffers(recurse=False):
        setattr(model, name, buffer.to(device))
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
    """Make a VAE or a text encoder as `build_stable_diffusion` does, frozen.

    Random weights are drawn on the CPU: no checkpoint has the weights of a frozen encoder, so an
    export, or a run that is resumed elsewhere, has to draw the same.
    """
    # A seed each, so that the weights of a sub-model do not depend on another one's size.
    weights = Weights(
        seed=None if seed is None else seed + {"vae": 1, "text_encoder": 2}[part],
        device=device,
        dtype=dtype,
        memory_format=MEMORY_FORMATS[memory_format],
        generator_device="cpu",
    )
    module = make_part(part, architecture, attention=attention, weights=weights)
    return module.requires_grad_(False).eval()
