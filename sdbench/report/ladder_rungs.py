"""Which rungs has the ladder, where can each be measured, and who climbed it before?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sdbench.settings.config import FIELDS

# A setting whose value is a number: a run with any number of it has measured the rung.
ANY_NUMBER = "N"
CPU, GPU = "cpu", "cuda"
DEVICES = {CPU: "CPU", GPU: "GPU"}

NEMO = "NVIDIA NeMo, its table of ControlNet on one A100"
MLPERF = "NVIDIA's submissions to MLPerf Training"
TORCH = "torch"


@dataclasses.dataclass(frozen=True)
class Rung:
    """A speed-up on top of the preset seed.

    Attributes:
        settings: Name and value of each setting; more than one where they are one idea.
        needs: Settings without which these cannot be.
        origin: Where it comes from.
        devices: Types of device that have it.
        needs_ranks: Whether it does something with several ranks only.
    """

    settings: Mapping[str, Any]
    origin: str
    devices: tuple[str, ...] = (CPU, GPU)
    needs_ranks: bool = False
    needs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def is_part_of(self, added: Mapping[str, Any]) -> bool:
        """Whether these settings, with numbers of their own, have this rung among them."""
        return all(
            name in added and value in (ANY_NUMBER, added[name])
            for name, value in self.settings.items()
        )


# Public sources only; what a rung does is told by the help text of its flag.
RUNGS = (
    Rung({"precision": "amp_bf16"}, "mila-iqia/milabench, diffusion-single"),
    Rung({"precision": "tf32"}, TORCH, (GPU,)),
    Rung({"precision": "fp32"}, "the reference of the loss band", (GPU,)),
    Rung(
        {"precision": "bf16", "master_weights": "fp32"},
        f"{MLPERF}: half-precision weights, Adam with fp32 copies",
    ),
    Rung({"precision": "bf16"}, "the same without the copies"),
    Rung({"encoder_dtype": "bf16"}, "mila-iqia/milabench; mosaicml/diffusion in fp16"),
    Rung({"encoder_dtype": "fp16"}, "mosaicml/diffusion, encode_latents_in_fp16", (GPU,)),
    Rung({"encoder_batch_size": ANY_NUMBER}, "this suite"),
    Rung({"memory_format": "channels_last"}, NEMO),
    Rung({"group_norm": "fused"}, f"NVIDIA apex, contrib.group_norm; {NEMO}"),
    Rung(
        {"memory_format": "channels_last", "group_norm": "fused"},
        f"{NEMO}: both together",
    ),
    Rung(
        {"convolution": "matmul"},
        "this suite",
        (CPU,),
        needs={"memory_format": "channels_last"},
    ),
    Rung({"attention": "eager"}, "diffusers without fused attention"),
    Rung({"attention": "flash"}, f"flash-attention; {NEMO}"),
    Rung({"attention": "cudnn"}, f"{MLPERF} v5.0", (GPU,)),
    Rung({"attention": "efficient"}, "xFormers; mosaicml/diffusion", (GPU,)),
    Rung({"attention": "xformers"}, "xFormers; mosaicml/diffusion-benchmark", (GPU,)),
    Rung({"unit_divisions": "drop"}, "this suite: diffusers divides by its factors of 1.0"),
    Rung({"compile": "unet"}, f"torch.compile; {MLPERF} from v4.0 on"),
    Rung({"compile": "encoders"}, "torch.compile"),
    Rung({"compile": "all"}, "torch.compile"),
    Rung(
        {"compile": "unet", "compile_mode": "reduce-overhead"},
        "torch.compile with CUDA graphs",
        (GPU,),
    ),
    Rung({"compile": "all", "compile_mode": "reduce-overhead"}, "the same", (GPU,)),
    Rung({"cuda_graph": True}, f"{MLPERF} from v4.0 on: the full iteration", (GPU,)),
    Rung({"cudnn_benchmark": True}, TORCH, (GPU,)),
    Rung({"activation_checkpointing": "transformer"}, "Chen et al., arXiv 1604.06174"),
    Rung({"activation_checkpointing": "full"}, "Chen et al., arXiv 1604.06174"),
    Rung({"optimizer": "adamw_fused"}, f"{TORCH}; NVIDIA apex, FusedAdam"),
    Rung({"optimizer_params": "trainable"}, "mosaicml/diffusion"),
    Rung({"ema_impl": "foreach"}, "huggingface/diffusers PR 7685"),
    Rung({"ema_interval_batches": ANY_NUMBER}, "MosaicML Composer, EMA(update_interval)"),
    Rung({"image_dtype": "uint8"}, "this suite"),
    Rung({"copy_stream": "side"}, f"{MLPERF} from v4.0 on", (GPU,)),
    Rung({"cpu_allocator": "keep"}, "glibc, mallopt(3)", (CPU,)),
    Rung({"flush_denormals": True}, f"{TORCH}.set_flush_denormal", (CPU,)),
    Rung({"num_threads": ANY_NUMBER}, f"{TORCH}.set_num_threads", (CPU,)),
    Rung(
        {"optimizer_params": "trainable", "sharding": "zero1"},
        f"{MLPERF} from v4.0 on; arXiv 1910.02054",
        needs_ranks=True,
    ),
    Rung(
        {"optimizer_params": "trainable", "sharding": "grad_op"},
        "mosaicml/diffusion; torch FSDP",
        needs_ranks=True,
    ),
    Rung(
        {"optimizer_params": "trainable", "sharding": "full"},
        "torch FSDP; arXiv 2304.11277",
        needs_ranks=True,
    ),
    Rung(
        {"optimizer_params": "trainable", "sharding": "hybrid"},
        "torch FSDP; arXiv 2304.11277",
        needs_ranks=True,
    ),
    Rung({"grad_sync": "every"}, "torch DDP without no_sync", needs_ranks=True),
    Rung({"gradient_as_bucket_view": True}, "torch DDP", needs_ranks=True),
    Rung({"static_graph": True}, "torch DDP", needs_ranks=True),
    Rung({"ddp_bucket_mib": ANY_NUMBER}, "torch DDP", needs_ranks=True),
    Rung({"grad_compression": "bf16"}, "torch DDP communication hooks", needs_ranks=True),
)


def find_rung(added: Mapping[str, Any]) -> Rung | None:
    """The rung that these settings are, with what it needs or without; None if there is none."""
    for rung in RUNGS:
        rest = {name: value for name, value in added.items() if name not in rung.settings}
        if rung.is_part_of(added) and rest in ({}, rung.needs):
            return rung
    return None


def own_settings(added: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a rung without those that it cannot be without."""
    rung = find_rung(added)
    needs = {} if rung is None else rung.needs
    return {name: value for name, value in added.items() if name not in needs}


def describe_flags(settings: Mapping[str, Any]) -> str:
    """Settings as the flags of benchmark.py, e.g. ``--compile unet --cuda_graph``."""
    return " ".join(_as_flag(name, value) for name, value in settings.items())


def describe_effect(settings: Mapping[str, Any]) -> str:
    """What settings do, in the words of --help."""
    return "; ".join(FIELDS[name].metadata["help"] for name in settings)


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {value}"
