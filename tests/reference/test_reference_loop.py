"""The reference loop trains the model and the recipe that it is compared for."""

from __future__ import annotations

import pytest
import torch

from tests.reference import diffusion_benchmark_loop
from tools import compare_presets


def test_the_reference_model_has_the_parameters_of_sd2_base() -> None:
    with torch.device("meta"):
        model = diffusion_benchmark_loop.LatentDiffusion()
    counts = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_children()
    }
    assert counts["unet"] == 865_910_724
    assert counts["vae"] == 83_653_863
    assert counts["text_encoder"] == 340_387_840
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trainable == 865_910_724


def test_the_ratio_is_that_of_the_median_step_times() -> None:
    times_s = {"seed": [16.0, 16.1, 15.9], "fast": [8.0, 8.05, 7.95]}
    runs = [
        {"program": program, "step_time_p50_s": time_s}
        for program, program_times_s in times_s.items()
        for time_s in program_times_s
    ]
    comparison = compare_presets.compare_medians(runs, "fast", "seed")
    assert comparison.ratio == pytest.approx(2.0)
    assert comparison.verdict == "faster"
