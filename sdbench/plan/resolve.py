"""`resolve` turns a request into a plan for this machine and these ranks.

It fills in what the user left open, checks everything before any weights are built, and keeps a
reason for each value that the program chose. It never changes a value that the user gave.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
from pathlib import Path

from sdbench import data
from sdbench.base.errors import ConfigError, RunError
from sdbench.data.source import SourceConfig
from sdbench.measure.hardware import Machine
from sdbench.models.architecture import Architecture, resolve_architecture
from sdbench.models.memory import MemoryEstimate
from sdbench.plan.batch import resolve_batch
from sdbench.plan.draft import Draft
from sdbench.plan.memory_limit import check_memory
from sdbench.plan.speedups import settle
from sdbench.plan.window import resolve_steps
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import SETTINGS, BenchmarkConfig, Request

# The settings that a data source takes as they are.
SOURCE_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SourceConfig)
    if field.name in SETTINGS and field.name != "filters"
)
# The seeds' command line on GPUs (mosaicml/diffusion-benchmark) has 8 workers.
GPU_NUM_WORKERS = 8
CPU_IMAGE_SIZE = 256
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


def resolve(request: Request[BenchmarkConfig], *, machine: Machine, ranks: Ranks) -> Plan:
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
    architecture, note = resolve_architecture(
        request.config.model_name,
        revision=request.config.model_revision,
        random_weights=request.config.random_weights,
    )
    config, reasons = settle(
        request.config, machine=machine, ranks=ranks, is_users=request.is_users
    )
    notes = [] if note is None else [note]
    draft = Draft(request, config, machine, ranks, architecture, reasons, notes)
    if config.num_threads is None:
        draft.choose("num_threads", *_threads_per_rank(machine, ranks))
    _resolve_image_size(draft)
    _resolve_data(draft)
    resolve_batch(draft)
    source = _make_source(draft)
    num_steps, max_num_steps = resolve_steps(draft, num_samples=_check_source(source))
    memory = check_memory(draft)
    _check_results_dir(draft.config.results_dir)
    if draft.config.latents == "precomputed":
        notes.append("Latents are precomputed: compare with other precomputed runs only.")
    return Plan(
        config=draft.config,
        chosen=draft.chosen,
        architecture=architecture,
        source=source,
        ranks=ranks,
        machine=machine,
        memory=memory,
        num_steps=num_steps,
        max_num_steps=max_num_steps,
        notes=tuple(notes),
    )


def _resolve_image_size(draft: Draft) -> None:
    architecture = draft.architecture
    if draft.config.image_size is None:
        size = default_image_size(architecture, on_gpu=draft.on_gpu)
        is_models = size == architecture.default_image_size
        reason = f"default of {architecture.name}" if is_models else "no GPU"
        draft.choose("image_size", size, reason)
    architecture.check_image_size(draft.config.image_size)


def _resolve_data(draft: Draft) -> None:
    config = draft.config
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
        draft.choose("data_format", data_format, reason)
    if config.num_workers is None and draft.on_gpu:
        draft.choose("num_workers", GPU_NUM_WORKERS, "the seeds' default")
    elif config.num_workers is None:
        draft.choose("num_workers", 0, "no GPU: cores and memory are for training")


def _make_source(draft: Draft) -> SourceConfig:
    config, ranks, architecture = draft.config, draft.ranks, draft.architecture
    return SourceConfig(
        **{name: getattr(config, name) for name in SOURCE_FIELDS},
        filters=config.filters or {},
        device_batch_size=config.batch_size // ranks.world_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pin_memory=draft.on_gpu,
        tokenizer_folder=architecture.tokenizer_folder,
        pad_token_id=architecture.tokenizer["pad_token_id"],
        text_embedding_dim=architecture.unet["cross_attention_dim"],
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
