"""What `python -m sdbench submit` refuses, and how it tells strong from weak scaling.

On a real Slurm: tests/launch/test_slurm.py.
"""

from __future__ import annotations

import pytest

from sdbench.cli import main
from sdbench.launch.submit import make_table
from tests.report.results_folder import make_record


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--nodes has a value of the wrong kind: got ''; allowed: a whole number"),
        (("--nodes", "1,x"), "got 'x'; allowed: a whole number of at least 1"),
        (
            ("--nodes", "1,2", "--scaling", "weak", "--", "--use_ema"),
            "weak scaling needs the global batch on the fewest nodes: got '--use_ema'",
        ),
        (
            ("--nodes", "2,3", "--scaling", "weak", "--", "--batch_size", "8"),
            "cannot grow in proportion: got 3; allowed: multiples of 2 nodes",
        ),
        (
            ("--nodes", "1", "--", "--results_dir", "here"),
            "each job gets a folder of its own: got '--results_dir'",
        ),
    ],
)
def test_bad_input_is_refused(argv, message, capsys):
    assert main(("submit", *argv)) == 2
    assert message in capsys.readouterr().err


def test_without_slurm_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert main(("submit", "--nodes", "1")) == 2
    assert "no part of a Slurm cluster" in capsys.readouterr().err


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
        (
            (2048, 3072),
            "Neither strong nor weak scaling: global batch and images per rank both differ",
        ),
    ],
)
def test_strong_and_weak_scaling_are_told_apart(batches, caption):
    table = make_table([make_run(1, batches[0], 400.0), make_run(2, batches[1], 600.0)])
    assert table.caption == caption
    # 300 images/s of each node are 75 % of 400.
    assert [row[5].value for row in table.rows] == [100.0, 75.0]
