"""Speed-ups beside the network: its update, its average, copies, ranks, allocator, threads."""

from __future__ import annotations

import dataclasses
import shutil

from sdbench.base.host_memory import can_keep_freed_memory
from sdbench.settings.kinds import POSITIVE, SWITCH, one_of
from sdbench.settings.setting import (
    ANY_NUMBER,
    BF16,
    CPU,
    EMA,
    ENCODERS,
    EXACT,
    GPU,
    MLPERF,
    ON,
    RANKS,
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
    setting,
    speed_up,
)

FSDP = ("grad_op", "full", "hybrid", "hybrid_grad_op")
ZERO1 = ("zero1", "hybrid_zero1")
# With these each rank holds all weights.
WHOLE_WEIGHTS = ("none", *ZERO1)
SHARED = (*ZERO1, *FSDP)
# Kinds of `SHARED` that shard within each machine and replicate over the machines.
WITHIN_NODE = ("hybrid", "hybrid_grad_op", "hybrid_zero1")
NODE_MIB, SEVERAL_NODES_MIB = 25, 200
# FSDP that keeps the gathered weights until the step ends.
GATHERED_ONCE = ("grad_op", "hybrid_grad_op")
TORCH_FSDP = "torch FSDP; arXiv 2304.11277"
TRAINABLE = {"optimizer_params": "trainable"}
MASTERS = {**TRAINABLE, "precision": "bf16", "master_weights": "fp32"}
# Modes of torch.compile.
WITHOUT_GRAPHS = ("default", "max-autotune-no-cudagraphs")
# An update of the average moves 10.4 GB (3 x 866 M x 4 bytes) for the U-Net of SD2: little beside a
# GPU's step of 2048 images, but much of a CPU's step of one image.
EMA_INTERVAL_BATCHES = PerDevice(gpu=1, cpu=10)
# torchao's AdamW, by the bits of a number of its state.
LOW_BIT_ADAMW = {"adamw_8bit": 8, "adamw_4bit": 4}
NO_DDP = "sharded weights are trained without DDP"


def _microbatch_has_encoders(situation: Situation) -> bool:
    config = situation.config
    if "text_encoder" in config.trained_parts:
        return True
    encodes_images = config.step_has_encoders and not config.has_subject
    return encodes_images and config.encoder_batch_size == "microbatch"


def has_cpp_compiler(situation: Situation | None = None) -> bool:
    """Whether Inductor can compile: it needs C++ on a CPU and, around Triton kernels, on a GPU."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def _keeps_all_bits(situation: Situation) -> bool:
    config = situation.config
    return config.frozen_bits == "same" and config.optimizer not in LOW_BIT_ADAMW


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdatingSpeedups:
    """Updates of weights and their average, and transfers between devices and ranks."""

    GROUP = SPEED

    # The seed hands the parameters of the frozen encoders to the optimizer too.
    optimizer: str | None = speed_up(
        one_of("adamw", "adamw_fused", *LOW_BIT_ADAMW),
        "torch's default AdamW or its fused kernel; adamw_8bit, adamw_4bit: torchao's, whose state "
        "has 8 or 4 bits a number; bf16 weights without copies are then rounded at random, which "
        "loses no update on average",
        seed="adamw",
        fast="adamw_fused",
        rules=(
            needs_package(LOW_BIT_ADAMW, "torchao"),
            only_with(
                LOW_BIT_ADAMW, "a state of few bits is not sharded by FSDP", sharding=WHOLE_WEIGHTS
            ),
            Rule(
                LOW_BIT_ADAMW,
                lambda s: on_cpu(s) or has_cpp_compiler(s),
                "torchao compiles its update for a GPU: it needs g++ or clang++ on the PATH",
            ),
        ),
        rungs=(
            Rung("adamw_fused", "torch; NVIDIA apex, FusedAdam", SAME_FP32),
            *(
                Rung(name, "torchao; bitsandbytes (arXiv 2110.02861, 2309.01507)", BF16)
                for name in LOW_BIT_ADAMW
            ),
        ),
    )
    update_in_backward: bool = speed_up(
        SWITCH,
        "update each weight as soon as its gradient is there, and free the gradient: saves the "
        "memory of all gradients",
        seed=False,
        rules=(
            Rule(
                ON,
                lambda s: s.ranks.world_size == 1,
                "gradients of several ranks are averaged before the update",
            ),
            only_with(
                ON,
                "the loss scale of fp16 is decided by all gradients",
                precision=AllBut(["amp_fp16"]),
            ),
            Rule(
                ON,
                lambda s: not s.config.cuda_graph,
                "a CUDA graph with updates in its backward pass was never tested",
                others=("cuda_graph",),
            ),
            Rule(
                ON,
                lambda s: getattr(s.config, "clip_norm", None) is None,
                "gradients are clipped by the norm of all of them",
                others=("clip_norm",),
            ),
            Rule(
                ON,
                lambda s: getattr(s.config, "on_bad_loss", "stop") != "skip",
                "an update that has been made cannot be skipped",
                others=("on_bad_loss",),
            ),
        ),
        rungs=(Rung(True, "torch, register_post_accumulate_grad_hook"),),
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
                "Composer's moving average needs Composer's engine and unsharded weights",
                "foreach",
                engine=("composer",),
                sharding=WHOLE_WEIGHTS,
            ),
            Rule(
                ("composer",),
                lambda s: not s.config.use_ema or s.config.master_weights == "none",
                "Composer's moving average would be that of the bf16 weights, not of their fp32 "
                "copies",
                "foreach",
                lifted_by={"master_weights": ("none",)},
            ),
        ),
        rungs=(Rung("foreach", "huggingface/diffusers PR 7685"),),
    )
    ema_interval_batches: int | None = speed_up(
        POSITIVE,
        "steps between updates of the average; the half-life stays the same",
        seed=1,
        fast=EMA_INTERVAL_BATCHES,
        acts_with=EMA,
        rungs=(Rung(ANY_NUMBER, "MosaicML Composer, EMA(update_interval)"),),
    )
    image_dtype: str | None = speed_up(
        one_of("uint8", "float32"),
        "number format of pixels on their way from worker to device",
        seed="float32",
        fast="uint8",
        acts_with=ENCODERS,
        # 255 levels of float32 pixels become uint8 and float32 again.
        rungs=(Rung("uint8", "this suite", 1e-5),),
    )
    copy_stream: str | None = speed_up(
        one_of("compute", "side"),
        "CUDA stream of the copies to the device; side: copy the next batch during a step",
        seed="compute",
        fast=PerDevice(gpu="side", cpu="compute"),
        rules=(Rule(("side",), on_gpu, "a CPU needs no copies to a device"),),
        rungs=(Rung("side", f"{MLPERF} from v4.0 on", devices=(GPU,)),),
    )
    encode_ahead: bool = speed_up(
        SWITCH,
        "encode the next step's batch on the copy stream while the ranks exchange gradients and "
        "weights; with --encoder_batch_size N",
        seed=False,
        acts_with=ENCODERS,
        rules=(
            only_with(ON, "encoding during a step needs a separate stream", copy_stream=("side",)),
            only_with(
                ON,
                "encoding within a micro-batch cannot run ahead of the step",
                encoder_batch_size=AllBut(["microbatch"]),
            ),
            Rule(
                ON,
                lambda s: (
                    s.config.compile not in ("encoders", "all")
                    or s.config.compile_mode in WITHOUT_GRAPHS
                ),
                "CUDA graphs of the encoders would replay during the step's, in the same memory",
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
    sharding: str | None = speed_up(
        one_of("none", "zero1", "grad_op", "full", "hybrid", "hybrid_grad_op", "hybrid_zero1"),
        "what is sharded over the ranks: optimizer state (zero1), also gradients and, between "
        "steps, weights (grad_op), also weights within a step (full); or full, grad_op or zero1 "
        "within each machine (hybrid, hybrid_grad_op, hybrid_zero1)",
        seed="none",
        acts_with=RANKS,
        rules=(
            Rule(
                SHARED,
                lambda s: s.ranks.world_size > 1,
                "sharding needs several ranks (composer -n 2, torchrun --nproc_per_node 2)",
            ),
            Rule(
                WITHIN_NODE,
                lambda s: s.ranks.num_nodes > 1 and s.ranks.local_world_size > 1,
                "it shards within each machine, and needs several machines with several ranks each",
            ),
            only_with(
                FSDP,
                "sharded weights with a loss scale are not supported",
                precision=AllBut(["amp_fp16"]),
            ),
            Rule(
                FSDP,
                lambda s: s.config.lora_rank is None or s.config.precision != "bf16",
                "sharded weights have one type, and LoRA is in fp32 beside bf16 weights",
                lifted_by={"precision": AllBut(["bf16"])},
            ),
            only_with(
                SHARED,
                "a sharded optimizer takes trained parameters only",
                optimizer_params=("trainable",),
            ),
        ),
        rungs=(
            Rung("zero1", f"{MLPERF} from v4.0 on; arXiv 1910.02054", together=TRAINABLE),
            Rung("grad_op", "mosaicml/diffusion; torch FSDP", together=TRAINABLE),
            Rung("full", TORCH_FSDP, together=TRAINABLE),
            Rung(
                "zero1",
                f"{MLPERF}: half-precision weights, Adam with fp32 copies, shared",
                together=MASTERS,
            ),
            Rung("grad_op", "torch FSDP2, MixedPrecisionPolicy(param_dtype)", together=MASTERS),
            Rung("hybrid", TORCH_FSDP, together=TRAINABLE),
            Rung("hybrid_grad_op", "torch FSDP, _HYBRID_SHARD_ZERO2", together=TRAINABLE),
            Rung("hybrid_zero1", f"{MLPERF}: ZeRO-1 within a node", together=TRAINABLE),
        ),
    )
    gather_ahead: bool = speed_up(
        SWITCH,
        "gather all weights at the start of a step, while its encoders run, with --sharding "
        "grad_op | hybrid_grad_op",
        seed=False,
        acts_with=RANKS,
        rules=(
            only_with(
                ON,
                "only weights that stay gathered during a step can be gathered ahead",
                sharding=GATHERED_ONCE,
            ),
            Rule(
                ON,
                _microbatch_has_encoders,
                "no encoder runs in a micro-batch, and the weights are needed at once",
            ),
        ),
        rungs=(
            Rung(
                True,
                "torch FSDP2, explicit prefetching",
                needs={**TRAINABLE, "sharding": "grad_op"},
            ),
        ),
    )
    # Composer averages in the last micro-batch of a step, in torch's buckets of 25 MiB.
    grad_sync: str | None = speed_up(
        one_of("every", "last"),
        "average the gradients over the ranks in every micro-batch or in the last of a step",
        seed="last",
        acts_with=RANKS,
        rungs=(Rung("every", "torch DDP without no_sync"),),
    )
    gradient_as_bucket_view: bool = speed_up(
        SWITCH,
        "let gradients live in DDP's buckets instead of a second copy",
        seed=False,
        fast=True,
        acts_with=RANKS,
        rules=(only_with(ON, NO_DDP, sharding=WHOLE_WEIGHTS),),
        rungs=(Rung(True, "torch DDP"),),
    )
    static_graph: bool = speed_up(
        SWITCH,
        "tell DDP that every step uses the same parameters",
        seed=False,
        fast=True,
        acts_with=RANKS,
        rules=(only_with(ON, NO_DDP, sharding=WHOLE_WEIGHTS),),
        rungs=(Rung(True, "torch DDP"),),
    )
    ddp_bucket_mib: int | None = speed_up(
        POSITIVE,
        "size of DDP's gradient buckets in MiB; fast has 25 within one machine",
        seed=NODE_MIB,
        # 3.46 GB of gradients are 132 pieces of 25 MiB, each of which waits for a ring through all
        # nodes; apex's DistributedFusedAdam, of NVIDIA's submissions, takes 100 MB. Not measured on
        # several nodes of GPUs; over slow links between CPUs large pieces hide less.
        fast=PerDevice(gpu=SEVERAL_NODES_MIB, cpu=NODE_MIB),
        acts_with=RANKS,
        rules=(
            Rule(
                (SEVERAL_NODES_MIB,),
                lambda s: s.ranks.num_nodes > 1,
                "within one machine small buckets overlap with more of the backward pass",
                is_advice=True,
            ),
        ),
        rungs=(Rung(ANY_NUMBER, "torch DDP"),),
    )
    grad_compression: str | None = speed_up(
        one_of("none", "bf16"),
        "number format in which gradients travel under DDP",
        seed="none",
        acts_with=RANKS,
        rules=(only_with(("bf16",), NO_DDP, sharding=WHOLE_WEIGHTS),),
        rungs=(Rung("bf16", "torch DDP communication hooks"),),
    )

    # Speed-ups on a CPU.
    cpu_allocator: str | None = speed_up(
        one_of("default", "keep", "return"),
        "what glibc does with freed main memory on a CPU: its own choice, keep it for the next "
        "step, or return blocks of 128 KiB and more to the system at once, which is slower",
        seed="default",
        fast=PerDevice(gpu="default", cpu="keep"),
        rules=(
            Rule(
                ("keep", "return"),
                lambda s: can_keep_freed_memory(),
                "this C library is not glibc and cannot be told what to do with freed memory",
            ),
            Rule(("return",), on_cpu, "a GPU's run keeps little in main memory"),
            Rule(
                ("keep",),
                _keeps_all_bits,
                "weights or state that are made of few bits each time would leave freed memory "
                "in pieces, and no estimate of it would hold",
                "return",
            ),
        ),
        rungs=(
            Rung("keep", "glibc, mallopt(3)", EXACT, devices=(CPU,)),
            Rung("return", "glibc, mallopt(3)", EXACT, devices=(CPU,)),
        ),
    )
    flush_denormals: bool = speed_up(
        SWITCH,
        "let a CPU round numbers below 1e-38 to zero, which is faster",
        seed=False,
        fast=PerDevice(gpu=False, cpu=True),
        rules=(Rule(ON, on_cpu, "a GPU is not faster with it"),),
        rungs=(Rung(True, "torch.set_flush_denormal", EXACT, devices=(CPU,)),),
    )
    num_threads: int | None = setting(
        POSITIVE,
        None,
        "CPU threads of a rank (default: OMP_NUM_THREADS, else its share of the cores that "
        "decoders and encoders leave)",
        rungs=(Rung(ANY_NUMBER, "torch.set_num_threads", SAME_FP32, devices=(CPU,)),),
    )
