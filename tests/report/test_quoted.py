"""The quoted figures of Flux.1 agree with each other and with what was published about them."""

from __future__ import annotations

import pytest

from sdbench.analysis.quoted import make_target_table
from sdbench.base.yaml_file import read_mapping
from sdbench.forecast.cost import RECIPES_FILE
from sdbench.report.figures import read_figures
from tests.report.results_folder import RESULTS, rows_of

# As recomputed from the logs of mlcommons/training_results_v5.1: GPUs, GPU, submitter, batch,
# minutes, images/s, images/s per GPU, TFLOP/s per GPU (20.3 TFLOP an image).
PUBLISHED = """
16 GB300 | NVIDIA | 1024 | 146.26 | 1109 | 69.3 | 1407
16 GB200 | NVIDIA | 512 | 160.71 | 903 | 56.5 | 1146
16 B200 | Oracle | 512 | 173.83 | 817 | 51.1 | 1037
16 B200 | University of Florida | 512 | 173.45 | 817 | 51.0 | 1036
32 B200 | Nebius | 1024 | 93.17 | 1647 | 51.5 | 1045
32 B200 | University of Florida | 1024 | 93.46 | 1661 | 51.9 | 1054
64 B200 | University of Florida | 2048 | 60.08 | 3252 | 50.8 | 1031
72 GB300 | NVIDIA | 2304 | 44.53 | 4507 | 62.6 | 1271
72 GB300 | Supermicro | 2304 | 44.78 | 4457 | 61.9 | 1257
72 GB200 | NVIDIA | 2304 | 49.66 | 4015 | 55.8 | 1132
72 B200 | University of Florida | 2304 | 54.54 | 3657 | 50.8 | 1031
72 B200 | Oracle | 2304 | 55.22 | 3676 | 51.1 | 1036
128 B200 | University of Florida | 4096 | 47.72 | 6303 | 49.2 | 1000
512 GB300 | NVIDIA | 2048 | 17.12 | 11984 | 23.4 | 475
512 GB200 | NVIDIA | 2048 | 17.91 | 11112 | 21.7 | 441
1152 GB200 | NVIDIA | 2304 | 12.51 | 17323 | 15.0 | 305
"""
# Images until the target, means of 20 reference runs, by global batch.
CONVERGENCE = {512: 7.24e6, 1024: 8.49e6, 2048: 10.35e6, 4096: 15.35e6}


@pytest.fixture(scope="module")
def quoted():
    return read_figures(RESULTS / "quoted" / "mlperf_training_flux1.csv")


def published():
    for line in PUBLISHED.strip().splitlines():
        machine, submitter, *numbers = (part.strip() for part in line.split("|"))
        num_gpus, gpu = machine.split()
        yield (int(num_gpus), gpu, submitter, *map(float, numbers))


def test_each_figure_is_the_published_one_and_gives_the_rates_per_gpu_printed_beside_it(quoted):
    results = [row for row in quoted if row["images_per_second"]]
    assert len(results) == 16
    for row, (num_gpus, gpu, submitter, batch, minutes, rate, per_gpu, tflops) in zip(
        results, published(), strict=True
    ):
        names = ("num_gpus", "gpu", "submitter", "global_batch", "minutes_to_target")
        assert [row[name] for name in names] == [num_gpus, gpu, submitter, batch, minutes]
        assert row["images_per_second"] == rate
        # Computed there before images/s was rounded to whole numbers.
        assert rate / num_gpus == pytest.approx(per_gpu, abs=0.05 + 0.5 / num_gpus)
        assert row["teraflop_per_image"] * rate / num_gpus == pytest.approx(
            tflops, abs=0.5 + 20.3 * 0.5 / num_gpus
        )
    (of_amd,) = [row for row in quoted if not row["images_per_second"]]
    assert [of_amd[name] for name in names] == [512, "MI300X", "Oracle", 4096, 74.44]


def test_convergence_points_are_the_recipes_and_explain_the_minutes(quoted):
    points = read_figures(RESULTS / "quoted" / "mlperf_flux1_convergence.csv")
    assert {row["global_batch"]: row["num_images"] for row in points} == CONVERGENCE
    recipes = read_mapping(RECIPES_FILE, allowed="", flag="")
    for batch, num_images in CONVERGENCE.items():
        (stage,) = recipes[f"mlperf-flux1-{batch}"]["stages"]
        assert stage == {"image_size": 256, "num_images": num_images}
    for row in quoted:
        if row["images_per_second"] and row["global_batch"] in CONVERGENCE:
            num_images = 60 * row["minutes_to_target"] * row["images_per_second"]
            # Minutes include the validation, and runs differ from the reference's mean.
            assert 1.0 < num_images / CONVERGENCE[row["global_batch"]] < 1.25, row


def test_the_table_of_targets_has_the_fastest_gpu_first_and_the_hours_of_all(quoted):
    rows = rows_of(make_target_table(quoted))
    first, last = rows[0], rows[-1]
    assert (first["GPU"], first["images/s per GPU"]) == ("GB300", "69.3")
    assert first["TFLOP/s per GPU"] == "1407"
    # 16 GPUs for 146.26 minutes.
    assert float(first["GPU-hours to the target"]) == pytest.approx(16 * 146.26 / 60, abs=0.005)
    assert last["GPU"] == "MI300X" and len(rows) == 17
    assert make_target_table([{"gpu": "B200", "images_per_second": 1.0}]) is None
