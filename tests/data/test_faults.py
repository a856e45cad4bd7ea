"""Does every fault of an MDS data set end a run, with an error that names the culprit?"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import data
from tests.data import datasets
from tests.refusals import printed_refusal

SHARD, INDEX = "shard.00002.mds", "index.json"


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, 5000)


class Fault(NamedTuple):
    """A fault of a data set that is read in place, or copied.

    Attributes:
        name: Of the test.
        where: How the data set is read.
        file: The culprit.
        damage: Causes the fault.
        refused: The value that is refused before a run, with the data set's folder as ``{remote}``;
            None if only a run finds the fault.
    """

    name: str
    where: str
    file: str
    damage: Callable[[Path], None]
    refused: str | None = None


FAULTS = (
    Fault("missing", "in place", SHARD, lose, SHARD),
    Fault("truncated", "in place", SHARD, cut, f"{{remote}}/{SHARD}"),
    Fault("bit flip", "in place", SHARD, datasets.flip_a_bit),
    Fault("bit flip in remote", "copied", SHARD, datasets.flip_a_bit),
    Fault("truncated index", "in place", INDEX, cut, f"{{remote}}/{INDEX}"),
    Fault("missing index", "in place", INDEX, lose, "{remote}"),
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
    fault.damage(remote / fault.file)
    argv = [*place, "--num_workers", str(num_workers), "--image_size", "16"]
    sizes = ["--batch_size", "4", "--num_batches", "24"]
    code = data.main([*argv, *sizes, "--results_dir", str(tmp_path / "runs")])
    assert code == (1 if fault.refused is None else 2)
    told = capsys.readouterr().err
    assert fault.file in told
    if fault.refused is not None:
        assert str(printed_refusal(told).value) == fault.refused.format(remote=remote)
