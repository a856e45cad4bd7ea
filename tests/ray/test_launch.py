"""--engine ray: bad input ends as with other launchers."""

from __future__ import annotations

import pytest

import benchmark

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]


def test_bad_input_ends_with_two_and_leaves_no_record(tmp_path, capsys):
    argv = ("--model_name", "tiny", "--use_synth_data", "--batch_size", "7", "--engine", "ray")
    results = tmp_path / "runs"
    code = benchmark.main([*argv, "--num_ray_workers", "2", "--results_dir", str(results)])
    printed = "".join(capsys.readouterr())
    assert code == 2, printed
    assert printed.count("error:") == 1
    assert "--batch_size" in printed
    assert not results.exists()
