"""What every test can rely on: no network, one thread, and the repository's folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

# Before torch is imported, here and in the processes that tests start. One thread makes sums come
# out in one order and keeps two ranks from fighting over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What torch.compile would start beside each process that imports it.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"


@pytest.fixture
def picture_folder(tmp_path: Path) -> Path:
    """Ten pictures of different shapes with captions beside them, as a user may have."""
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
    """Sleeps on a clock of its own, which nothing else moves, and by which steps are timed."""
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
