"""Set-up of all tests: no network, one thread, a cache and a working folder of their own."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdbench.base.shared_memory import NUM_ALL, NUM_OWN, VARIABLE

# What is imported stays. To look through it for garbage took a fifteenth of the tests' time, so the
# collector begins when all tests are collected.
gc.disable()
# Set before torch is imported, here and in the processes that tests start. With one thread sums
# have one order, and two ranks do not compete for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No pool of compiler processes beside each process that imports torch.compile.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
# The user's cache is neither read nor written. The workers of pytest-xdist share one.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="sdbench-tests-")

# A data set of Streaming that is thrown away leaves its files of shared memory open, about 20,
# and a user may have 1024 open.
_, most_open = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most_open, most_open))

# Of a process of tests, some of which run at once. A run of the miniature takes up to 1.5 GB.
MAX_KEPT_BYTES, MIN_FREED_BYTES = 2 * 10**9, 3 * 10**8
# Folders and files of tests that take longest.
LONGEST = {"train", "test_switches"}
# Of a process of tests and what it starts.
WORKER_BYTES = 6 * 10**9


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_auto_num_workers() -> int:
    """Workers for `-n auto`: one more than cores, since some tests wait, as memory allows."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory_bytes // WORKER_BYTES))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        _take_names_of_its_own()
    else:
        cache = os.environ["XDG_CACHE_HOME"]
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that the workers end at about the same time."""
    items.sort(key=lambda item: not {item.path.parent.name, item.path.stem} & LONGEST)
    gc.freeze()
    gc.enable()


def _take_names_of_its_own() -> None:
    """Give this worker shared memory and a folder for temporary files of its own.

    Streaming gives its shared memory and its lock files the same names in each run on a machine.
    """
    number = os.getpid() % (NUM_ALL // NUM_OWN)
    os.environ[VARIABLE] = str(number * NUM_OWN)
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t-")


@pytest.fixture(scope="session", autouse=True)
def gradients_after_a_fork() -> None:
    """Start autograd's engine before a test of the memory estimate makes torch see a fake GPU.

    The engine would begin a thread for that GPU, and no forked rank could compute gradients.
    """
    import torch

    torch.ones(1, requires_grad=True).backward()


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty folder: the repository's may have runs/ and results/."""
    monkeypatch.chdir(tmp_path)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="session")
def memory_in_use() -> dict[str, int]:
    """The least since memory was last given back, in bytes: to give back takes 50 ms and more."""
    return {"bytes": 0}


@pytest.fixture(autouse=True)
def memory_given_back(memory_in_use: dict[str, int]) -> Iterator[None]:
    """Give freed memory back: runs in a test's process tell glibc to keep it, each with others."""
    yield
    if _resident_bytes() > max(MAX_KEPT_BYTES, memory_in_use["bytes"] + MIN_FREED_BYTES):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        memory_in_use["bytes"] = _resident_bytes()
    memory_in_use["bytes"] = min(memory_in_use["bytes"], _resident_bytes())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's place for the single rank, or --engine ray would start a Ray cluster."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def plain_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the memory of every step for that of a plain one: each other costs seconds to replay.

    For tests of other things; those of the estimate are in tests/models/test_size.py.
    """
    from sdbench.models import memory
    from sdbench.settings.training import DENOISER

    plain = {
        "trained": (DENOISER,),
        "learns_token": False,
        "precision": "fp32",
        "encoder_dtype": "fp32",
        "attention": "sdpa",
        "vae_attention": "sdpa",
        "activation_checkpointing": "none",
        "encodes_images": True,
    }
    profile_step = memory.profile_step
    # The layers of a LoRA are checked by its replay.
    monkeypatch.setattr(
        memory,
        "profile_step",
        lambda step: profile_step(step if step.lora else dataclasses.replace(step, **plain)),
    )


@pytest.fixture
def without_compiling() -> Iterator[None]:
    """Let torch.compile run the code that it was given: compiling takes minutes on two cores."""
    import torch

    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def picture_folder(tmp_path: Path) -> Path:
    """A folder of ten pictures of different shapes, each with a caption in a text file."""
    from PIL import Image

    folder = tmp_path / "my-images"
    folder.mkdir()
    for index in range(10):
        picture = Image.new("RGB", (90 + 7 * index, 100 - index), (25 * index, 20, 200))
        picture.save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"picture number {index}")
    return folder


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the clock by which steps are timed; nothing else moves it."""
    from sdbench.measure.phases import PhaseClock
    from sdbench.measure.timer import StepTimer

    clock = SimpleNamespace(now_s=0.0)
    for owner in (PhaseClock, StepTimer):
        monkeypatch.setitem(owner.__init__.__kwdefaults__, "clock", lambda: clock.now_s)

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    return sleep


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds benchmark.py."""
    return Path(__file__).resolve().parents[1]
