"""`resolve_steps`: chooses the numbers of warm-up, measured and profiled batches."""

from __future__ import annotations

from sdbench.base.errors import ConfigError
from sdbench.measure.attention_kernels import MAX_MICROBATCHES
from sdbench.plan.draft import Plan
from sdbench.ranks.distributed import Ranks
from sdbench.settings.computing import NUM_GRAPH_STEPS
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.recipe import EngineConfig
from sdbench.settings.setting import PerDevice, of_device
from sdbench.statistics.intervals import num_precise_steps

# A GPU's step of 2048 images takes 10 s on 8 GPUs, so three of them are warm-up enough. On a CPU
# Composer's third step is still slow: 4.36 and then 3.56 s. 4 + 10 steps and 3 after the window, of
# 8 images at 256 px as in the first command of the README, take two cores 3 to 6 minutes at 0.7 to
# 0.4 images/s.
WARMUP_BATCHES = PerDevice(gpu=3, cpu=4)
MEASURE_BATCHES = PerDevice(gpu=20, cpu=10)
# Batches of each shape, on the average.
MEASURED_PER_SHAPE = 6
# Shares of a step hardly vary, so two profiled steps say enough.
PROFILE_BATCHES = 2
# A run that has not settled after three windows will not settle in a fourth.
MAX_WARMUP_WINDOWS = 2
# Each doubling of a window narrows its interval to 0.7 of its width: from 4 % to 1 % in four.
MAX_WINDOW_FACTOR = 16


def resolve_steps(draft: Plan[BenchmarkConfig], *, num_samples: int | None) -> tuple[int, int]:
    """Choose the windows of a run whose batch is settled; returns the plan's numbers of steps.

    `num_samples` is the number of samples of an epoch, None if unknown.
    """
    num_steps = None
    if draft.config.max_duration is not None:
        num_steps = steps_in_duration(draft, draft.config.max_duration, num_samples)
    _choose_window(draft, num_steps)
    config = draft.config
    behind = _num_behind(draft, config.profile_batches)
    needed = config.warmup_batches + config.measure_batches + behind
    if num_steps is not None and needed > num_steps:
        raise ConfigError(
            f"{config.warmup_batches} warm-up and {config.measure_batches} measured batches and "
            f"{behind} after them do not fit into the run of {num_steps}",
            value=config.max_duration,
            allowed=f"at least {needed}ba, or fewer batches to measure",
            flag="--max_duration, --warmup_batches, --measure_batches or --profile_batches",
        )
    _choose_bounds(draft, None if num_steps is None else num_steps - needed)
    longest = draft.config.max_warmup_batches + draft.config.max_measure_batches + behind
    return num_steps or needed, num_steps or longest


def _num_behind(draft: Plan[BenchmarkConfig], num_profiled: int) -> int:
    """Steps after the window: those that are profiled, one to see attention, one to trace."""
    has_look = num_profiled > 0 and looks_at_attention(draft.config, draft.ranks)
    return num_profiled + has_look + draft.config.profile_trace


def looks_at_attention(config: BenchmarkConfig, ranks: Ranks) -> bool:
    """Return True if a step has few enough micro-batches for torch's profiler."""
    device_batch = config.batch_size // ranks.world_size
    return device_batch <= MAX_MICROBATCHES * config.device_train_microbatch_size


def steps_in_duration(draft: Plan[EngineConfig], duration: str, num_samples: int | None) -> int:
    """Optimizer steps of a --max_duration in batches, epochs or samples, the last one rounded up.

    `num_samples` is the number of samples of an epoch; with None, epochs are refused.
    """
    number, unit = int(duration[:-2]), duration[-2:]
    if unit == "ba":
        return number
    if unit == "sp":
        return -(-number // draft.config.batch_size)
    if num_samples is None:
        raise ConfigError(
            "the length of an epoch of this data set is only known once it has been downloaded",
            value=duration,
            allowed="a number of batches, e.g. 48ba",
            flag="--max_duration",
        )
    if draft.mixture is not None:
        num_steps = draft.mixture.num_batches(number, batch_size=draft.config.batch_size)
        if num_steps:
            return num_steps
        raise ConfigError(
            "no shape has enough pictures for a batch in so few epochs",
            value=duration,
            allowed="more epochs, or a smaller --batch_size",
            flag="--max_duration",
        )
    return number * (num_samples // draft.config.batch_size)


def _choose_window(draft: Plan[BenchmarkConfig], num_steps: int | None) -> None:
    """Choose warm-up, window and profile; with --max_duration the window takes the rest."""
    given = draft.config
    # Ahead of a run the machine is not known, and asked for only where it decides.
    warmup, measure = (
        of_device(default, on_gpu=draft.on_gpu) if value is None else value
        for value, default in (
            (given.warmup_batches, WARMUP_BATCHES),
            (given.measure_batches, MEASURE_BATCHES),
        )
    )
    profile, reason = PROFILE_BATCHES, None
    num_shapes = 0 if draft.mixture is None else len(draft.mixture.shapes)
    if num_shapes > 1:
        # The first step of each shape finds its kernels, and the window has each a few times.
        warmup = warmup + num_shapes if given.warmup_batches is None else warmup
        least_measured = MEASURED_PER_SHAPE * num_shapes
        measure = measure if given.measure_batches is not None else max(measure, least_measured)
    if num_steps is not None:
        reason = f"{given.max_duration} is {num_steps} batches"
        if given.warmup_batches is None:
            least = 1 if given.measure_batches is None else measure
            warmup = max(0, min(warmup, num_steps - least))
        if num_steps < warmup + measure + _num_behind(draft, profile):
            profile = 0
        profile = profile if given.profile_batches is None else given.profile_batches
        measure = max(1, num_steps - warmup - _num_behind(draft, profile))
    for name, value in (
        ("warmup_batches", warmup),
        ("measure_batches", measure),
        ("profile_batches", profile),
    ):
        if getattr(given, name) is None:
            if reason is None:
                reason = "default with a GPU" if draft.on_gpu else "no GPU"
            draft.choose(name, value, reason)
    if num_shapes > 1 and draft.config.warmup_batches < num_shapes:
        raise ConfigError(
            f"the first steps of {num_shapes} shapes, which find their kernels, do not fit into "
            "the warm-up",
            value=draft.config.warmup_batches,
            allowed=f"at least {num_shapes}",
            flag="--warmup_batches, --max_duration or --buckets",
        )
    if draft.config.warmup_batches < NUM_GRAPH_STEPS and draft.config.cuda_graph:
        raise ConfigError(
            f"a graph is captured in step {NUM_GRAPH_STEPS}, which would be a measured one",
            value=given.max_duration,
            allowed=f"room for {NUM_GRAPH_STEPS} batches of warm-up, or --no_cuda_graph",
            flag="--max_duration or --measure_batches",
        )


def _choose_bounds(draft: Plan[BenchmarkConfig], num_spare_steps: int | None) -> None:
    """Choose the bounds of warm-up and window; --max_duration limits both."""
    config = draft.config
    warmup, measure = config.warmup_batches, config.measure_batches
    has_target = config.target_precision is not None
    if not has_target and config.max_measure_batches not in (None, measure):
        raise ConfigError(
            "the measured window has a fixed length without --target_precision",
            value=config.max_measure_batches,
            allowed="--max_measure_batches only together with --target_precision",
            flag="--max_measure_batches or --target_precision",
        )
    if num_spare_steps is None:
        max_warmup = warmup + MAX_WARMUP_WINDOWS * measure
        max_measure = MAX_WINDOW_FACTOR * measure
        if has_target:
            max_measure = max(max_measure, num_precise_steps(config.target_precision))
    else:
        max_warmup = warmup + (0 if has_target else num_spare_steps)
        max_measure = measure + num_spare_steps
    if config.max_warmup_batches is None:
        draft.choose("max_warmup_batches", max_warmup, "two more windows, or the run's end")
    if config.max_measure_batches is None:
        why = "the window doubles, to the run's end at most" if has_target else "fixed window"
        draft.choose("max_measure_batches", max_measure if has_target else measure, why)
    for least, name in ((warmup, "warmup_batches"), (measure, "measure_batches")):
        if getattr(draft.config, f"max_{name}") < least:
            raise ConfigError(
                f"--max_{name} is below --{name}, which is {least}",
                value=getattr(draft.config, f"max_{name}"),
                allowed=f"at least {least}",
                flag=f"--max_{name} or --{name}",
            )
    growth = draft.config.max_warmup_batches - warmup + draft.config.max_measure_batches - measure
    if num_spare_steps is not None and growth > num_spare_steps:
        raise ConfigError(
            f"warm-up and window may grow by {growth} batches, but the run has room for only "
            f"{num_spare_steps}",
            value=config.max_duration,
            allowed="limits that fit into the run",
            flag="--max_duration, --max_warmup_batches or --max_measure_batches",
        )
