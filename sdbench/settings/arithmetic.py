"""Speed-ups of the network's arithmetic: number formats, memory layout, kernels."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil

from sdbench.settings.kinds import SWITCH, one_of, positive_or
from sdbench.settings.parallel import WHOLE_WEIGHTS_TEXT, is_ddp
from sdbench.settings.setting import (
    ANY_NUMBER,
    BF16,
    BF16_WEIGHTS,
    CPU,
    ENCODERS,
    EXACT,
    GPU,
    MLPERF,
    SAME_FP32,
    SPEED,
    PerDevice,
    Rule,
    Rung,
    Situation,
    setting,
)

MILABENCH = "mila-iqia/milabench"
NEMO = "NVIDIA NeMo, its table of ControlNet on one A100"
HALF_PRECISIONS = ("amp_fp16", "amp_bf16", "bf16")
PRODUCTS = ("matmul", "matmul_wide")
CHANNELS_LAST = {"memory_format": "channels_last"}
# As torch.backends.cudnn.version() has 9.15.1.
SAFE_CUDNN_VERSION = 91501


def has_cpp_compiler(situation: Situation) -> bool:
    """Whether Inductor can compile: C++ for a CPU and, around its Triton kernels, for a GPU too."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArithmeticSpeedups:
    """How the numbers of a step are stored and computed."""

    GROUP = SPEED

    # mosaicml/diffusion-benchmark @c7f3cff leaves precision to Composer, whose default is amp_fp16
    # on a GPU and fp32 on a CPU (composer/trainer/trainer.py, 0.32.1).
    precision: str | None = setting(
        one_of("fp32", "tf32", "amp_fp16", "amp_bf16", "bf16"),
        None,
        "number format of the training step; bf16 also keeps weights and gradients in bf16, with "
        "--lora_rank the frozen weights alone",
        seed=PerDevice(gpu="amp_fp16", cpu="fp32"),
        fast="amp_bf16",
        rules=(
            Rule(
                ("tf32", "amp_fp16"),
                lambda s: s.on_gpu,
                "a CPU cannot train in this precision",
                "fp32 | amp_bf16 | bf16",
                "fp32",
            ),
            Rule(
                ("tf32", "amp_bf16", "bf16"),
                lambda s: not s.on_gpu or s.config.precision in s.machine.supported_precisions(),
                "this precision takes a GPU of compute capability 8.0 or later",
                "fp32 | amp_fp16",
                "amp_fp16",
            ),
            Rule(
                ("amp_bf16", "bf16"),
                lambda s: s.machine.has_fast_bf16,
                "the device has no bf16 instructions",
                allowed=None,
                instead="fp32",
            ),
        ),
        rungs=(
            Rung("amp_bf16", f"{MILABENCH}, diffusion-single", loss_tolerance=BF16),
            Rung("tf32", "torch", (GPU,)),
            Rung("fp32", "the reference of the loss band", (GPU,)),
            Rung(
                "bf16",
                f"{MLPERF}: half-precision weights, Adam with fp32 copies",
                together={"master_weights": "fp32"},
                loss_tolerance=BF16_WEIGHTS,
            ),
            Rung("bf16", "the same without the copies", loss_tolerance=BF16_WEIGHTS),
        ),
    )
    master_weights: str | None = setting(
        one_of("none", "fp32"),
        None,
        "copy of bf16 weights that the optimizer updates, with its state in the same type",
        seed="none",
        rules=(
            Rule(
                ("fp32",),
                lambda s: s.config.precision == "bf16",
                "only bf16 weights need a copy in fp32, and the precision is another",
                "none, or fp32 with --precision bf16",
            ),
            Rule(
                ("fp32",),
                lambda s: s.config.lora_rank is None and s.config.learned_token is None,
                "the weights of LoRA or of a token are in fp32 themselves",
                "none, or neither --lora_rank nor --learned_token",
            ),
        ),
    )
    encoder_dtype: str | None = setting(
        one_of("fp32", "fp16", "bf16"),
        None,
        "weights of the frozen VAE and text encoder",
        seed="fp32",
        fast="bf16",
        acts_with=ENCODERS,
        rules=(
            Rule(
                ("fp16",),
                lambda s: s.on_gpu,
                "a CPU cannot run the encoders in this type",
                "fp32 | bf16",
            ),
            Rule(
                ("bf16",),
                lambda s: s.machine.has_fast_bf16,
                "the device has no bf16 instructions",
                allowed=None,
                instead=PerDevice(gpu="fp16", cpu="fp32"),
            ),
        ),
        rungs=(
            Rung("bf16", f"{MILABENCH}; mosaicml/diffusion in fp16", loss_tolerance=BF16),
            Rung("fp16", "mosaicml/diffusion, encode_latents_in_fp16", (GPU,)),
        ),
    )
    encoder_batch_size: int | str | None = setting(
        positive_or("microbatch"),
        None,
        "images that the encoders take at once, the rank's whole batch ahead of its micro-batches; "
        "microbatch: encode within each micro-batch",
        seed="microbatch",
        acts_with=ENCODERS,
        rungs=(Rung(ANY_NUMBER, "this suite", loss_tolerance=SAME_FP32),),
    )
    memory_format: str | None = setting(
        one_of("contiguous", "channels_last"),
        None,
        "layout of image-like tensors",
        seed="contiguous",
        fast="channels_last",
        rungs=(Rung("channels_last", NEMO, loss_tolerance=SAME_FP32),),
    )
    keep_layout: bool = setting(
        SWITCH,
        False,
        "let the transformers of the U-Net hand on images channels_last, which diffusers makes "
        "contiguous",
        seed=False,
        fast=PerDevice(gpu=False, cpu=True),
        before=False,
        rules=(
            Rule(
                (True,),
                lambda s: s.config.memory_format == "channels_last",
                "images that are contiguous have no other layout to keep",
                "--no_keep_layout, or --memory_format channels_last",
            ),
        ),
        rungs=(Rung(True, "this suite", (CPU,), needs=CHANNELS_LAST, loss_tolerance=SAME_FP32),),
    )
    group_norm: str | None = setting(
        one_of("torch", "fused"),
        None,
        "torch's GroupNorm, or one compiled kernel with the SiLU behind it that keeps the layout",
        seed="torch",
        rules=(
            Rule(
                ("fused",),
                has_cpp_compiler,
                "the fused GroupNorm is compiled, and there is no C++ compiler on the PATH",
                "torch, or an installed g++ or clang++",
            ),
        ),
        rungs=(
            Rung("fused", f"NVIDIA apex, contrib.group_norm; {NEMO}", loss_tolerance=SAME_FP32),
            Rung(
                "fused", f"{NEMO}: both together", together=CHANNELS_LAST, loss_tolerance=SAME_FP32
            ),
        ),
    )
    convolution: str | None = setting(
        one_of("torch", "matmul", "matmul_wide"),
        None,
        "torch's convolutions, or products of matrices for those of the U-Net with at least twice "
        "as many output channels as pixels in a micro-batch; wide: also for those of single pixels "
        "(1 x 1), and for the gradients where there are at least as many channels as pixels",
        seed="torch",
        fast=PerDevice(gpu="torch", cpu="matmul_wide"),
        before="torch",
        rules=(
            Rule(
                PRODUCTS,
                lambda s: s.config.memory_format == "channels_last",
                "products of matrices read the weights with the channels last",
                "torch, or --memory_format channels_last",
            ),
            Rule(
                PRODUCTS,
                is_ddp,
                "weights that are shared out are contiguous, and each product would copy them",
                f"torch, or --sharding {WHOLE_WEIGHTS_TEXT}",
            ),
        ),
        rungs=(
            Rung("matmul", "this suite", (CPU,), needs=CHANNELS_LAST, loss_tolerance=SAME_FP32),
            Rung(
                "matmul_wide", "this suite", (CPU,), needs=CHANNELS_LAST, loss_tolerance=SAME_FP32
            ),
        ),
    )
    attention: str | None = setting(
        one_of("eager", "by_shape", "sdpa", "flash", "cudnn", "efficient", "xformers"),
        None,
        "eager matrices, torch's choice of kernel (sdpa), one of its kernels, or xformers; "
        "by_shape, in the U-Net on a CPU: eager for up to 1024 x 1024 scores of a head, else sdpa",
        seed="sdpa",
        fast=PerDevice(gpu="sdpa", cpu="by_shape"),
        rules=(
            # https://github.com/pytorch/pytorch/issues/169849; the captions have 77 tokens.
            Rule(
                ("cudnn",),
                lambda s: not s.on_gpu or (s.machine.cudnn_version or 0) >= SAFE_CUDNN_VERSION,
                "cuDNN before 9.15.1 reads out of bounds where a length is no multiple of 128",
                "sdpa | flash | efficient | eager, or a torch with cuDNN 9.15.1 or later",
            ),
            Rule(
                ("by_shape",),
                lambda s: not s.on_gpu,
                "the kernels of a GPU are faster than matrices at every shape",
                "sdpa | flash | cudnn | efficient | eager",
            ),
            Rule(
                ("cudnn", "efficient", "xformers"),
                lambda s: s.on_gpu,
                "a CPU has no such attention kernel",
                "sdpa | flash | eager",
            ),
            Rule(
                ("flash", "cudnn"),
                lambda s: not s.on_gpu or s.config.precision in HALF_PRECISIONS,
                "this attention kernel of a GPU takes 16-bit numbers only",
                "sdpa | efficient | eager, or --precision amp_bf16",
            ),
            Rule(
                ("xformers",),
                lambda s: importlib.util.find_spec("xformers") is not None,
                "xformers is not installed",
                "sdpa | flash | cudnn | efficient | eager, or pip install xformers",
            ),
        ),
        rungs=(
            Rung("eager", "diffusers without fused attention", loss_tolerance=SAME_FP32),
            Rung(
                "by_shape",
                "this suite: matrices where torch's kernel for a CPU is slower",
                (CPU,),
                loss_tolerance=SAME_FP32,
            ),
            Rung("flash", f"flash-attention; {NEMO}", loss_tolerance=SAME_FP32),
            Rung("cudnn", f"{MLPERF} v5.0", (GPU,)),
            Rung("efficient", "xFormers; mosaicml/diffusion", (GPU,)),
            Rung("xformers", "xFormers; mosaicml/diffusion-benchmark", (GPU,)),
        ),
    )
    vae_attention: str | None = setting(
        one_of("same", "sdpa", "eager"),
        None,
        "attention of the VAE, whose one head of 512 is too wide for the kernels of flash "
        "attention and cuDNN. same: eager matrices with --attention eager, else torch's choice of "
        "kernel; sdpa: always that choice; eager: always matrices",
        seed="same",
        before="same",
        acts_with=ENCODERS,
        rungs=(Rung("eager", "this suite", loss_tolerance=SAME_FP32),),
    )
    unit_divisions: str | None = setting(
        one_of("keep", "drop"),
        None,
        "the divisions by 1.0 behind each attention and residual block",
        seed="keep",
        fast="drop",
        rungs=(
            Rung(
                "drop", "this suite: diffusers divides by its factors of 1.0", loss_tolerance=EXACT
            ),
        ),
    )

    @property
    def attention_of_vae(self) -> str | None:
        """The implementation of attention in the VAE."""
        return self.attention if self.vae_attention == "same" else self.vae_attention
