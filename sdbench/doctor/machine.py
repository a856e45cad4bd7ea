"""Checks of software, plan, processors, disks and data of a node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sdbench
from sdbench.base.cache import private_folder
from sdbench.base.packages import INSTALL
from sdbench.base.shared_memory import FOLDER as SHARED_MEMORY
from sdbench.base.shared_memory import find_stale
from sdbench.base.units import BYTES_PER_GIB, counted
from sdbench.doctor.finding import ERROR, OK, SKIPPED, WARNING, Job, Seen, check
from sdbench.doctor.gpus import read_gpus
from sdbench.ranks.distributed import Ranks
from sdbench.record.provenance import NO_COMMIT, PACKAGES, git_state, package_versions

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

REPOSITORY = Path(__file__).resolve().parents[2]
# What NVIDIA recommends for NCCL in a container (NCCL user guide, Troubleshooting: --shm-size=1g).
NCCL_BYTES = 1 * BYTES_PER_GIB
# Enough for records, logs and traces, without copies of a data set.
LOW_FREE_BYTES = 1 * BYTES_PER_GIB


@check("software", INSTALL)
def check_software(job: Job) -> Seen:
    """Check that the packages have the versions pinned for one of the sets of packages."""
    versions, state = package_versions(), git_state()
    yield OK, ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if state["commit"]:
        yield OK, f"commit {state['commit'][:10]}{' with changes' if state['dirty'] else ''}"
    else:
        yield WARNING, NO_COMMIT
    minor = ".".join((versions["torch"] or "").split(".")[:2])
    of_torch = REPOSITORY / f"requirements-torch-{minor}.txt"
    file = of_torch if of_torch.is_file() else REPOSITORY / "requirements.txt"
    if not file.is_file():
        yield SKIPPED, "the versions are compared with requirements.txt, which only a checkout has"
        return
    for name, pin in _read_pins(file).items():
        # torch brings those of NVIDIA: others for another CUDA, none for a CPU.
        if name not in PACKAGES or name.startswith("nvidia-"):
            continue
        version = versions[name]
        if version is None:
            yield ERROR, f"{name} is not installed"
        elif version not in pin:  # 2.7.0+cu126 is in ==2.7.0
            yield WARNING, f"{name} {version} where {pin} is pinned"


def _read_pins(file: Path) -> dict[str, SpecifierSet]:
    """Read the allowed versions from a file of requirements, by package."""
    from packaging.requirements import Requirement

    lines = file.read_text(encoding="utf-8").splitlines()
    lines = [line.partition("#")[0].strip() for line in lines]
    pins = [Requirement(line) for line in lines if line]
    return {pin.name: pin.specifier for pin in pins if pin.marker is None or pin.marker.evaluate()}


def _show_gib(num_bytes: float) -> str:
    return f"{num_bytes / BYTES_PER_GIB:.1f} GiB"


def count_ranks_per_node(job: Job) -> int:
    """Return the ranks of the job here: one per GPU, even if the doctor has one per node."""
    return max(job.ranks.local_world_size, len(read_gpus()))


@check("model", "--model_name FOLDER loads complete weights from a disk")
def check_model(job: Job) -> Seen:
    """Check that the model is available and its files of weights are not truncated."""
    from sdbench.models.architecture import resolve_architecture
    from sdbench.models.components import count_parameters

    config = job.request.config
    architecture = resolve_architecture(
        config.model_name, revision=config.model_revision, random_weights=config.random_weights
    )
    counts = count_parameters(architecture)
    job.architecture = architecture
    job.num_trainable, num_parameters = counts[architecture.family.denoiser], sum(counts.values())
    found = f"{architecture.name}, {job.num_trainable:,} of {num_parameters:,} parameters trained"
    yield OK, found


@check("plan", "benchmark.py would refuse or fail as well")
def check_plan(job: Job) -> Seen:
    """Check that the job's flags fit each other and the memory of this node."""
    from sdbench.measure.hardware import check_gpu_code, inspect_machine
    from sdbench.plan.resolve import resolve

    machine = inspect_machine()
    check_gpu_code(machine)
    # Data and results have checks of their own, and their places may not answer.
    no_data = dict.fromkeys(("remote", "local", "streams")) | {"data_format": "synthetic"}
    duration = job.request.config.max_duration
    config = dataclasses.replace(
        job.request.config,
        **no_data,
        missing_latents="error",
        # The length of an epoch depends on the data.
        max_duration=None if (duration or "").endswith("ep") else duration,
        # Synthetic samples may have more shapes than the data, each with a first step.
        warmup_batches=None if job.request.config.buckets else job.request.config.warmup_batches,
        results_dir=tempfile.gettempdir(),
    )
    local_world_size = count_ranks_per_node(job)
    world_size = job.ranks.num_nodes * local_world_size
    job.plan = resolve(
        dataclasses.replace(job.request, config=config),
        machine=machine,
        ranks=Ranks(0, world_size, 0, local_world_size),
    )
    config = job.plan.config
    found = (
        f"{counted(world_size, 'rank')}, {counted(config.batch_size, 'image')} of "
        f"{config.image_size} px a step, "
        f"micro-batches of {config.device_train_microbatch_size}, estimated peak of a rank "
        f"{job.plan.memory.total_gib:.1f} GiB"
    )
    yield OK, found


@check(
    "processes",
    "give each task its cores (srun --cpus-per-task, docker run --cpuset-cpus), or start fewer "
    "ranks on a node, or fewer --num_workers",
)
def check_processes(job: Job) -> Seen:
    """Check that there are enough processors for ranks and loaders."""
    num_cores = sdbench.NUM_CPUS
    num_ranks = count_ranks_per_node(job)
    level = WARNING if num_cores < num_ranks else OK
    yield level, f"{num_cores} cores for {counted(num_ranks, 'rank')}"
    if job.plan is not None:
        num_loaders = job.plan.config.num_workers * num_ranks
        yield WARNING if num_loaders > num_cores else OK, f"{num_loaders} loader processes"


@check(
    "shared memory",
    "docker run --shm-size, in a pod an emptyDir of medium Memory at /dev/shm, or fewer "
    "--num_workers; the next run that uses Streaming removes files of killed runs",
)
def check_shared_memory(job: Job) -> Seen:
    """Check that batches and NCCL fit into /dev/shm, without files of killed runs."""
    if not SHARED_MEMORY.is_dir():
        yield SKIPPED, "no /dev/shm on this system"
        return
    usage, needed_bytes = shutil.disk_usage(SHARED_MEMORY), 0
    yield OK, f"{_show_gib(usage.free)} of {_show_gib(usage.total)} free in /dev/shm"
    if job.plan is not None:
        # Each worker holds the batches that it prepares and the last one taken, as uint8.
        config, ranks = job.plan.config, job.plan.ranks
        num_batches = config.num_workers * (config.prefetch_factor + 1) * ranks.local_world_size
        num_images = num_batches * config.batch_size // ranks.world_size
        needed_bytes = 3 * config.image_size**2 * num_images
    if usage.free < needed_bytes:
        yield ERROR, f"batches of the loaders need {_show_gib(needed_bytes)}"
    elif usage.free < needed_bytes + NCCL_BYTES and len(read_gpus()) > 1:
        yield WARNING, "loaders and NCCL may need more"
    if stale := find_stale():
        yield WARNING, f"{len(stale)} files of killed runs, e.g. {stale[0].name}"


@check("disk", "free some space, or name another folder by the flag or variable")
def check_disk(job: Job) -> Seen:
    """Check that records, caches and temporary files can be written."""
    config = job.request.config
    temporary = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    folders = {"TMPDIR": temporary, "XDG_CACHE_HOME": private_folder()}
    if job.ranks.rank == 0:  # which writes the record
        folders["--results_dir"] = Path(config.results_dir)
    if config.remote and config.local:
        folders["--local"] = Path(config.local)
    for flag, folder in folders.items():
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        free_bytes = shutil.disk_usage(there).free
        level, why = WARNING if free_bytes < LOW_FREE_BYTES else OK, ""
        try:
            with tempfile.NamedTemporaryFile(dir=there, prefix=".sdbench-doctor-") as file:
                file.write(bytes(2**20))
                file.flush()
        except OSError as problem:
            level, why = ERROR, f": {os.strerror(problem.errno or 0)}"
        yield level, f"{flag} {folder} has {_show_gib(free_bytes)} free{why}"


@check("data", "make the data complete and reachable from this node")
def check_data(job: Job) -> Seen:
    """Check that the first sample of each place of the data can be read and decoded."""
    from sdbench.data import detect_format
    from sdbench.data.formats.mds_index import parse_streams

    config = job.request.config
    if config.streams is not None:
        for place, _ in parse_streams(config.streams):
            yield OK, _read_first_sample(job, place, data_format="mds")
    elif place := config.remote or config.local:
        is_told = config.data_format != "auto"
        data_format = config.data_format if is_told else detect_format(place)
        yield OK, _read_first_sample(job, place, data_format=data_format)
    else:
        yield SKIPPED, "no --remote, --local or --streams"


def _read_first_sample(job: Job, place: str, *, data_format: str) -> str:
    """Read and decode the first sample of the data at a place; return a line about it."""
    from sdbench.data.convert.rows import describe_source, open_rows
    from sdbench.data.convert.verify import tell_kind
    from sdbench.data.places.remote import is_url
    from sdbench.data.samples import MissingLatentError

    first = _find_first_part(place, data_format)
    options: dict[str, Any] = {}
    if job.architecture is not None:
        options["inputs"] = job.architecture.inputs
    # A cache of its own: a copy of an earlier run would not show that the place answers.
    with tempfile.TemporaryDirectory(prefix="sdbench-doctor-") as cache:
        options["local"] = cache if is_url(place) else None
        started_s = time.perf_counter()
        rows = open_rows(tell_kind(describe_source(first, data_format=data_format, **options)))
        with contextlib.suppress(MissingLatentError):  # one resolution of several may be missing
            rows.read(0)
        seconds = time.perf_counter() - started_s
    return f"{data_format}: read the first of {len(rows)} samples of {first} in {seconds:.2f} s"


def _find_first_part(place: str, data_format: str) -> str:
    """Return the first tar or remote parquet file of a place; else the place itself."""
    from sdbench.data.places.place_files import find_files
    from sdbench.data.places.remote import is_url

    if data_format == "webdataset" or (data_format == "parquet" and is_url(place)):
        return find_files(place, data_format=data_format)[0]
    return place
