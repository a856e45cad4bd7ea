"""`resolve_batch` chooses the images of a step and of a micro-batch."""

from __future__ import annotations

from typing import NoReturn

from sdbench.base.errors import ConfigError
from sdbench.plan.draft import Plan
from sdbench.settings.recipe import EngineConfig

# The seeds' command line on GPUs (mosaicml/diffusion-benchmark): 2048 images a step.
GPU_BATCH_SIZE = 2048
CPU_MICROBATCH = 2
# Pictures per rank with --task dreambooth: two of the subject and two of its class, as in
# dreambooth_run.sh of Ray's example.
SUBJECT_BATCH_SIZE = 4
# `auto` leaves a tenth of the memory free: estimates may be 15 % off, and fragmentation grows.
AUTO_MEMORY_FRACTION = 0.9
MICROBATCH_CANDIDATES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)


def resolve_batch(draft: Plan[EngineConfig]) -> None:
    """Choose global batch and micro-batch; refuse a batch that ranks cannot share evenly."""
    world_size = draft.ranks.world_size
    microbatch = draft.config.device_train_microbatch_size
    if draft.config.batch_size is None and draft.config.has_subject:
        size = SUBJECT_BATCH_SIZE * world_size
        draft.choose("batch_size", size, f"{SUBJECT_BATCH_SIZE} pictures a rank, as the seed's")
    if draft.config.batch_size is None and draft.on_gpu:
        draft.choose("batch_size", *_largest_even_batch(world_size, microbatch))
    if draft.config.batch_size is None:
        if microbatch == "auto":
            microbatch = CPU_MICROBATCH
            draft.choose("device_train_microbatch_size", microbatch, "no GPU")
        draft.choose(
            "batch_size", microbatch * world_size, "no GPU: one micro-batch per rank and step"
        )
    check_batch(draft)
    device_batch = draft.config.batch_size // world_size
    if draft.config.device_train_microbatch_size == "auto":
        largest = _largest_microbatch(draft, device_batch)
        draft.choose("device_train_microbatch_size", *largest)
    microbatch = draft.config.device_train_microbatch_size
    if device_batch % microbatch and draft.config.allow_uneven_batch:
        draft.notes.append(
            f"The last micro-batch of each step holds {device_batch % microbatch} of "
            f"{microbatch} images: {device_batch} images per rank do not divide evenly."
        )


def check_batch(draft: Plan[EngineConfig]) -> None:
    """Refuse a batch that the ranks cannot share evenly; asks for no machine."""
    batch, world_size = draft.config.batch_size, draft.ranks.world_size
    allows_uneven = draft.config.allow_uneven_batch
    if batch % world_size and allows_uneven and batch > world_size:
        even = batch // world_size * world_size
        draft.notes.append(
            f"The global batch of {batch} does not divide over {world_size} ranks: {even} images "
            "are trained per step, and are what the record counts."
        )
        draft.choose("batch_size", even, "--allow_uneven_batch: what the ranks can share evenly")
    elif batch % world_size:
        _refuse_batch(
            f"the global batch does not divide over {world_size} ranks", batch, unit=world_size
        )
    microbatch = draft.config.device_train_microbatch_size
    device_batch = draft.config.batch_size // world_size
    if microbatch == "auto":
        return
    if device_batch > microbatch and device_batch % microbatch and not allows_uneven:
        _refuse_batch(
            f"the {device_batch} images that a rank gets per step ({batch} over {world_size} "
            f"ranks) do not divide into micro-batches of {microbatch}",
            batch,
            unit=world_size * microbatch,
        )
    if microbatch > device_batch:
        raise ConfigError(
            f"the micro-batch is larger than the {device_batch} images that a rank gets per "
            f"step ({batch} over {world_size} ranks)",
            value=microbatch,
            allowed=f"1 to {device_batch}, or a global batch of at least {microbatch * world_size}",
            flag="--device_train_microbatch_size or --batch_size",
        )


def _largest_microbatch(draft: Plan[EngineConfig], device_batch: int) -> tuple[int, str]:
    """The largest micro-batch whose estimate fits, or 1 if none does, and the reason."""
    from sdbench.plan.memory_limit import per_rank_gib

    # A share of all memory: free memory may differ between ranks, and the choice must not.
    budget_gib = AUTO_MEMORY_FRACTION * per_rank_gib(draft, draft.machine.device_memory_gib)
    best = find_largest_microbatch(draft, device_batch, budget_gib=budget_gib) or 1
    reason = f"auto: largest divisor of {device_batch} estimated to fit {budget_gib:.1f} GiB"
    return best, reason


def find_largest_microbatch(
    draft: Plan[EngineConfig], device_batch: int, *, budget_gib: float
) -> int | None:
    """Return the largest micro-batch whose estimate fits, or None."""
    from sdbench.plan.memory_limit import estimate_memory

    best = None
    for size in MICROBATCH_CANDIDATES:
        if device_batch % size == 0:
            if estimate_memory(draft, size).total_gib > budget_gib:
                break
            best = size
    return best


def _largest_even_batch(world_size: int, microbatch: int | str) -> tuple[int, str]:
    """The seeds' global batch, or the largest below it that ranks and micro-batches divide."""
    unit = world_size * (1 if microbatch == "auto" else microbatch)
    even = max(1, GPU_BATCH_SIZE // unit) * unit
    if even == GPU_BATCH_SIZE:
        return even, "the seeds' default"
    return even, f"the largest batch up to the seeds' {GPU_BATCH_SIZE} that divides by {unit}"


def _refuse_batch(what: str, batch: int, *, unit: int) -> NoReturn:
    """Raise a ConfigError that names the nearest global batches that would do."""
    below, above = batch // unit * unit, (batch // unit + 1) * unit
    nearest = f"{below} and {above}" if below else f"{above}"
    raise ConfigError(
        what,
        value=batch,
        allowed=f"multiples of {unit}, the nearest are {nearest}",
        flag="--batch_size" + (", or accept it with --allow_uneven_batch" if below else ""),
    )
