"""What `python -m sdbench submit` refuses, and how it distinguishes strong from weak scaling.

On a real Slurm: tests/launch/test_slurm.py.
"""

from __future__ import annotations

import pytest

from sdbench.base.errors import ConfigError
from sdbench.launch import submit
from tests.report.results_folder import make_record


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        ((), "--nodes", ""),
        (("--nodes", "1,2", "--scaling", "weak", "--", "--use_ema"), "--batch_size", "--use_ema"),
        (("--nodes", "2,3", "--scaling", "weak", "--", "--batch_size", "8"), "--nodes", 3),
        (("--nodes", "1,2", "--scaling", "weak", "--", "--batch_size=8x"), "--batch_size", "8x"),
        (("--nodes", "1", "--", "--results_dir=here"), "--folder", "--results_dir"),
        (("--nodes", "1"), "PATH", "no sbatch on PATH"),
    ],
)
def test_bad_input_is_refused(argv, flag, value, monkeypatch):
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(ConfigError) as caught:
        submit.main(argv)
    assert (caught.value.flag, caught.value.value) == (flag, value)


def make_run(num_nodes: int, batch_size: int, rate: float) -> dict:
    return make_record(
        ranks={"world_size": 8 * num_nodes, "num_nodes": num_nodes, "ranks_per_node": 8},
        config__batch_size=batch_size,
        summary__images_per_second=rate,
        summary__images_per_second_per_device=rate / 8 / num_nodes,
    )


@pytest.mark.parametrize(
    ("batches", "caption"),
    [
        ((2048, 2048), "Strong scaling: a global batch of 2048 shared by all ranks"),
        ((2048, 4096), "Weak scaling: 256 images per rank and step"),
        ((2048, 3072), "Weak scaling: 192 or 256 images per rank and step"),
    ],
)
def test_strong_and_weak_scaling_are_told_apart(batches, caption):
    table = submit.tabulate_nodes([make_run(1, batches[0], 400.0), make_run(2, batches[1], 600.0)])
    assert table.caption == caption
    # 300 images/s of each node are 75 % of 400.
    assert [row[5].value for row in table.rows] == [100.0, 75.0]
