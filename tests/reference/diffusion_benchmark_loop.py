"""The recipe of mosaicml/diffusion-benchmark in a Composer loop that is not ours.

An independent yardstick for `--preset seed`: it imports nothing of sdbench, and follows the recipe
of mosaicml/diffusion-benchmark @c7f3cff under Composer 0.32.1: fp32 encoders in the step, torch's
default AdamW over all parameters, a constant learning rate, synthetic samples drawn in the loader's
workers, precision left to Composer. The model has random weights, since the one that the recipe
names has left its hub.

    composer tests/reference/diffusion_benchmark_loop.py --image_size 256 --batch_size 2

The last line of its output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from composer import Callback, ComposerModel, Trainer
from composer.callbacks import SpeedMonitor
from composer.optim import ConstantScheduler
from composer.utils import dist
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel

SEED = 17
NUM_TOKENS = 77
LATENT_SCALE = 0.18215
NUM_TRAIN_TIMESTEPS = 1000

# stabilityai/stable-diffusion-2-base: 865,910,724 + 83,653,863 + 340,387,840 parameters.
UNET = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "attention_head_dim": (5, 10, 20, 20),
    "cross_attention_dim": 1024,
    "use_linear_projection": True,
}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
TEXT_ENCODER = {
    "vocab_size": 49408,
    "max_position_embeddings": NUM_TOKENS,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
}


class LatentDiffusion(ComposerModel):
    """U-Net that predicts the noise, behind a frozen VAE and a frozen text encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel(**UNET)
        self.vae = AutoencoderKL(**VAE).requires_grad_(False)
        self.text_encoder = CLIPTextModel(CLIPTextConfig(**TEXT_ENCODER)).requires_grad_(False)
        self.scheduler = DDPMScheduler(
            num_train_timesteps=NUM_TRAIN_TIMESTEPS,
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict the noise in the batch's latents, and return it with the noise itself."""
        images = batch["image"]
        latents = self.vae.encode(images).latent_dist.sample() * LATENT_SCALE
        text = self.text_encoder(batch["caption"])[0]
        # The recipe begins at 1: timestep 0 is never trained.
        timesteps = torch.randint(1, NUM_TRAIN_TIMESTEPS, (len(latents),), device=latents.device)
        noise = torch.randn_like(latents)
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        return self.unet(noisy, timesteps, text).sample, noise

    def loss(
        self, outputs: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Mean squared error of the predicted noise."""
        predicted, noise = outputs
        return F.mse_loss(predicted, noise)


class SyntheticImagesAndCaptions(Dataset):
    """The recipe's 100,000 samples of noise, each drawn when it is asked for."""

    def __init__(self, *, image_size: int) -> None:
        self.image_size = image_size

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "image": torch.randn(3, self.image_size, self.image_size),
            "caption": torch.randint(0, 128, (NUM_TOKENS,)),
        }


class BatchClock(Callback):
    """Notes when each batch ended, and its loss. Composer has read the loss, so the GPU is idle."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.losses: list[float] = []

    def fit_start(self, state: Any, logger: Any) -> None:
        """Start the clock of the first batch."""
        self.times_s.append(time.perf_counter())

    def batch_end(self, state: Any, logger: Any) -> None:
        """Stop the clock of this batch, which starts that of the next."""
        self.times_s.append(time.perf_counter())
        self.losses.append(state.total_loss_dict["loss/train/total"])


def make_loader(arguments: argparse.Namespace) -> DataLoader:
    """The recipe's loader, with the number of workers as a parameter."""
    dataset = SyntheticImagesAndCaptions(image_size=arguments.image_size)
    has_workers = arguments.num_workers > 0
    return DataLoader(
        dataset,
        batch_size=arguments.batch_size // dist.get_world_size(),
        sampler=dist.get_sampler(dataset, drop_last=True, shuffle=True),
        drop_last=True,
        num_workers=arguments.num_workers,
        prefetch_factor=2 if has_workers else None,
        persistent_workers=has_workers,
        pin_memory=torch.cuda.is_available(),
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and return the measured steps."""
    model = LatentDiffusion()
    clock = BatchClock()
    num_batches = arguments.warmup_batches + arguments.measure_batches
    trainer = Trainer(
        model=model,
        train_dataloader=make_loader(arguments),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-3),
        schedulers=ConstantScheduler(),
        callbacks=[SpeedMonitor(window_size=100), clock],
        max_duration=f"{num_batches}ba",
        device_train_microbatch_size=arguments.device_train_microbatch_size,
        seed=SEED,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    ends_s = clock.times_s[arguments.warmup_batches :]
    step_times_s = [end - start for start, end in itertools.pairwise(ends_s)]
    if torch.cuda.is_available():
        peak_memory_bytes = torch.cuda.max_memory_allocated()
    else:
        peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "step_times_s": step_times_s,
        "step_time_p50_s": statistics.median(step_times_s),
        "images_per_second": arguments.batch_size * len(step_times_s) / sum(step_times_s),
        "losses": clock.losses,
        "peak_memory_gib": peak_memory_bytes / 1024**3,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, measure, print one JSON line."""
    parser = argparse.ArgumentParser(description="An independent loop of diffusion-benchmark.")
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=2, help="global batch")
    parser.add_argument("--device_train_microbatch_size", type=int, default=2)
    parser.add_argument("--num_workers", type=int, default=2, help="the recipe has 8")
    parser.add_argument("--warmup_batches", type=int, default=2)
    parser.add_argument("--measure_batches", type=int, default=10)
    result = measure(parser.parse_args(argv))
    if dist.get_global_rank() == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
