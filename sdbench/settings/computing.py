"""Speed-ups of the network: number formats, layout, kernels, torch.compile, CUDA graphs."""

from __future__ import annotations

import dataclasses

from sdbench.settings.kinds import SWITCH, one_of, positive_or
from sdbench.settings.parallel import WHOLE_WEIGHTS, WITHOUT_GRAPHS, has_cpp_compiler
from sdbench.settings.setting import (
    ANY_NUMBER,
    BF16,
    BF16_WEIGHTS,
    COMPILED,
    CPU,
    ENCODERS,
    EXACT,
    GPU,
    MLPERF,
    ON,
    SAME_FP32,
    SPEED,
    AllBut,
    PerDevice,
    Rule,
    Rung,
    Situation,
    needs_package,
    on_cpu,
    on_gpu,
    only_with,
    speed_up,
)

MILABENCH = "mila-iqia/milabench"
NEMO = "NVIDIA NeMo, its table of ControlNet on one A100"
HALF_PRECISIONS = ("amp_fp16", "amp_bf16", "bf16")
CHANNELS_LAST = {"memory_format": "channels_last"}
# cuDNN 9.15.1, in the form of torch.backends.cudnn.version().
SAFE_CUDNN_VERSION = 91501
CHECKPOINTING = "Chen et al., arXiv 1604.06174"
# A CUDA graph is captured in this step. The first step sets up what cannot be captured (the
# choice of kernels, compiled code); the second shows that all is set up.
NUM_GRAPH_STEPS = 3
GRAPH_MODES = ("reduce-overhead", "max-autotune")
NO_GRAPH_MODE = "max-autotune-no-cudagraphs"
IS_COMPILED = ("unet", "encoders", "all")
NO_GRAPHS = "a CPU has no CUDA graphs"
NOT_COMPILED = "nothing is compiled"


def needs_compiler(*values: str) -> Rule:
    """The rule of values that Inductor compiles."""
    return Rule(values, has_cpp_compiler, "it needs a compiler: g++ or clang++ on the PATH")


def has_fast_bf16(situation: Situation) -> bool:
    """Whether the device has instructions for bf16."""
    return situation.machine.has_fast_bf16


NO_FAST_BF16 = "the device has no bf16 instructions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputingSpeedups:
    """How the numbers of a step are stored and computed."""

    GROUP = SPEED

    # mosaicml/diffusion-benchmark @c7f3cff leaves precision to Composer, whose default is amp_fp16
    # on a GPU and fp32 on a CPU (composer/trainer/trainer.py, 0.32.1).
    precision: str | None = speed_up(
        one_of("fp32", "tf32", "amp_fp16", "amp_bf16", "bf16"),
        "number format of the training step; bf16 also keeps weights and gradients in bf16 (with "
        "--lora_rank only the frozen weights)",
        seed=PerDevice(gpu="amp_fp16", cpu="fp32"),
        fast="amp_bf16",
        rules=(
            Rule(("tf32", "amp_fp16"), on_gpu, "a CPU cannot train in this precision", "fp32"),
            Rule(
                ("tf32", "amp_bf16", "bf16"),
                lambda s: on_cpu(s) or s.config.precision in s.machine.supported_precisions(),
                "this precision takes a GPU of compute capability 8.0 or later",
                "amp_fp16",
            ),
            Rule(("amp_bf16", "bf16"), has_fast_bf16, NO_FAST_BF16, "fp32", is_advice=True),
        ),
        rungs=(
            Rung("amp_bf16", f"{MILABENCH}, diffusion-single", BF16),
            Rung("tf32", "torch", devices=(GPU,)),
            Rung("fp32", "torch's default", devices=(GPU,)),
            Rung(
                "bf16",
                f"{MLPERF}: half-precision weights, Adam with fp32 copies",
                BF16_WEIGHTS,
                together={"master_weights": "fp32"},
            ),
            Rung("bf16", "the same without the copies", BF16_WEIGHTS),
        ),
        is_everyday=True,
    )
    master_weights: str | None = speed_up(
        one_of("none", "fp32"),
        "fp32: the optimizer updates an fp32 copy of bf16 weights, with fp32 state; none: no copy",
        seed="none",
        rules=(
            only_with(("fp32",), "only bf16 weights need a copy in fp32", precision=("bf16",)),
            only_with(
                ("fp32",),
                "the weights of LoRA or of a token are already in fp32",
                lora_rank=(None,),
                learned_token=(None,),
            ),
        ),
    )
    linear_dtype: str | None = speed_up(
        one_of("same", "fp8"),
        "number format of the products of linear layers in transformer blocks: that of "
        "--precision, or fp8 with a scale for each tensor; a CPU only rounds to it, more slowly",
        seed="same",
        rules=(
            needs_package(("fp8",), "torchao"),
            Rule(
                ("fp8",),
                lambda s: float(s.machine.compute_capability or "inf") >= 8.9,
                "fp8 products take a GPU of compute capability 8.9 or later",
            ),
            only_with(("fp8",), "fp8 products give bf16", precision=("amp_bf16", "bf16")),
            only_with(("fp8",), "layers beside LoRA are not converted", lora_rank=(None,)),
        ),
        rungs=(Rung("fp8", "torchao.float8", BF16_WEIGHTS, needs={"precision": "amp_bf16"}),),
    )
    encoder_dtype: str | None = speed_up(
        one_of("fp32", "fp16", "bf16"),
        "number format of the weights of the frozen VAE and text encoder",
        seed="fp32",
        fast="bf16",
        acts_with=ENCODERS,
        rules=(
            Rule(("fp16",), on_gpu, "a CPU cannot run the encoders in this type"),
            Rule(
                ("bf16",),
                has_fast_bf16,
                NO_FAST_BF16,
                PerDevice(gpu="fp16", cpu="fp32"),
                is_advice=True,
            ),
        ),
        rungs=(
            Rung("bf16", f"{MILABENCH}; mosaicml/diffusion in fp16", BF16),
            Rung("fp16", "mosaicml/diffusion, encode_latents_in_fp16", devices=(GPU,)),
        ),
    )
    encoder_batch_size: int | str | None = speed_up(
        positive_or("microbatch"),
        "N: encode the rank's whole batch before its micro-batches, N images at a time; "
        "microbatch: encode within each micro-batch",
        seed="microbatch",
        acts_with=ENCODERS,
        rungs=(Rung(ANY_NUMBER, "this suite", SAME_FP32),),
    )
    memory_format: str | None = speed_up(
        one_of("contiguous", "channels_last"),
        "layout of image-like tensors",
        seed="contiguous",
        fast="channels_last",
        rungs=(Rung("channels_last", NEMO, SAME_FP32),),
    )
    keep_layout: bool = speed_up(
        SWITCH,
        "keep images channels_last in the U-Net, where diffusers makes them contiguous: after "
        "transformers, in shortcuts, and before upsampling of 64 images and more",
        seed=False,
        fast=PerDevice(gpu=False, cpu=True),
        rules=(
            only_with(
                ON, "contiguous images have no layout to keep", memory_format=("channels_last",)
            ),
        ),
        rungs=(Rung(True, "this suite", SAME_FP32, needs=CHANNELS_LAST),),
    )
    group_norm: str | None = speed_up(
        one_of("torch", "fused"),
        "torch's GroupNorm, or compiled code for it and the SiLU after it, which keeps the layout",
        seed="torch",
        rules=(needs_compiler("fused"),),
        rungs=(
            Rung("fused", f"NVIDIA apex, contrib.group_norm; {NEMO}", SAME_FP32),
            Rung("fused", f"{NEMO}: both together", SAME_FP32, together=CHANNELS_LAST),
        ),
    )
    convolution: str | None = speed_up(
        one_of("torch", "matmul"),
        "torch's convolutions, or matrix products for convolutions of the U-Net with at least "
        "twice as many output channels as pixels in a micro-batch",
        seed="torch",
        fast=PerDevice(gpu="torch", cpu="matmul"),
        rules=(
            only_with(
                ("matmul",),
                "matrix products need unsharded weights in channels_last",
                memory_format=("channels_last",),
                sharding=WHOLE_WEIGHTS,
            ),
        ),
        rungs=(Rung("matmul", "this suite", SAME_FP32, devices=(CPU,), needs=CHANNELS_LAST),),
    )
    attention: str | None = speed_up(
        one_of("eager", "by_shape", "sdpa", "flash", "cudnn", "efficient", "xformers"),
        "matrix products (eager), torch's choice of kernel (sdpa), one of its kernels, xformers; "
        "by_shape, in the U-Net on a CPU: eager up to 1024 x 1024 scores per head, else sdpa",
        seed="sdpa",
        fast=PerDevice(gpu="sdpa", cpu="by_shape"),
        rules=(
            # https://github.com/pytorch/pytorch/issues/169849; the captions have 77 tokens.
            Rule(
                ("cudnn",),
                lambda s: on_cpu(s) or (s.machine.cudnn_version or 0) >= SAFE_CUDNN_VERSION,
                "cuDNN before 9.15.1 reads out of bounds if a length is not a multiple of 128",
            ),
            Rule(("by_shape",), on_cpu, "a GPU's kernels beat matrix products at every shape"),
            Rule(("cudnn", "efficient", "xformers"), on_gpu, "a CPU has no such attention kernel"),
            Rule(
                ("flash", "cudnn"),
                lambda s: on_cpu(s) or s.config.precision in HALF_PRECISIONS,
                "on a GPU this attention kernel takes 16-bit numbers only",
                lifted_by={"precision": HALF_PRECISIONS},
            ),
            needs_package(("xformers",), "xformers", "pip install xformers"),
        ),
        rungs=(
            Rung("eager", "diffusers without fused attention", SAME_FP32),
            Rung(
                "by_shape",
                "this suite: matrices where torch's kernel for a CPU is slower",
                SAME_FP32,
                devices=(CPU,),
            ),
            Rung("flash", f"flash-attention; {NEMO}", SAME_FP32),
            Rung("cudnn", f"{MLPERF} v5.0", devices=(GPU,)),
            Rung("efficient", "xFormers; mosaicml/diffusion", devices=(GPU,)),
            Rung("xformers", "xFormers; mosaicml/diffusion-benchmark", devices=(GPU,)),
        ),
    )
    vae_attention: str | None = speed_up(
        one_of("same", "sdpa", "eager"),
        "attention of the VAE, whose head size of 512 is too large for flash attention and cuDNN; "
        "same: eager with --attention eager, else sdpa",
        seed="same",
        acts_with=ENCODERS,
        rungs=(Rung("eager", "this suite", SAME_FP32),),
    )
    unit_divisions: str | None = speed_up(
        one_of("keep", "drop"),
        "keep or drop diffusers' divisions by 1.0 after each attention and residual block",
        seed="keep",
        fast="drop",
        rungs=(Rung("drop", "this suite: diffusers divides by its factors of 1.0", EXACT),),
    )
    compile: str | None = speed_up(
        one_of("none", *IS_COMPILED),
        "sub-models that torch.compile compiles, with fixed shapes",
        seed="none",
        fast=PerDevice(gpu="all", cpu="none"),
        rules=(
            needs_compiler(*IS_COMPILED),
            Rule(
                ("encoders",),
                lambda s: s.config.step_has_encoders,
                "a step on latents has no encoders",
            ),
        ),
        rungs=(
            Rung("unet", f"torch.compile; {MLPERF} from v4.0 on", SAME_FP32),
            Rung("encoders", "torch.compile", SAME_FP32),
            Rung("all", "torch.compile", SAME_FP32),
        ),
    )
    compile_unit: str | None = speed_up(
        one_of("model", "block"),
        "what torch.compile compiles at a time: a whole sub-model, or a block, whose code is "
        "shared by all blocks with the same shapes",
        seed="model",
        acts_with=COMPILED,
        rules=(
            only_with(("block",), NOT_COMPILED, compile=IS_COMPILED),
            only_with(
                ("block",),
                "CUDA graphs of single blocks were never tested",
                compile_mode=WITHOUT_GRAPHS,
            ),
        ),
        rungs=(
            Rung(
                "block",
                "diffusers, compile_repeated_blocks",
                SAME_FP32,
                together={"compile": "all"},
            ),
        ),
    )
    compile_mode: str | None = speed_up(
        one_of("default", *GRAPH_MODES, NO_GRAPH_MODE),
        "mode of torch.compile; reduce-overhead and max-autotune replay CUDA graphs; with either "
        "max-autotune, --cudnn_benchmark times all of cuDNN's plans and not ten",
        seed="default",
        acts_with=COMPILED,
        rules=(
            only_with((*GRAPH_MODES, NO_GRAPH_MODE), NOT_COMPILED, compile=IS_COMPILED),
            Rule(GRAPH_MODES, on_gpu, NO_GRAPHS),
        ),
        rungs=(
            Rung(
                "reduce-overhead",
                "torch.compile with CUDA graphs",
                devices=(GPU,),
                together={"compile": "unet"},
            ),
            Rung("reduce-overhead", "the same", devices=(GPU,), together={"compile": "all"}),
        ),
    )
    cuda_graph: bool = speed_up(
        SWITCH,
        "replay a whole training step as one CUDA graph (--engine torch)",
        seed=False,
        rules=(
            Rule(ON, on_gpu, NO_GRAPHS),
            only_with(
                ON,
                "Composer's loop asks the host for a decision in each step, which a graph cannot "
                "contain",
                engine=("torch",),
            ),
            only_with(
                ON,
                "the loss scale of fp16 is decided on the host in each step",
                precision=AllBut(["amp_fp16"]),
            ),
            only_with(
                ON,
                "only the fused AdamW over the trained parameters can be captured",
                optimizer=("adamw_fused",),
                optimizer_params=("trainable",),
            ),
            Rule(
                ON,
                lambda s: s.ranks.world_size == 1,
                "a CUDA graph of several ranks is not supported",
            ),
            only_with(
                ON,
                "this mode of torch.compile replays CUDA graphs, which a graph cannot contain",
                compile_mode=WITHOUT_GRAPHS,
            ),
            only_with(
                ON,
                f"a graph is captured in step {NUM_GRAPH_STEPS}, which would be a measured one",
                warmup_batches=AllBut(range(NUM_GRAPH_STEPS)),
            ),
        ),
        rungs=(
            Rung(
                True,
                f"{MLPERF} from v4.0 on: the full iteration",
                devices=(GPU,),
                needs={"engine": "torch"},
            ),
        ),
    )
    cudnn_benchmark: bool = speed_up(
        SWITCH,
        "let cuDNN time its convolution kernels and keep the fastest",
        seed=False,
        fast=PerDevice(gpu=True, cpu=False),
        rules=(Rule(ON, on_gpu, "a CPU does not use cuDNN"),),
        rungs=(Rung(True, "torch", devices=(GPU,)),),
    )
    activation_checkpointing: str | None = speed_up(
        one_of("none", "cheap", "transformer", "full"),
        "recompute activations in the backward pass, in transformer blocks or in all blocks; "
        "cheap: in all blocks, but for results of convolutions, matrix products and attention",
        seed="none",
        rungs=(
            Rung("cheap", "torch, create_selective_checkpoint_contexts; torchtitan", EXACT),
            Rung("transformer", CHECKPOINTING, EXACT),
            Rung("full", CHECKPOINTING, EXACT),
        ),
    )

    @property
    def attention_of_vae(self) -> str | None:
        """The implementation of attention in the VAE."""
        return self.attention if self.vae_attention == "same" else self.vae_attention
