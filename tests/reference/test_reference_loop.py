"""The reference loop trains the model and the recipe that it is compared for."""

from __future__ import annotations

import pytest
import torch

from tests.reference import diffusion_benchmark_loop
from tools import compare_presets


def test_the_reference_model_has_the_parameters_of_sd2_base() -> None:
    with torch.device("meta"):
        model = diffusion_benchmark_loop.LatentDiffusion()
    counts = {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840}
    for name, count in counts.items():
        weights = list(getattr(model, name).parameters())
        assert sum(weight.numel() for weight in weights) == count
        assert {weight.requires_grad for weight in weights} == {name == "unet"}


def test_the_ratio_is_that_of_the_median_step_times() -> None:
    times_s = [("seed", 16.0), ("seed", 16.1), ("seed", 15.9)]
    times_s += [("fast", 8.0), ("fast", 8.05), ("fast", 7.95)]
    runs = [{"program": program, "step_time_p50_s": time_s} for program, time_s in times_s]
    comparison = compare_presets.compare_medians(runs, "fast", "seed")
    assert comparison.ratio == pytest.approx(2.0)
    assert comparison.verdict == "faster"
