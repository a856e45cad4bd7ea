"""Speed-ups beside the network: optimizer, moving average, copies, allocator, threads."""

from __future__ import annotations

import dataclasses
import shutil

from sdbench.base.host_memory import can_keep_freed_memory
from sdbench.settings.compiling import GRAPH_MODES
from sdbench.settings.kinds import POSITIVE, SWITCH, one_of
from sdbench.settings.parallel import WHOLE_WEIGHTS_TEXT, is_ddp
from sdbench.settings.setting import (
    ANY_NUMBER,
    BF16_WEIGHTS,
    CPU,
    EMA,
    ENCODERS,
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

# An update of the average moves 10.4 GB (3 x 866 M x 4 bytes) for the U-Net of SD2: little beside a
# GPU's step of 2048 images, but much of a CPU's step of one image.
EMA_INTERVAL_BATCHES = PerDevice(gpu=1, cpu=10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSpeedups:
    """How weights and their average are updated, and pixels travel."""

    GROUP = SPEED

    # The seed hands the parameters of the frozen encoders to the optimizer too.
    optimizer: str | None = setting(
        one_of("adamw", "adamw_fused", "adamw_one_pass"),
        None,
        "torch's default AdamW or its fused kernel; adamw_one_pass, on a CPU: one pass over bf16 "
        "weights, their gradients and fp32 copies; where a step of benchmark.py is one micro-batch "
        "of one rank, the backward pass makes it, and its time counts as backward",
        seed="adamw",
        fast="adamw_fused",
        rules=(
            Rule(
                ("adamw_one_pass",),
                lambda s: not s.on_gpu,
                "the kernel for one pass is for a CPU",
                "adamw | adamw_fused",
            ),
            Rule(
                ("adamw_one_pass",),
                lambda s: s.config.master_weights == "fp32",
                "one pass is over bf16 weights and their copies in fp32, and there are none",
                "adamw | adamw_fused, or --precision bf16 --master_weights fp32",
            ),
            Rule(
                ("adamw_one_pass",),
                lambda s: s.config.sharding == "none",
                "one pass is over whole weights, and these are shared out",
                "adamw | adamw_fused, or --sharding none",
            ),
            Rule(
                ("adamw_one_pass",),
                lambda s: shutil.which("g++") is not None,
                "the kernel for one pass is compiled, and there is no g++ on the PATH",
                "adamw | adamw_fused, or an installed g++",
            ),
        ),
        rungs=(
            Rung("adamw_fused", "torch; NVIDIA apex, FusedAdam", loss_tolerance=SAME_FP32),
            Rung(
                "adamw_one_pass",
                "this suite: bf16 weights with fp32 copies, without passes that only convert",
                (CPU,),
                together={"precision": "bf16", "master_weights": "fp32"},
                loss_tolerance=BF16_WEIGHTS,
            ),
        ),
    )
    optimizer_params: str | None = setting(
        one_of("all", "trainable"),
        None,
        "parameters handed to the optimizer",
        seed="all",
        fast="trainable",
        rungs=(Rung("trainable", "mosaicml/diffusion", loss_tolerance=EXACT),),
    )
    ema_impl: str | None = setting(
        one_of("composer", "foreach"),
        None,
        "Composer's EMA or torch's foreach average",
        seed="composer",
        fast="foreach",
        acts_with=EMA,
        rules=(
            Rule(
                ("composer",),
                lambda s: s.config.engine == "composer",
                "only Composer can run its own moving average",
                "foreach, or --engine composer",
                "foreach",
            ),
            Rule(
                ("composer",),
                lambda s: not s.config.use_ema or s.config.master_weights == "none",
                "Composer's moving average would be that of the bf16 weights, not of their fp32 "
                "copies",
                "foreach, or --master_weights none",
                "foreach",
            ),
            Rule(
                ("composer",),
                is_ddp,
                "Composer's moving average keeps whole weights on each rank",
                f"foreach, or --sharding {WHOLE_WEIGHTS_TEXT}",
                "foreach",
            ),
        ),
        rungs=(Rung("foreach", "huggingface/diffusers PR 7685"),),
    )
    ema_interval_batches: int | None = setting(
        POSITIVE,
        None,
        "steps from one update of the average to the next, same half-life",
        seed=1,
        fast=EMA_INTERVAL_BATCHES,
        acts_with=EMA,
        rungs=(Rung(ANY_NUMBER, "MosaicML Composer, EMA(update_interval)"),),
    )
    image_dtype: str | None = setting(
        one_of("uint8", "float32"),
        None,
        "how pixels travel from worker to device",
        seed="float32",
        fast="uint8",
        acts_with=ENCODERS,
        # 255 levels of float32 pixels become uint8 and float32 again.
        rungs=(Rung("uint8", "this suite", loss_tolerance=1e-5),),
    )
    copy_stream: str | None = setting(
        one_of("compute", "side"),
        None,
        "CUDA stream of the copies to the device; side: the next batch travels during a step",
        seed="compute",
        fast=PerDevice(gpu="side", cpu="compute"),
        rules=(
            Rule(
                ("side",), lambda s: s.on_gpu, "a CPU trains where the batch already is", "compute"
            ),
        ),
        rungs=(Rung("side", f"{MLPERF} from v4.0 on", (GPU,)),),
    )
    encode_ahead: bool = setting(
        SWITCH,
        False,
        "encode the next step's batch on the stream of its copy, while gradients and weights "
        "travel between ranks; with --encoder_batch_size N",
        seed=False,
        acts_with=ENCODERS,
        before=False,
        rules=(
            Rule(
                (True,),
                lambda s: s.config.copy_stream == "side",
                "only a stream of its own can encode beside a step",
                "--no_encode_ahead, or on a GPU --copy_stream side",
            ),
            Rule(
                (True,),
                lambda s: s.config.encoder_batch_size != "microbatch",
                "what is encoded within a micro-batch is no part of the next step",
                "--no_encode_ahead, or --encoder_batch_size with the images of a call",
            ),
            Rule(
                (True,),
                lambda s: (
                    s.config.compile not in ("encoders", "all")
                    or s.config.compile_mode not in GRAPH_MODES
                ),
                "CUDA graphs of the encoders would replay beside the step's, in the same memory",
                "--no_encode_ahead, or --compile_mode default | max-autotune-no-cudagraphs",
            ),
            Rule(
                (True,),
                lambda s: s.config.step_has_encoders and not s.config.has_subject,
                "the step encodes no images",
                "--no_encode_ahead",
            ),
        ),
        rungs=(
            Rung(
                True,
                "this suite",
                (GPU,),
                needs={"copy_stream": "side", "encoder_batch_size": 128},
            ),
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSpeedups:
    """Settings of a CPU."""

    GROUP = SPEED

    cpu_allocator: str | None = setting(
        one_of("default", "keep"),
        None,
        "what glibc does with freed main memory on a CPU: hand it back, or keep it for the next "
        "step",
        seed="default",
        fast=PerDevice(gpu="default", cpu="keep"),
        rules=(
            Rule(
                ("keep",),
                lambda s: can_keep_freed_memory(),
                "this C library is not glibc and cannot be told to keep freed memory",
                "default",
            ),
        ),
        rungs=(Rung("keep", "glibc, mallopt(3)", (CPU,), loss_tolerance=EXACT),),
    )
    flush_denormals: bool = setting(
        SWITCH,
        False,
        "let a CPU round numbers below 1e-38 to zero, which is faster",
        seed=False,
        fast=PerDevice(gpu=False, cpu=True),
        rules=(
            Rule(
                (True,),
                lambda s: not s.on_gpu,
                "a GPU does not get faster by it",
                "--no_flush_denormals",
            ),
        ),
        rungs=(Rung(True, "torch.set_flush_denormal", (CPU,), loss_tolerance=EXACT),),
    )
    num_threads: int | None = setting(
        POSITIVE,
        None,
        "CPU threads of a rank (default: its share of the cores)",
        rungs=(Rung(ANY_NUMBER, "torch.set_num_threads", (CPU,), loss_tolerance=SAME_FP32),),
    )
