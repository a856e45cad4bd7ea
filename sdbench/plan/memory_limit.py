"""`check_memory`: refuses a run whose estimated peak memory is more than a rank has.

On a GPU it only warns: constants of the estimate were not measured there.
"""

from __future__ import annotations

from sdbench.base.cache import private_folder
from sdbench.base.errors import ConfigError, MemoryEstimateError
from sdbench.models.memory import MemoryEstimate, estimate_peak_memory
from sdbench.models.replay import REPLAYS_FOLDER, Step
from sdbench.plan.draft import Draft

# A run may take this share of free memory: measured peaks were up to 4 % above their estimates, and
# other processes may need more memory during the run.
MAX_MEMORY_FRACTION = 0.92


def per_rank_gib(draft: Draft, memory_gib: float) -> float:
    """Memory of one rank: that of its GPU, or its share of a node's main memory."""
    return memory_gib if draft.on_gpu else memory_gib / draft.ranks.local_world_size


def estimate_memory(draft: Draft, microbatch: int) -> MemoryEstimate:
    """Estimated peak of one rank with this micro-batch."""
    # A mistake in the layers of a LoRA is found here, before any weights are built.
    step = Step.of(
        draft.config, draft.architecture, on_cuda=draft.on_gpu, shape=draft.largest_shape
    )
    return estimate_peak_memory(step, draft.config, draft.ranks, micro_batch=microbatch)


def check_memory(draft: Draft) -> MemoryEstimate:
    """Estimate the peak memory of one rank, and refuse a run that does not fit on a CPU."""
    config = draft.config
    try:
        private_folder(REPLAYS_FOLDER)
    except ConfigError as error:
        draft.notes.append(
            f"Without a cache each run replays a step for the memory estimate. {error}"
        )
    estimate = estimate_memory(draft, config.device_train_microbatch_size)
    # The estimate includes memory that this process already uses, which is no longer free.
    free_gib = per_rank_gib(draft, draft.machine.free_memory_gib) + draft.machine.held_memory_gib
    limit_gib = MAX_MEMORY_FRACTION * free_gib
    # Workers are forked from a process with the weights in memory. The first optimizer step writes
    # to every page of them, and the workers share a copy of the old ones.
    forked_gib = estimate.trained_weights if config.num_workers and not draft.on_gpu else 0.0
    needed_gib = estimate.total_gib + forked_gib
    if not config.check_memory or needed_gib <= limit_gib:
        return estimate
    allowed = f"at most {limit_gib:.1f} GiB, {MAX_MEMORY_FRACTION:.0%} of what is free"
    if draft.on_gpu:
        draft.notes.append(
            f"The memory may not suffice: the estimate is {needed_gib:.1f} GiB "
            f"({estimate.describe()}), and it should be {allowed}. Constants of the estimate were "
            f"not measured on a GPU, so the run is tried. These flags lower it: "
            f"{_flags_that_lower_memory(draft)}."
        )
        return estimate
    raise MemoryEstimateError(
        "this run is estimated to need more memory than a rank has here",
        value=f"{needed_gib:.1f} GiB ({estimate.describe()}, workers {forked_gib:.1f})",
        allowed=allowed,
        flag=_flags_that_lower_memory(draft) + "; --no_check_memory tries all the same",
    )


def _flags_that_lower_memory(draft: Draft) -> str:
    config = draft.config
    microbatch = config.device_train_microbatch_size
    has_unet = "vae" not in config.trained_parts
    flags = {
        f"--device_train_microbatch_size (below {microbatch})": microbatch > 1,
        "--no_use_ema": config.use_ema,
        "--num_workers 0": config.num_workers > 0 and not draft.on_gpu,
        "--encoder_dtype bf16": has_unet and config.encoder_dtype == "fp32",
        "--precision amp_bf16": config.precision == "fp32",
        "--activation_checkpointing transformer": (
            has_unet and config.activation_checkpointing == "none"
        ),
        "--sharding zero1": config.sharding == "none" and draft.ranks.world_size > 1,
        f"--image_size (below {config.image_size})": True,
    }
    return ", ".join(flag for flag, helps in flags.items() if helps)
