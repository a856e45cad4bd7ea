"""Speed-ups of how a step is executed: torch.compile, CUDA graphs, cuDNN, checkpointing."""

from __future__ import annotations

import dataclasses

from sdbench.settings.arithmetic import needs_compiler
from sdbench.settings.kinds import SWITCH, one_of
from sdbench.settings.setting import (
    COMPILED,
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
    on_gpu,
    only_with,
    speed_up,
)

CHECKPOINTING = "Chen et al., arXiv 1604.06174"
# A CUDA graph is captured in this step. The first one sets up what cannot be captured: the
# optimizer's state, the choice of kernels, what is compiled; the second shows that nothing is left.
NUM_GRAPH_STEPS = 3
GRAPH_MODES = ("reduce-overhead", "max-autotune")
NO_GRAPH_MODE = "max-autotune-no-cudagraphs"
WITHOUT_GRAPHS = ("default", NO_GRAPH_MODE)
IS_COMPILED = ("unet", "encoders", "all")
NO_GRAPHS = "a CPU has no CUDA graphs"
NOT_COMPILED = "nothing is compiled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilingSpeedups:
    """What is compiled, captured, tuned and computed twice."""

    GROUP = SPEED

    compile: str | None = speed_up(
        one_of("none", *IS_COMPILED),
        "sub-models that go through torch.compile, with fixed shapes",
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
        "what torch.compile takes at once: a whole sub-model, or a block, whose code all blocks "
        "with the same shapes share",
        seed="model",
        before="model",
        acts_with=COMPILED,
        rules=(
            only_with(("block",), NOT_COMPILED, compile=IS_COMPILED),
            only_with(
                ("block",),
                "CUDA graphs of single blocks were never tried",
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
        "mode of torch.compile; reduce-overhead and max-autotune replay CUDA graphs",
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
                "hold",
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
                "a graph holds no communication between ranks here, and there are several",
            ),
            only_with(
                ON,
                "a graph cannot hold those that this mode of torch.compile replays",
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
        one_of("none", "transformer", "full"),
        "compute activations again in the backward pass: in transformer blocks, or in all blocks",
        seed="none",
        rungs=(Rung("transformer", CHECKPOINTING, EXACT), Rung("full", CHECKPOINTING, EXACT)),
    )
