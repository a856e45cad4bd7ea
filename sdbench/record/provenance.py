"""Reads what is needed to repeat a run: package versions, commit and environment."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from sdbench.base.secrets import is_secret_name

PACKAGES = (
    "torch",
    "torchvision",
    "mosaicml",
    "mosaicml-streaming",
    "webdataset",
    "pyarrow",
    "pillow",
    "diffusers",
    "transformers",
    "ray",
    "lightning",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
)
NO_COMMIT = (
    "the commit of the suite is not known: there is no checkout that git can read, and "
    "SDBENCH_GIT_COMMIT is not set"
)
# Variables that change speed, by prefix and by name. The whole environment would hold secrets.
ENVIRONMENT_PREFIXES = (
    *("NCCL_", "FI_", "GLOO_", "OMP_", "GOMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "OPENBLAS_"),
    *("CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "TORCH", "PYTORCH_", "ATEN_"),
)
ENVIRONMENT_NAMES = (
    *("GLIBC_TUNABLES", "MALLOC_CONF", "MALLOC_ARENA_MAX", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE"),
    "NVIDIA_TF32_OVERRIDE",
)
# Untracked files that count as code of the suite: Python anywhere, which a program beside it may
# import, and everything in the package.
CODE = (":/*.py", ":/sdbench")
# Folders of installed packages.
INSTALLED = {"site-packages", "dist-packages"}
# torchrun's variables about its own run (temporary files, restarts), which do not change speed.
LAUNCHER_PREFIX = "TORCHELASTIC_"


def package_versions() -> dict[str, str | None]:
    """Installed version of each of `PACKAGES`; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except (metadata.PackageNotFoundError, KeyError):  # KeyError: its installation was cut off
            versions[package] = None
    return versions


def other_versions() -> dict[str, str]:
    """Installed version of every package outside `PACKAGES`, by its normalized name.

    Packages vendored within another one are left out: Ray and setuptools put theirs on `sys.path`
    when they are imported, which would change the answer within a process.
    """
    return dict(_other_versions(tuple(sys.path)))


@functools.cache  # the metadata of 250 packages take 0.4 s to read, each time
def _other_versions(path: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for installed in metadata.distributions(path=list(path)):
        name, version = installed.metadata["Name"], installed.metadata["Version"]
        above = {folder.name for folder in Path(str(installed.locate_file(""))).parents}
        # Both are missing if its installation was interrupted.
        if name and version and not above & INSTALLED:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)  # PEP 503
    return {name: found[name] for name in sorted(found.keys() - {*PACKAGES})}


def speed_environment() -> dict[str, str]:
    """Environment variables that change speed."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES)
        and not name.startswith(LAUNCHER_PREFIX)
        and not is_secret_name(name)
    }


def git_state() -> dict[str, str | bool | None]:
    """Commit of the suite and whether its code differs from it; None where that is unknown.

    It differs if a tracked file is changed, or if there is untracked code: a module beside a
    program is imported before an installed one. A container image has no checkout; its build sets
    SDBENCH_GIT_COMMIT to the 40-digit commit.
    """
    commit = _git("rev-parse", "HEAD") or os.environ.get("SDBENCH_GIT_COMMIT", "")
    commit = commit if re.fullmatch("[0-9a-f]{40}", commit) else None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    untracked = _git("ls-files", "--others", "--exclude-standard", "--", *CODE)
    is_unknown = changes is None or untracked is None
    return {"commit": commit, "dirty": None if is_unknown else bool(changes or untracked)}


def is_in_history(commit: str) -> bool | None:
    """Whether the checkout's HEAD comes from a commit; None if its history does not reach so far.

    A shallow clone has a part of its history, and an installed package none.
    """
    if _git("merge-base", "--is-ancestor", commit, "HEAD") is not None:
        return True
    return False if _git("rev-parse", "--is-shallow-repository") == "false" else None


def _git(*arguments: str) -> str | None:
    # git refuses another user's checkout, which a container often has, because its settings may run
    # a program. Here the checkout's own code runs already.
    command = ["git", "-c", "safe.directory=*", *arguments]
    folder = Path(__file__).parent
    if INSTALLED & {parent.name for parent in folder.parents}:
        return None  # what it lies in may be a checkout of something else
    try:
        completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return completed.stdout.strip()
