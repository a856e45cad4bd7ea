"""Is there room in shared memory and on disk, and is it free of what killed runs have left?"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from sdbench.base.cache import private_folder
from sdbench.base.shared_memory import FOLDER as SHARED_MEMORY
from sdbench.base.shared_memory import find_stale
from sdbench.doctor.finding import (
    BYTES_PER_GIB,
    BYTES_PER_MIB,
    Finding,
    error,
    join,
    number_of,
    ok,
    show_bytes,
    skipped,
    warning,
)
from sdbench.doctor.gpus import count_gpus
from sdbench.doctor.job import Job

# What Docker gives a container unless it is told otherwise (docker run, --shm-size).
CONTAINER_DEFAULT_BYTES = 64 * BYTES_PER_MIB
# What NVIDIA recommends for NCCL in a container (NCCL user guide, Troubleshooting: --shm-size=1g).
NCCL_BYTES = 1 * BYTES_PER_GIB
# benchmark.py refuses a results folder with less.
MIN_FREE_BYTES = 16 * BYTES_PER_MIB
# Enough for records, logs and traces; copies of a data set take what it takes.
LOW_FREE_BYTES = 1 * BYTES_PER_GIB
FLAGS = {
    "temporary folder": "TMPDIR",
    "cache folder": "XDG_CACHE_HOME",
    "results folder": "--results_dir",
}


def check_shared_memory(job: Job) -> Finding:
    """Whether batches of the loaders, and NCCL, fit into /dev/shm."""
    if not SHARED_MEMORY.is_dir():
        return skipped("no /dev/shm on this system")
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"/dev/shm has {show_bytes(usage.free)} of {show_bytes(usage.total)} free"
    needed = 0 if job.model is None else _loader_bytes(job)
    if needed:
        found += f", batches of {job.model.num_workers} loaders per rank take {show_bytes(needed)}"
    wanted = needed + (NCCL_BYTES if count_gpus() > 1 else 0)
    gib = -(-max(2 * wanted, NCCL_BYTES) // BYTES_PER_GIB)
    advice = (
        f"docker run --shm-size={gib}g, in a pod an emptyDir of medium Memory at /dev/shm, or "
        "fewer --num_workers"
    )
    if usage.free < needed:
        return error(found, advice)
    if usage.free < wanted or usage.total <= CONTAINER_DEFAULT_BYTES:
        return warning(found, advice)
    return ok(found)


def _loader_bytes(job: Job) -> int:
    """Images that all loaders of a node hold: those in the making and the one just taken."""
    model = job.model
    image_bytes = 3 * model.image_size**2
    num_batches = model.num_workers * (job.prefetch_factor + 1) * job.ranks_per_node
    return num_batches * model.images_per_rank * image_bytes


def check_stale_shared_memory(job: Job) -> Finding:
    """Whether killed runs of this user have left something in shared memory."""
    if not SHARED_MEMORY.is_dir():
        return skipped("no /dev/shm on this system")
    stale = find_stale()
    if not stale:
        return ok("none of this user's")
    names = ", ".join([path.name for path in stale[:3]] + ["..."] * bool(stale[3:]))
    return warning(
        f"{number_of(len(stale), 'file')} of runs that are no more: {names}",
        "the next run that needs their names removes them; rm them to have the memory back now",
    )


def check_disk(job: Job) -> Finding:
    """Whether records, caches and temporary files can be written.

    Raises:
        ConfigError: As `private_folder`.
    """
    folders = {
        "temporary folder": Path(os.environ.get("TMPDIR") or tempfile.gettempdir()),
        "cache folder": private_folder(),
    }
    if job.ranks.rank == 0:  # which writes the record
        folders["results folder"] = Path(job.results_dir)
    if job.remote and job.local:
        folders["copies of the data"] = Path(job.local)
    return join([_check_folder(name, folder) for name, folder in folders.items()])


def _check_folder(name: str, folder: Path) -> Finding:
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    found = f"{name} {folder}: {show_bytes(shutil.disk_usage(there).free)} free"
    flag = FLAGS.get(name, "--local")
    advice = f"free some space, or name another folder with {flag}"
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".sdbench-doctor-") as file:
            file.write(bytes(MIN_FREE_BYTES))
            file.flush()
    except OSError as problem:
        return error(f"{found}, and cannot be written ({os.strerror(problem.errno or 0)})", advice)
    is_low = shutil.disk_usage(there).free < LOW_FREE_BYTES
    return warning(found, advice) if is_low else ok(found)
