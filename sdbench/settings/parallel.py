"""Speed-ups between ranks: what they share, and when and how they average gradients."""

from __future__ import annotations

import dataclasses

from sdbench.settings.kinds import POSITIVE, SWITCH, one_of
from sdbench.settings.setting import (
    ANY_NUMBER,
    MLPERF,
    ON,
    RANKS,
    SPEED,
    AllBut,
    PerDevice,
    Rule,
    Rung,
    Situation,
    only_with,
    speed_up,
)

FSDP = ("grad_op", "full", "hybrid", "hybrid_grad_op")
ZERO1 = ("zero1", "hybrid_zero1")
# With these each rank holds all weights.
WHOLE_WEIGHTS = ("none", *ZERO1)
SHARED = (*ZERO1, *FSDP)
# Of these, shared within each machine; the machines hold the same.
WITHIN_NODE = ("hybrid", "hybrid_grad_op", "hybrid_zero1")
NODE_MIB, SEVERAL_NODES_MIB = 25, 200
# FSDP that keeps the gathered weights until the step ends.
GATHERED_ONCE = ("grad_op", "hybrid_grad_op")
TORCH_FSDP = "torch FSDP; arXiv 2304.11277"
TRAINABLE = {"optimizer_params": "trainable"}
MASTERS = {**TRAINABLE, "precision": "bf16", "master_weights": "fp32"}


def _microbatch_has_encoders(situation: Situation) -> bool:
    config = situation.config
    if "text_encoder" in config.trained_parts:
        return True
    encodes_images = config.step_has_encoders and not config.has_subject
    return encodes_images and config.encoder_batch_size == "microbatch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSpeedups:
    """How ranks share a model and average its gradients."""

    GROUP = SPEED

    sharding: str | None = speed_up(
        one_of("none", "zero1", "grad_op", "full", "hybrid", "hybrid_grad_op", "hybrid_zero1"),
        "what the ranks share instead of each holding all: optimizer state (zero1), also gradients "
        "and, between steps, weights (grad_op), also weights within a step (full); or full, "
        "grad_op or zero1 within each machine (hybrid, hybrid_grad_op, hybrid_zero1)",
        seed="none",
        acts_with=RANKS,
        rules=(
            Rule(
                SHARED,
                lambda s: s.ranks.world_size > 1,
                "one rank has nobody to share with (composer -n 2, torchrun --nproc_per_node 2)",
            ),
            Rule(
                WITHIN_NODE,
                lambda s: s.ranks.num_nodes > 1 and s.ranks.local_world_size > 1,
                "it shares within each of several machines, which have several ranks",
            ),
            only_with(
                FSDP,
                "weights that are shared out are not trained with a loss scale here",
                precision=AllBut(["amp_fp16"]),
            ),
            Rule(
                FSDP,
                lambda s: s.config.lora_rank is None or s.config.precision != "bf16",
                "weights are shared out in one type, and LoRA's are in fp32 beside bf16",
                lifted_by={"precision": AllBut(["bf16"])},
            ),
            only_with(
                SHARED,
                "an optimizer that is shared out takes trained parameters only",
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
        "begin to gather all weights as a step begins, while its encoders run, with --sharding "
        "grad_op | hybrid_grad_op",
        seed=False,
        acts_with=RANKS,
        before=False,
        rules=(
            only_with(
                ON,
                "only weights that stay gathered for a step are gathered ahead of it",
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
        rules=(
            only_with(
                ON,
                "there are no buckets of DDP when the weights are shared out",
                sharding=WHOLE_WEIGHTS,
            ),
        ),
        rungs=(Rung(True, "torch DDP"),),
    )
    static_graph: bool = speed_up(
        SWITCH,
        "tell DDP that every step uses the same parameters",
        seed=False,
        fast=True,
        acts_with=RANKS,
        rules=(
            only_with(
                ON,
                "there is no DDP to tell when the weights are shared out",
                sharding=WHOLE_WEIGHTS,
            ),
        ),
        rungs=(Rung(True, "torch DDP"),),
    )
    ddp_bucket_mib: int | None = speed_up(
        POSITIVE,
        "size of the pieces in which DDP averages gradients, in MiB; fast has 25 within a machine",
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
                "within one machine small pieces are averaged during more of the backward pass",
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
        rules=(
            only_with(
                ("bf16",),
                "gradients travel in the type of the weights when these are shared out",
                sharding=WHOLE_WEIGHTS,
            ),
        ),
        rungs=(Rung("bf16", "torch DDP communication hooks"),),
    )
