"""Speed-ups beside the network: optimizer, moving average, copies, allocator, threads."""

from __future__ import annotations

import dataclasses
import shutil

from sdbench.base.host_memory import can_keep_freed_memory
from sdbench.settings.compiling import GRAPH_MODES, WITHOUT_GRAPHS
from sdbench.settings.kinds import POSITIVE, SWITCH, one_of
from sdbench.settings.parallel import WHOLE_WEIGHTS
from sdbench.settings.setting import (
    ANY_NUMBER,
    BF16_WEIGHTS,
    CPU,
    EMA,
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
    on_cpu,
    on_gpu,
    only_with,
    setting,
    speed_up,
)

# An update of the average moves 10.4 GB (3 x 866 M x 4 bytes) for the U-Net of SD2: little beside a
# GPU's step of 2048 images, but much of a CPU's step of one image.
EMA_INTERVAL_BATCHES = PerDevice(gpu=1, cpu=10)
ONE_PASS = ("adamw_one_pass",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSpeedups:
    """How weights and their average are updated, and pixels travel."""

    GROUP = SPEED

    # The seed hands the parameters of the frozen encoders to the optimizer too.
    optimizer: str | None = speed_up(
        one_of("adamw", "adamw_fused", "adamw_one_pass"),
        "torch's default AdamW or its fused kernel; adamw_one_pass, on a CPU: one pass over bf16 "
        "weights, their gradients and fp32 copies; where a step of benchmark.py is one micro-batch "
        "of one rank, the backward pass makes it, and its time counts as backward",
        seed="adamw",
        fast="adamw_fused",
        rules=(
            Rule(ONE_PASS, on_cpu, "the kernel for one pass is for a CPU"),
            only_with(
                ONE_PASS,
                "one pass is over bf16 weights and their copies in fp32, and there are none",
                precision=("bf16",),
                master_weights=("fp32",),
            ),
            only_with(
                ONE_PASS,
                "one pass is over whole weights, and these are shared out",
                sharding=("none",),
            ),
            Rule(
                ONE_PASS,
                lambda s: shutil.which("g++") is not None,
                "the kernel for one pass is compiled by g++, which is not on the PATH",
            ),
        ),
        rungs=(
            Rung("adamw_fused", "torch; NVIDIA apex, FusedAdam", SAME_FP32),
            Rung(
                *ONE_PASS,
                "this suite: bf16 weights with fp32 copies, without passes that only convert",
                BF16_WEIGHTS,
                devices=(CPU,),
                together={"precision": "bf16", "master_weights": "fp32"},
            ),
        ),
    )
    optimizer_params: str | None = speed_up(
        one_of("all", "trainable"),
        "parameters handed to the optimizer",
        seed="all",
        fast="trainable",
        rungs=(Rung("trainable", "mosaicml/diffusion", EXACT),),
    )
    ema_impl: str | None = speed_up(
        one_of("composer", "foreach"),
        "Composer's EMA or torch's foreach average",
        seed="composer",
        fast="foreach",
        acts_with=EMA,
        rules=(
            only_with(
                ("composer",),
                "only Composer can run its own moving average",
                "foreach",
                engine=("composer",),
            ),
            Rule(
                ("composer",),
                lambda s: not s.config.use_ema or s.config.master_weights == "none",
                "Composer's moving average would be that of the bf16 weights, not of their fp32 "
                "copies",
                "foreach",
                lifted_by={"master_weights": ("none",)},
            ),
            only_with(
                ("composer",),
                "Composer's moving average keeps whole weights on each rank",
                "foreach",
                sharding=WHOLE_WEIGHTS,
            ),
        ),
        rungs=(Rung("foreach", "huggingface/diffusers PR 7685"),),
    )
    ema_interval_batches: int | None = speed_up(
        POSITIVE,
        "steps from one update of the average to the next, same half-life",
        seed=1,
        fast=EMA_INTERVAL_BATCHES,
        acts_with=EMA,
        rungs=(Rung(ANY_NUMBER, "MosaicML Composer, EMA(update_interval)"),),
    )
    image_dtype: str | None = speed_up(
        one_of("uint8", "float32"),
        "how pixels travel from worker to device",
        seed="float32",
        fast="uint8",
        acts_with=ENCODERS,
        # 255 levels of float32 pixels become uint8 and float32 again.
        rungs=(Rung("uint8", "this suite", 1e-5),),
    )
    copy_stream: str | None = speed_up(
        one_of("compute", "side"),
        "CUDA stream of the copies to the device; side: the next batch travels during a step",
        seed="compute",
        fast=PerDevice(gpu="side", cpu="compute"),
        rules=(Rule(("side",), on_gpu, "a CPU trains where the batch already is"),),
        rungs=(Rung("side", f"{MLPERF} from v4.0 on", devices=(GPU,)),),
    )
    encode_ahead: bool = speed_up(
        SWITCH,
        "encode the next step's batch on the stream of its copy, while gradients and weights "
        "travel between ranks; with --encoder_batch_size N",
        seed=False,
        acts_with=ENCODERS,
        before=False,
        rules=(
            only_with(
                ON, "only a stream of its own can encode beside a step", copy_stream=("side",)
            ),
            only_with(
                ON,
                "what is encoded within a micro-batch is no part of the next step",
                encoder_batch_size=AllBut(["microbatch"]),
            ),
            Rule(
                ON,
                lambda s: (
                    s.config.compile not in ("encoders", "all")
                    or s.config.compile_mode not in GRAPH_MODES
                ),
                "CUDA graphs of the encoders would replay beside the step's, in the same memory",
                lifted_by={"compile_mode": WITHOUT_GRAPHS},
            ),
            Rule(
                ON,
                lambda s: s.config.step_has_encoders and not s.config.has_subject,
                "the step encodes no images",
            ),
        ),
        rungs=(
            Rung(
                True,
                "this suite",
                devices=(GPU,),
                needs={"copy_stream": "side", "encoder_batch_size": 128},
            ),
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSpeedups:
    """Settings of a CPU."""

    GROUP = SPEED

    cpu_allocator: str | None = speed_up(
        one_of("default", "keep"),
        "what glibc does with freed main memory on a CPU: hand it back, or keep it for the next "
        "step",
        seed="default",
        fast=PerDevice(gpu="default", cpu="keep"),
        rules=(
            Rule(
                ("keep",),
                lambda s: can_keep_freed_memory(),
                "this C library is not glibc and cannot be told to keep freed memory",
            ),
        ),
        rungs=(Rung("keep", "glibc, mallopt(3)", EXACT, devices=(CPU,)),),
    )
    flush_denormals: bool = speed_up(
        SWITCH,
        "let a CPU round numbers below 1e-38 to zero, which is faster",
        seed=False,
        fast=PerDevice(gpu=False, cpu=True),
        rules=(Rule(ON, on_cpu, "a GPU does not get faster by it"),),
        rungs=(Rung(True, "torch.set_flush_denormal", EXACT, devices=(CPU,)),),
    )
    num_threads: int | None = setting(
        POSITIVE,
        None,
        "CPU threads of a rank (default: its share of the cores)",
        rungs=(Rung(ANY_NUMBER, "torch.set_num_threads", SAME_FP32, devices=(CPU,)),),
    )
