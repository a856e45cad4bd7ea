"""What a run needs: its estimated memory, the limit of its ranks, and flags that lower it.

`check_memory` refuses a run that does not fit. On a GPU it only warns: constants of the estimate
were not measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sdbench.base.cache import private_folder
from sdbench.base.errors import ConfigError
from sdbench.models.memory import MemoryEstimate, estimate_peak_memory
from sdbench.models.replay import REPLAYS_FOLDER, Step
from sdbench.plan.draft import Plan
from sdbench.settings.recipe import EngineConfig
from sdbench.settings.setting import describe_flags

# A run may take this share of free memory: on one rank measured peaks were up to 10 % above their
# estimates (results/memory.md), and other processes may need more memory during the run.
MAX_MEMORY_FRACTION = 0.9
# Flags that are named to a run that does not fit.
NUM_NAMED = 3
MICROBATCH = "device_train_microbatch_size"


def per_rank_gib(draft: Plan[EngineConfig], memory_gib: float) -> float:
    """Memory of one rank: that of its GPU, or its share of a node's main memory."""
    return memory_gib if draft.on_gpu else memory_gib / draft.ranks.local_world_size


def estimate_memory(draft: Plan[EngineConfig], microbatch: int) -> MemoryEstimate:
    """Estimated peak of one rank with this micro-batch."""
    # A mistake in the layers of a LoRA is found here, before any weights are built.
    return estimate_peak_memory(step_of(draft), draft.config, draft.ranks, micro_batch=microbatch)


def step_of(draft: Plan[EngineConfig]) -> Step:
    """The step whose memory is estimated."""
    shape = draft.largest_shape
    return Step.of(draft.config, draft.architecture, on_cuda=draft.on_gpu, shape=shape)


class Need(NamedTuple):
    """What a rank needs at its peak, in GiB; `forked_gib` is that of its loader workers."""

    estimate: MemoryEstimate
    forked_gib: float

    @property
    def total_gib(self) -> float:
        """All of it."""
        return self.estimate.total_gib + self.forked_gib


def find_need(draft: Plan[EngineConfig]) -> Need:
    """Estimate what a rank needs."""
    estimate = estimate_memory(draft, getattr(draft.config, MICROBATCH))
    # Workers are forked from a process with the weights in memory. The first optimizer step writes
    # to every page of them, and the workers share a copy of the old ones.
    forks = draft.config.num_workers and not draft.on_gpu
    return Need(estimate, estimate.trained_weights if forks else 0.0)


class Lever(NamedTuple):
    """Settings that lower the memory, as a function of those of a run, and what they cost."""

    values: Callable[[EngineConfig], Mapping[str, Any]]  # {}: there is nothing to change
    cost: str


def _set(
    name: str, value: Any, *, unless: tuple[Any, ...] = ()
) -> Callable[[EngineConfig], dict[str, Any]]:
    def values(config: EngineConfig) -> dict[str, Any]:
        return {} if getattr(config, name) in (value, *unless) else {name: value}

    return values


def _reduce_bits(kind: str) -> Callable[[EngineConfig], dict[str, Any]]:
    def values(config: EngineConfig) -> dict[str, Any]:
        is_fewer = config.frozen_bits == "same" or (config.frozen_bits, kind) == ("int8", "nf4")
        return {"frozen_bits": kind} if config.lora_rank and is_fewer else {}

    return values


def _halve_microbatch(config: EngineConfig) -> dict[str, Any]:
    size = getattr(config, MICROBATCH)
    return {MICROBATCH: size // 2} if size > 1 else {}


# The cheapest first.
LEVERS = (
    Lever(_set("num_workers", 0), "the trainer loads its data itself"),
    Lever(_set("cpu_allocator", "return"), "the kernel clears memory again in each step"),
    Lever(_set("encoder_dtype", "bf16", unless=("fp16",)), "encoders round"),
    Lever(
        _set("update_in_backward", True),
        "gradients are neither clipped nor added up over micro-batches",
    ),
    Lever(_set("use_ema", False), "no average of the weights"),
    Lever(_halve_microbatch, "smaller passes, which use a GPU less well"),
    Lever(_set("latents", "precomputed"), "the data set is encoded before, by precompute"),
    Lever(
        _set("activation_checkpointing", "cheap", unless=("transformer", "full")),
        "all blocks are computed twice, without their matrix products",
    ),
    Lever(
        _set("activation_checkpointing", "transformer", unless=("full",)),
        "transformer blocks are computed twice",
    ),
    Lever(_set("activation_checkpointing", "full"), "all blocks are computed twice"),
    Lever(
        _set("precision", "amp_bf16", unless=("amp_fp16", "bf16")), "matrix products are in bf16"
    ),
    Lever(
        _set("optimizer", "adamw_8bit", unless=("adamw_4bit",)),
        "the optimizer's state is rounded to 8 bits",
    ),
    Lever(_reduce_bits("int8"), "frozen weights are rounded to 8 bits"),
    Lever(_reduce_bits("nf4"), "frozen weights are rounded to 4 bits"),
    Lever(_set("optimizer", "adamw_4bit"), "the optimizer's state is rounded to 4 bits"),
    Lever(_set("sharding", "zero1", unless=("full",)), "ranks send each other updated weights"),
    Lever(_set("sharding", "full"), "ranks send each other weights in each pass"),
    Lever(_set("precision", "bf16"), "weights and their updates round"),
    Lever(_set("lora_rank", 16), "LoRA is trained in place of the weights"),
)


class Pulled(NamedTuple):
    """A lever that a run can use: its settings, its cost, the run with it, and what that needs."""

    values: Mapping[str, Any]
    cost: str
    draft: Plan[EngineConfig]
    need: Need

    @property
    def flags(self) -> str:
        """The settings as typed."""
        return describe_flags(self.values)


def pull_levers(draft: Plan[EngineConfig]) -> Iterator[Pulled]:
    """Yield each lever that lowers the need of a run and that it can use, cheapest first."""
    before_gib = find_need(draft).total_gib
    for lever in LEVERS:
        values = lever.values(draft.config)
        if not values:
            continue
        try:
            changed = draft.changed(values)
            need = find_need(changed)
        except ConfigError:  # the model, the machine or another setting does not go with it
            continue
        is_as_asked = all(getattr(changed.config, name) == values[name] for name in values)
        if is_as_asked and need.total_gib < before_gib:
            yield Pulled(values, lever.cost, changed, need)


def check_memory(draft: Plan[EngineConfig]) -> MemoryEstimate:
    """Estimate the peak memory of one rank, and refuse a run that does not fit on a CPU."""
    config = draft.config
    try:
        private_folder(REPLAYS_FOLDER)
    except ConfigError as error:
        draft.notes.append(
            f"Without a cache each run replays a step for the memory estimate. {error}"
        )
    need = find_need(draft)
    # The estimate includes memory that this process already uses, which is no longer free.
    free_gib = per_rank_gib(draft, draft.machine.free_memory_gib) + draft.machine.held_memory_gib
    limit_gib = MAX_MEMORY_FRACTION * free_gib
    if not config.check_memory or need.total_gib <= limit_gib:
        return need.estimate
    allowed = f"at most {limit_gib:.1f} GiB, {MAX_MEMORY_FRACTION:.0%} of what is free"
    ways = _describe_ways(draft, limit_gib)
    if draft.on_gpu:
        draft.notes.append(
            f"The memory may not suffice: the estimate is {need.total_gib:.1f} GiB "
            f"({need.estimate.describe()}), and it should be {allowed}. Constants of the estimate "
            f"were not measured on a GPU, so the run is tried. What would do: {ways}."
        )
        return need.estimate
    raise ConfigError(
        "this run is estimated to need more memory than a rank has here",
        value=f"{need.total_gib:.1f} GiB ({need.estimate.describe()}, workers "
        f"{need.forked_gib:.1f})",
        allowed=allowed,
        flag=f"{ways}; --no_check_memory tries all the same",
    )


def _describe_ways(draft: Plan[EngineConfig], limit_gib: float) -> str:
    """Say which flags make a run fit: the cheapest ones that do so alone, or several together."""
    alone = []
    for pulled in pull_levers(draft):
        if pulled.need.total_gib <= limit_gib:
            alone.append(f"{pulled.flags} ({pulled.need.total_gib:.1f} GiB: {pulled.cost})")
        if len(alone) == NUM_NAMED:
            break
    if alone:
        return ", or ".join(alone)
    together: dict[str, Any] = {}
    need = find_need(draft)
    while need.total_gib > limit_gib:
        pulled = next(pull_levers(draft), None)
        if pulled is None:
            return (
                f"a smaller --image_size or --model_name: {describe_flags(together)} together "
                f"leave {need.total_gib:.1f} GiB"
            )
        together |= pulled.values
        draft, need = pulled.draft, pulled.need
    return f"{describe_flags(together)} together ({need.total_gib:.1f} GiB)"
