"""What will this request really do on this machine?

Fills in what the user left open, checks everything before any weights are built, and keeps a reason
for each value that the program chose. It never changes a value that the user gave.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from sdbench import data
from sdbench.base.errors import ConfigError, MemoryEstimateError, RunError
from sdbench.data.source import SourceConfig
from sdbench.measure.hardware import Machine
from sdbench.models.architecture import Architecture, resolve_architecture
from sdbench.models.memory import MemoryEstimate, estimate_peak_memory
from sdbench.plan import speedups
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import FIELDS, BenchmarkConfig, Request

# The flags that a data source takes as they are.
SOURCE_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SourceConfig)
    if field.name in FIELDS and field.name != "filters"
)

# The seeds' command line on GPUs (mosaicml/diffusion-benchmark): 2048 images a step, 8 workers.
GPU_BATCH_SIZE = 2048
GPU_NUM_WORKERS = 8
# One such step takes 10 s on 8 GPUs, so three of them are warm-up enough.
GPU_WARMUP_BATCHES, GPU_MEASURE_BATCHES = 3, 20
# A 2-core machine takes about 5 s an image at 256 px: (2 + 10) steps x 2 images are 2 minutes, and
# at 8 images, as in the first command of the README, 8 minutes at the most.
CPU_IMAGE_SIZE = 256
CPU_MICROBATCH = 2
CPU_WARMUP_BATCHES, CPU_MEASURE_BATCHES = 2, 10
# Shares of a step hardly vary, so two profiled steps say enough.
PROFILE_BATCHES = 2
# A run that has not settled after three windows will not settle in a fourth.
MAX_WARMUP_WINDOWS = 2
# Each doubling of a window narrows its interval by 0.7: from 4 % to 1 % in four.
MAX_WINDOW_FACTOR = 16

# `auto` leaves a tenth of the memory alone: estimates are good to 15 %, and fragmentation grows.
AUTO_MEMORY_FRACTION = 0.9
# A run that the user spelled out is refused when it leaves less than 8 % of what is free: measured
# peaks were up to 4 % above their estimates, and the system takes more while a run lasts.
MAX_MEMORY_FRACTION = 0.92
MICROBATCH_CANDIDATES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)

MIN_FREE_RESULTS_BYTES = 16 * 1024**2


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run with nothing left open.

    Attributes:
        config: Every value set.
        chosen: Field to reason, for each value that the program chose.
        architecture: What is trained.
        source: Where this rank's samples come from.
        ranks: The place of this process.
        machine: What it runs on.
        memory: Estimated peak of one rank.
        num_steps: Optimizer steps of the whole run, unless the measurement asks for more.
        max_num_steps: Those that it may ask for.
        notes: Sentences the user must read.
    """

    config: BenchmarkConfig
    chosen: dict[str, str]
    architecture: Architecture
    source: SourceConfig
    ranks: Ranks
    machine: Machine
    memory: MemoryEstimate
    num_steps: int
    max_num_steps: int
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """What runs, safe in a file name, e.g. ``sd2-base-256px-fast``."""
        name = f"{self.architecture.name}-{self.config.image_size}px-{self.config.preset}"
        return re.sub(r"[^A-Za-z0-9.-]+", "-", name)


def resolve(request: Request, *, machine: Machine, ranks: Ranks) -> Plan:
    """Turn a request into a plan.

    Args:
        request: What the user asked for.
        machine: The machine at hand.
        ranks: The place of this process among the ranks.

    Returns:
        The plan.

    Raises:
        ConfigError: If the request cannot be run here.
    """
    return _Resolver(request, machine, ranks).run()


class _Resolver:
    """Works through the fields in the order in which they depend on each other."""

    def __init__(self, request: Request, machine: Machine, ranks: Ranks) -> None:
        self.request = request
        self.config = request.config
        self.machine = machine
        self.ranks = ranks
        self.on_gpu = machine.device_type == "cuda"
        self.chosen: dict[str, str] = {}
        self.notes: list[str] = []

    def run(self) -> Plan:
        self.architecture, note = resolve_architecture(
            self.config.model_name,
            revision=self.config.model_revision,
            random_weights=self.config.random_weights,
        )
        if note is not None:
            self.notes.append(note)
        self._resolve_recipe()
        self._resolve_image_size()
        self._resolve_data()
        self._resolve_batch()
        source = self._source()
        num_steps, max_num_steps = self._resolve_steps(num_samples=_check_source(source))
        memory = self._check_memory()
        _check_results_dir(self.config.results_dir)
        if self.config.latents == "precomputed":
            self.notes.append("Latents are precomputed: compare with other precomputed runs only.")
        return Plan(
            config=self.config,
            chosen=self.chosen,
            architecture=self.architecture,
            source=source,
            ranks=self.ranks,
            machine=self.machine,
            memory=memory,
            num_steps=num_steps,
            max_num_steps=max_num_steps,
            notes=tuple(self.notes),
        )

    def _choose(self, name: str, value: Any, reason: str) -> None:
        """Fill in a field that the user left open."""
        assert not self.request.is_users(name)
        self.config = dataclasses.replace(self.config, **{name: value})
        self.chosen[name] = reason

    def _resolve_recipe(self) -> None:
        """Take the preset's values for this device, and check the user's own."""
        self.config, reasons = speedups.settle(
            self.config, machine=self.machine, ranks=self.ranks, is_users=self.request.is_users
        )
        self.chosen.update(reasons)
        if self.config.num_threads is None:
            self._choose("num_threads", *_threads_per_rank(self.machine, self.ranks))

    def _resolve_image_size(self) -> None:
        if self.config.image_size is None:
            size = default_image_size(self.architecture, on_gpu=self.on_gpu)
            is_models = size == self.architecture.default_image_size
            reason = f"default of {self.architecture.name}" if is_models else "no GPU"
            self._choose("image_size", size, reason)
        self.architecture.check_image_size(self.config.image_size)

    def _resolve_data(self) -> None:
        config = self.config
        data_format = data.resolve_format(
            data_format=config.data_format,
            use_synth_data=config.use_synth_data,
            remote=config.remote,
            local=config.local,
            streams=config.streams,
        )
        if data_format != config.data_format:
            given = config.use_synth_data or config.remote or config.local or config.streams
            reason = "from the data flags" if given else "neither --remote nor --local was given"
            self._choose("data_format", data_format, reason)
        if config.num_workers is None:
            if self.on_gpu:
                self._choose("num_workers", GPU_NUM_WORKERS, "the seeds' default")
            else:
                self._choose("num_workers", 0, "no GPU: cores and memory are for training")

    def _resolve_batch(self) -> None:
        world_size = self.ranks.world_size
        microbatch = self.config.device_train_microbatch_size
        if self.config.batch_size is None and self.on_gpu:
            self._choose("batch_size", *_largest_even_batch(world_size, microbatch))
        if self.config.batch_size is None:
            if microbatch == "auto":
                microbatch = CPU_MICROBATCH
                self._choose_microbatch(microbatch, "no GPU")
            self._choose(
                "batch_size", microbatch * world_size, "no GPU: one micro-batch per rank and step"
            )
        self._check_batch()
        device_batch = self.config.batch_size // world_size
        if self.config.device_train_microbatch_size == "auto":
            self._choose_microbatch(*self._largest_microbatch(device_batch))
        microbatch = self.config.device_train_microbatch_size
        if device_batch % microbatch and self.config.allow_uneven_batch:
            self.notes.append(
                f"The last micro-batch of each step holds {device_batch % microbatch} of "
                f"{microbatch} images: {device_batch} images per rank do not divide evenly."
            )

    def _choose_microbatch(self, value: int, reason: str) -> None:
        """The user's `auto` asks the program to choose, so it may be replaced."""
        self.config = dataclasses.replace(self.config, device_train_microbatch_size=value)
        self.chosen["device_train_microbatch_size"] = reason

    def _check_batch(self) -> None:
        batch, world_size = self.config.batch_size, self.ranks.world_size
        allows_uneven = self.config.allow_uneven_batch
        if batch % world_size and allows_uneven and batch > world_size:
            self._cut_batch(batch // world_size * world_size)
        elif batch % world_size:
            _refuse_batch(
                f"the global batch does not divide over {world_size} ranks", batch, unit=world_size
            )
        microbatch = self.config.device_train_microbatch_size
        device_batch = self.config.batch_size // world_size
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
                allowed=f"1 to {device_batch}, or a global batch of at least "
                f"{microbatch * world_size}",
                flag="--device_train_microbatch_size or --batch_size",
            )

    def _cut_batch(self, even: int) -> None:
        """The user allows it, and is told what is trained instead."""
        self.notes.append(
            f"The global batch of {self.config.batch_size} does not divide over "
            f"{self.ranks.world_size} ranks: {even} images are trained per step, and are what the "
            "record counts."
        )
        self.config = dataclasses.replace(self.config, batch_size=even)
        self.chosen["batch_size"] = "--allow_uneven_batch: what the ranks can share evenly"

    def _largest_microbatch(self, device_batch: int) -> tuple[int, str]:
        # Of all memory, not of what is free now: that may differ by rank, and the choice must not.
        budget_gib = AUTO_MEMORY_FRACTION * self._per_rank_gib(self.machine.device_memory_gib)
        candidates = [size for size in MICROBATCH_CANDIDATES if device_batch % size == 0]
        best = candidates[0]
        for candidate in candidates[1:]:
            if self._estimate_memory(candidate).total_gib > budget_gib:
                break
            best = candidate
        reason = f"auto: largest divisor of {device_batch} estimated to fit {budget_gib:.1f} GiB"
        return best, reason

    def _source(self) -> SourceConfig:
        config = self.config
        return SourceConfig(
            **{name: getattr(config, name) for name in SOURCE_FIELDS},
            filters=config.filters or {},
            device_batch_size=config.batch_size // self.ranks.world_size,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            pin_memory=self.on_gpu,
            tokenizer_folder=self.architecture.tokenizer_folder,
            pad_token_id=self.architecture.tokenizer["pad_token_id"],
            text_embedding_dim=self.architecture.unet["cross_attention_dim"],
        )

    def _resolve_steps(self, *, num_samples: int | None) -> tuple[int, int]:
        """Steps of the run: those that are planned, and the most that it may take."""
        num_steps = None
        if self.config.max_duration is not None:
            num_steps = self._steps_in_duration(self.config.max_duration, num_samples)
        self._resolve_window(num_steps)
        config = self.config
        behind = config.profile_batches + config.profile_trace
        needed = config.warmup_batches + config.measure_batches + behind
        if num_steps is not None and needed > num_steps:
            raise ConfigError(
                f"{config.warmup_batches} warm-up, {config.measure_batches} measured and {behind} "
                f"profiled batches do not fit into the run of {num_steps}",
                value=config.max_duration,
                allowed=f"at least {needed}ba, or fewer batches to measure",
                flag="--max_duration, --warmup_batches, --measure_batches or --profile_batches",
            )
        self._resolve_extensions(None if num_steps is None else num_steps - needed)
        longest = self.config.max_warmup_batches + self.config.max_measure_batches + behind
        return num_steps or needed, num_steps or longest

    def _resolve_window(self, num_steps: int | None) -> None:
        """Choose how many batches are warm-up, measured and profiled."""
        warmup = GPU_WARMUP_BATCHES if self.on_gpu else CPU_WARMUP_BATCHES
        measure = GPU_MEASURE_BATCHES if self.on_gpu else CPU_MEASURE_BATCHES
        profile, given = PROFILE_BATCHES, self.config
        reason = "default with a GPU" if self.on_gpu else "no GPU"
        if num_steps is not None:
            reason = f"{given.max_duration} is {num_steps} batches"
            least = 1 if given.measure_batches is None else given.measure_batches
            warmup = max(0, min(warmup, num_steps - least))
            warmup = warmup if given.warmup_batches is None else given.warmup_batches
            wanted = measure if given.measure_batches is None else given.measure_batches
            if num_steps < warmup + wanted + profile + given.profile_trace:
                profile = 0
            profile = profile if given.profile_batches is None else given.profile_batches
            measure = max(1, num_steps - warmup - profile - given.profile_trace)
        for name, value in (
            ("warmup_batches", warmup),
            ("measure_batches", measure),
            ("profile_batches", profile),
        ):
            if getattr(given, name) is None:
                self._choose(name, value, reason)

    def _resolve_extensions(self, num_spare_steps: int | None) -> None:
        """Choose how far warm-up and window may grow; a run of given length bounds both."""
        config = self.config
        warmup, measure = config.warmup_batches, config.measure_batches
        has_target = config.target_precision is not None
        if not has_target and config.max_measure_batches not in (None, measure):
            raise ConfigError(
                "the window has a fixed length",
                value=config.max_measure_batches,
                allowed="a longest window only together with a precision to reach",
                flag="--max_measure_batches or --target_precision",
            )
        if num_spare_steps is None:
            max_warmup = warmup + MAX_WARMUP_WINDOWS * measure
            max_measure = MAX_WINDOW_FACTOR * measure
        else:
            max_warmup = warmup + (0 if has_target else num_spare_steps)
            max_measure = measure + num_spare_steps
        if config.max_warmup_batches is None:
            self._choose("max_warmup_batches", max_warmup, "two more windows, or the run's end")
        if config.max_measure_batches is None:
            why = "the window doubles, to the run's end at most" if has_target else "fixed window"
            self._choose("max_measure_batches", max_measure if has_target else measure, why)
        for least, name in ((warmup, "warmup_batches"), (measure, "measure_batches")):
            if getattr(self.config, f"max_{name}") < least:
                raise ConfigError(
                    f"the bound is below --{name}, which is {least}",
                    value=getattr(self.config, f"max_{name}"),
                    allowed=f"at least {least}",
                    flag=f"--max_{name} or --{name}",
                )
        growth = self.config.max_warmup_batches - warmup + self.config.max_measure_batches - measure
        if num_spare_steps is not None and growth > num_spare_steps:
            raise ConfigError(
                f"warm-up and window may grow by {growth} batches, and the run leaves room for "
                f"{num_spare_steps}",
                value=config.max_duration,
                allowed="bounds that fit into the run",
                flag="--max_duration, --max_warmup_batches or --max_measure_batches",
            )

    def _steps_in_duration(self, duration: str, num_samples: int | None) -> int:
        number, unit = int(duration[:-2]), duration[-2:]
        if unit == "ba":
            return number
        if num_samples is None:
            raise ConfigError(
                "the length of an epoch of this data set is not known before it is downloaded",
                value=duration,
                allowed="a number of batches, e.g. 48ba",
                flag="--max_duration",
            )
        return number * (num_samples // self.config.batch_size)

    def _per_rank_gib(self, memory_gib: float) -> float:
        """Each GPU belongs to one rank; the ranks of a machine share its main memory."""
        return memory_gib if self.on_gpu else memory_gib / self.ranks.local_world_size

    def _estimate_memory(self, microbatch: int) -> MemoryEstimate:
        config, encoder_batch = self.config, self.config.encoder_batch_size
        device_batch = config.batch_size // self.ranks.world_size
        is_ahead = encoder_batch != "microbatch" and config.latents == "online"
        return estimate_peak_memory(
            self.architecture,
            image_size=config.image_size,
            micro_batch=microbatch,
            precision=config.precision,
            encoder_dtype=config.encoder_dtype,
            attention=config.attention,
            optimizer=config.optimizer,
            use_ema=config.use_ema,
            num_ranks=self.ranks.world_size,
            device_type=self.machine.device_type,
            latents=config.latents,
            num_microbatches=-(-device_batch // microbatch),
            encoder_batch=min(encoder_batch, device_batch) if is_ahead else None,
            activation_checkpointing=config.activation_checkpointing,
            master_weights=config.master_weights == "fp32",
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            sharding=config.sharding,
            num_sharing_ranks=self.ranks.local_world_size
            if config.sharding == "hybrid"
            else self.ranks.world_size,
        )

    def _check_memory(self) -> MemoryEstimate:
        config = self.config
        estimate = self._estimate_memory(config.device_train_microbatch_size)
        # The estimate counts what this process holds already, so that is not taken from it twice.
        free_gib = self._per_rank_gib(self.machine.free_memory_gib) + self.machine.held_memory_gib
        limit_gib = MAX_MEMORY_FRACTION * free_gib
        # A worker is forked from a process that holds the weights. The first optimizer step writes
        # every page of them anew, and all workers together keep the old ones.
        forked_gib = estimate.unet_weights if config.num_workers and not self.on_gpu else 0.0
        needed_gib = estimate.total_gib + forked_gib
        if config.check_memory and needed_gib > limit_gib:
            raise MemoryEstimateError(
                "this run is estimated to need more memory than a rank has here",
                value=f"{needed_gib:.1f} GiB ({estimate.describe()}, workers {forked_gib:.1f})",
                allowed=f"at most {limit_gib:.1f} GiB, {MAX_MEMORY_FRACTION:.0%} of what is free",
                flag=self._flags_that_lower_memory() + "; --no_check_memory tries all the same",
            )
        return estimate

    def _flags_that_lower_memory(self) -> str:
        config = self.config
        microbatch = config.device_train_microbatch_size
        options: list[tuple[bool, Callable[[], str]]] = [
            (microbatch > 1, lambda: f"--device_train_microbatch_size (below {microbatch})"),
            (config.use_ema, lambda: "--no_use_ema"),
            (config.num_workers > 0 and not self.on_gpu, lambda: "--num_workers 0"),
            (config.encoder_dtype == "fp32", lambda: "--encoder_dtype bf16"),
            (config.precision == "fp32", lambda: "--precision amp_bf16"),
            (
                config.activation_checkpointing == "none",
                lambda: "--activation_checkpointing transformer",
            ),
            (
                config.sharding == "none" and self.ranks.world_size > 1,
                lambda: "--sharding zero1",
            ),
            (True, lambda: f"--image_size (below {config.image_size})"),
        ]
        return ", ".join(text() for applies, text in options if applies)


def _largest_even_batch(world_size: int, microbatch: int | str) -> tuple[int, str]:
    """The seeds' global batch, or the most below it that ranks and micro-batches divide."""
    unit = world_size * (1 if microbatch == "auto" else microbatch)
    even = max(1, GPU_BATCH_SIZE // unit) * unit
    if even == GPU_BATCH_SIZE:
        return even, "the seeds' default"
    return even, f"the largest batch up to the seeds' {GPU_BATCH_SIZE} that divides by {unit}"


def _refuse_batch(what: str, batch: int, *, unit: int) -> NoReturn:
    """Say which global batches near the one that was asked for would do."""
    below, above = batch // unit * unit, (batch // unit + 1) * unit
    nearest = f"{below} and {above}" if below else f"{above}"
    raise ConfigError(
        what,
        value=batch,
        allowed=f"multiples of {unit}, the nearest are {nearest}",
        flag="--batch_size" + (", or accept it with --allow_uneven_batch" if below else ""),
    )


def _threads_per_rank(machine: Machine, ranks: Ranks) -> tuple[int, str]:
    """CPU threads of a rank, and who chose them."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    # torchrun sets 1 where nobody has set anything, which would leave most cores idle.
    is_torchruns = given == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if given.isdecimal() and int(given) and not is_torchruns:
        return int(given), "OMP_NUM_THREADS"
    share = max(1, machine.num_cpu_cores // ranks.local_world_size)
    return share, "the rank's share of the cores"


def default_image_size(architecture: Architecture, *, on_gpu: bool) -> int:
    """Side of the images in pixels when nobody says: the model's own, less without a GPU."""
    size = architecture.default_image_size
    return size if on_gpu else min(size, CPU_IMAGE_SIZE)


def _check_source(source: SourceConfig) -> int | None:
    """Check the data; before a run has begun a damaged file is bad input like any other."""
    try:
        return data.check(source)
    except RunError as error:
        raise ConfigError(
            str(error).rstrip("."),
            value=source.remote or source.local or source.streams,
            allowed="whole data that can be reached",
            flag="--remote, --local or --streams",
        ) from error


def _check_results_dir(results_dir: str) -> None:
    """Try to write where the record will go, before hours of work depend on it."""
    flag = "--results_dir"
    try:
        Path(results_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=results_dir):
            pass
        free_bytes = shutil.disk_usage(results_dir).free
    except OSError as error:
        raise ConfigError(
            f"the results folder cannot be written ({os.strerror(error.errno or 0)})",
            value=results_dir,
            allowed="a folder that this user may write, on a disk with space",
            flag=flag,
        ) from None
    if free_bytes < MIN_FREE_RESULTS_BYTES:
        raise ConfigError(
            "the results folder has too little space",
            value=f"{results_dir} with {free_bytes / 1024**2:.0f} MiB free",
            allowed=f"at least {MIN_FREE_RESULTS_BYTES / 1024**2:.0f} MiB",
            flag=flag,
        )
