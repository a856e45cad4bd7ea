"""Which named recipes are there, and what does each of them set?

A preset sets the speed-ups and nothing else. A value may differ by device: `PerDevice` holds both
and sdbench/plan/speedups.py takes the one for the machine at hand.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class PerDevice:
    """A preset's value for a GPU and for a CPU."""

    gpu: Any
    cpu: Any

    def __str__(self) -> str:
        return f"{self.gpu} on a GPU, {self.cpu} on a CPU"


# mosaicml/diffusion-benchmark @c7f3cff: precision is left to Composer, whose default is amp_fp16 on
# a GPU and fp32 on a CPU (composer/trainer/trainer.py, 0.32.1); encoders stay in fp32; AdamW gets
# the parameters of the frozen encoders too; images arrive as float32. Composer wraps the model in
# torch's DDP with torch's defaults (25 MiB a bucket) and averages in the last micro-batch.
SEED: dict[str, Any] = {
    "precision": PerDevice(gpu="amp_fp16", cpu="fp32"),
    "master_weights": "none",
    "encoder_dtype": "fp32",
    "encoder_batch_size": "microbatch",
    "memory_format": "contiguous",
    "group_norm": "torch",
    "convolution": "torch",
    "attention": "sdpa",
    "unit_divisions": "keep",
    "compile": "none",
    "compile_mode": "default",
    "cuda_graph": False,
    "cudnn_benchmark": False,
    "activation_checkpointing": "none",
    "optimizer": "adamw",
    "optimizer_params": "all",
    "ema_impl": "composer",
    "ema_interval_batches": 1,
    "image_dtype": "float32",
    "copy_stream": "compute",
    "sharding": "none",
    "grad_sync": "last",
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "ddp_bucket_mib": 25,
    "grad_compression": "none",
    "cpu_allocator": "default",
    "flush_denormals": False,
}

# An update of the average moves 10.4 GB (3 x 866 M x 4 bytes) for the U-Net of SD2: little beside a
# GPU's step of 2048 images, but much of a CPU's step of one image.
EMA_INTERVAL_BATCHES = PerDevice(gpu=1, cpu=10)

FAST: dict[str, Any] = {
    **SEED,
    "precision": "amp_bf16",
    "encoder_dtype": "bf16",
    "memory_format": "channels_last",
    "convolution": PerDevice(gpu="torch", cpu="matmul"),
    "unit_divisions": "drop",
    "compile": PerDevice(gpu="all", cpu="none"),
    "cudnn_benchmark": PerDevice(gpu=True, cpu=False),
    "optimizer": "adamw_fused",
    "optimizer_params": "trainable",
    "ema_impl": "foreach",
    "ema_interval_batches": EMA_INTERVAL_BATCHES,
    "image_dtype": "uint8",
    "copy_stream": PerDevice(gpu="side", cpu="compute"),
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "cpu_allocator": PerDevice(gpu="default", cpu="keep"),
    "flush_denormals": PerDevice(gpu=False, cpu=True),
}

PRESETS: dict[str, dict[str, Any]] = {"fast": FAST, "seed": SEED}
