"""Speed-ups of how a step is executed: torch.compile, CUDA graphs, cuDNN, checkpointing."""

from __future__ import annotations

import dataclasses

from sdbench.settings.arithmetic import has_cpp_compiler
from sdbench.settings.kinds import SWITCH, one_of
from sdbench.settings.setting import (
    COMPILED,
    EXACT,
    GPU,
    MLPERF,
    SAME_FP32,
    SPEED,
    PerDevice,
    Rule,
    Rung,
    setting,
)

CHECKPOINTING = "Chen et al., arXiv 1604.06174"
# A CUDA graph is captured in this step. The first one sets up what cannot be captured: the
# optimizer's state, the choice of kernels, what is compiled; the second shows that nothing is left.
NUM_GRAPH_STEPS = 3
GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilingSpeedups:
    """What is compiled, captured, tuned and computed twice."""

    GROUP = SPEED

    compile: str | None = setting(
        one_of("none", "unet", "encoders", "all"),
        None,
        "sub-models that go through torch.compile, with fixed shapes",
        seed="none",
        fast=PerDevice(gpu="all", cpu="none"),
        rules=(
            Rule(
                ("unet", "encoders", "all"),
                has_cpp_compiler,
                "torch.compile needs a C++ compiler on the PATH, and there is none",
                "none, or an installed g++ or clang++",
            ),
            Rule(
                ("encoders",),
                lambda s: s.config.step_has_encoders,
                "a step on latents has no encoders",
                "none | unet",
            ),
        ),
        rungs=(
            Rung("unet", f"torch.compile; {MLPERF} from v4.0 on", loss_tolerance=SAME_FP32),
            Rung("encoders", "torch.compile", loss_tolerance=SAME_FP32),
            Rung("all", "torch.compile", loss_tolerance=SAME_FP32),
        ),
    )
    compile_unit: str | None = setting(
        one_of("model", "block"),
        None,
        "what torch.compile takes at once: a whole sub-model, or a block, whose code all blocks "
        "with the same shapes share",
        seed="model",
        before="model",
        acts_with=COMPILED,
        rules=(
            Rule(
                ("block",),
                lambda s: s.config.compile != "none",
                "nothing is compiled",
                "model, or --compile unet | encoders | all",
            ),
            Rule(
                ("block",),
                lambda s: s.config.compile_mode not in GRAPH_MODES,
                "CUDA graphs of single blocks were never tried",
                "model, or --compile_mode default | max-autotune-no-cudagraphs",
            ),
        ),
        rungs=(
            Rung(
                "block",
                "diffusers, compile_repeated_blocks",
                together={"compile": "all"},
                loss_tolerance=SAME_FP32,
            ),
        ),
    )
    compile_mode: str | None = setting(
        one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        None,
        "mode of torch.compile; reduce-overhead and max-autotune replay CUDA graphs",
        seed="default",
        acts_with=COMPILED,
        rules=(
            Rule(
                ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
                lambda s: s.config.compile != "none",
                "nothing is compiled",
                "default, or --compile unet | encoders | all",
            ),
            Rule(
                GRAPH_MODES,
                lambda s: s.on_gpu,
                "a CPU has no CUDA graphs",
                "default | max-autotune-no-cudagraphs",
            ),
        ),
        rungs=(
            Rung(
                "reduce-overhead",
                "torch.compile with CUDA graphs",
                (GPU,),
                together={"compile": "unet"},
            ),
            Rung("reduce-overhead", "the same", (GPU,), together={"compile": "all"}),
        ),
    )
    cuda_graph: bool = setting(
        SWITCH,
        False,
        "replay a whole training step as one CUDA graph (--engine torch)",
        seed=False,
        rules=(
            Rule((True,), lambda s: s.on_gpu, "a CPU has no CUDA graphs", "--no_cuda_graph"),
            Rule(
                (True,),
                lambda s: s.config.engine == "torch",
                "Composer's loop asks the host for a decision in each step, which a graph cannot "
                "hold",
                "--no_cuda_graph, or --engine torch",
            ),
            Rule(
                (True,),
                lambda s: s.config.precision != "amp_fp16",
                "the loss scale of fp16 is decided on the host in each step",
                "--no_cuda_graph, or --precision amp_bf16 | bf16",
            ),
            Rule(
                (True,),
                lambda s: (
                    s.config.optimizer == "adamw_fused" and s.config.optimizer_params == "trainable"
                ),
                "only the fused AdamW over the trained parameters can be captured",
                "--no_cuda_graph, or --optimizer adamw_fused --optimizer_params trainable",
            ),
            Rule(
                (True,),
                lambda s: s.ranks.world_size == 1,
                "a graph holds no communication between ranks here",
                "--no_cuda_graph, or one rank",
            ),
            Rule(
                (True,),
                lambda s: s.config.compile_mode not in GRAPH_MODES,
                "a graph cannot hold those that this mode of torch.compile replays",
                "--no_cuda_graph, or --compile_mode default | max-autotune-no-cudagraphs",
            ),
            Rule(
                (True,),
                lambda s: (
                    s.config.warmup_batches is None or s.config.warmup_batches >= NUM_GRAPH_STEPS
                ),
                f"a graph is captured in step {NUM_GRAPH_STEPS}, which would be a measured one",
                f"--no_cuda_graph, or --warmup_batches {NUM_GRAPH_STEPS} and more",
            ),
        ),
        rungs=(
            Rung(
                True,
                f"{MLPERF} from v4.0 on: the full iteration",
                (GPU,),
                needs={"engine": "torch"},
            ),
        ),
    )
    cudnn_benchmark: bool = setting(
        SWITCH,
        False,
        "let cuDNN time its convolution kernels and keep the fastest",
        seed=False,
        fast=PerDevice(gpu=True, cpu=False),
        rules=(
            Rule((True,), lambda s: s.on_gpu, "a CPU does not use cuDNN", "--no_cudnn_benchmark"),
        ),
        rungs=(Rung(True, "torch", (GPU,)),),
    )
    activation_checkpointing: str | None = setting(
        one_of("none", "transformer", "full"),
        None,
        "compute activations again in the backward pass: in transformer blocks, or in all blocks",
        seed="none",
        rungs=(
            Rung("transformer", CHECKPOINTING, loss_tolerance=EXACT),
            Rung("full", CHECKPOINTING, loss_tolerance=EXACT),
        ),
    )
