"""The phases of a step add up to the step, on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def test_phases_add_up_to_the_step(repository, tmp_path):
    output = tmp_path / "phases.json"
    script = ["tests/reference/step_phases.py", "--model_name", "tiny", "--measure_batches", "3"]
    subprocess.run(
        [sys.executable, *script, "--output", str(output)], cwd=repository, check=True, timeout=120
    )
    medians_s = json.loads(output.read_text())["median_s"]
    phases_s = sum(value for phase, value in medians_s.items() if phase != "step")
    assert phases_s == pytest.approx(medians_s["step"])
    assert all(medians_s[phase] > 0 for phase in ("vae_encode", "text_encode", "unet_forward"))
    assert abs(medians_s["other"]) < 0.5 * medians_s["step"]
