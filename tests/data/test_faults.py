"""Does every fault of an MDS data set end a run, with an error that names the culprit?"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import data
from tests.data import datasets

SHARD = "shard.00002.mds"


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, 5000)


def flip_a_bit(path: Path) -> None:
    """Ten bytes before the end: inside the last sample's padding, where no decoder looks."""
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


def leave(path: Path) -> None:
    """Change nothing."""


class Fault(NamedTuple):
    """A fault of a data set that is read in place, copied, or cached from an earlier run."""

    name: str
    where: str
    file: str
    damage: Callable[[Path], None]
    exit_code: int
    message: str
    flags: tuple[str, ...] = ()


FAULTS = (
    Fault("missing", "in place", SHARD, lose, 2, f"is missing from .*'{SHARD}'"),
    Fault("truncated", "in place", SHARD, cut, 2, f"{SHARD} has .* bytes: got 5000"),
    Fault("bit flip", "in place", SHARD, flip_a_bit, 1, f"{SHARD} is damaged: its xxh64 is not"),
    Fault("bit flip in remote", "copied", SHARD, flip_a_bit, 1, f"{SHARD} is damaged: its xxh64"),
    Fault("bit flip in cache", "cached", SHARD, flip_a_bit, 1, f"{SHARD} is damaged: its xxh64"),
    Fault("truncated index", "in place", "index.json", cut, 2, "index.json is damaged"),
    Fault("missing index", "in place", "index.json", lose, 2, "holds no index.json"),
    Fault(
        "unknown hash",
        "in place",
        SHARD,
        leave,
        2,
        "no such hash of every shard: got 'sha3'; allowed: auto, none, xxh64",
        ("--validate_hash", "sha3"),
    ),
)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_culprit_is_named(fault, num_workers, tmp_path, capsys):
    remote = tmp_path / "remote"
    datasets.write_mds(remote)
    place = ["--remote", str(remote)]
    if fault.where != "in place":
        place += ["--local", str(tmp_path / "cache")]
    damaged = remote
    if fault.where == "cached":
        damaged = tmp_path / "cache"
        shutil.copytree(remote, damaged)
    fault.damage(damaged / fault.file)
    argv = [*place, *fault.flags, "--num_workers", str(num_workers), "--image_size", "16"]
    sizes = ["--batch_size", "4", "--num_batches", "24"]
    code = data.main([*argv, *sizes, "--results_dir", str(tmp_path / "runs")])
    assert code == fault.exit_code
    output = capsys.readouterr().err.replace("\n", " ")
    assert re.search(fault.message, output), output
