"""The recipe of coloured shapes: from nothing to pictures that a program judges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import generate
import train
from sdbench.cli import main as sdbench
from tests.train.written import read_events


def go_through(configs: Path, *, num_images: int, vae: tuple, diffusion: tuple) -> dict:
    """Run the whole recipe in the working folder, and return the verdict on 8 prompts."""
    numbers = ("--num_train_images", num_images, "--num_validation_images", 64)
    assert sdbench(["shapes", "--folder", "shapes", *map(str, numbers)]) == 0
    for name, argv in (("shapes_vae", vae), ("shapes", diffusion)):
        line = ["--config", str(configs / f"{name}.yaml"), *map(str, argv)]
        assert train.main(line) == 0
    assert sdbench(["export", "runs/shapes"]) == 0
    prompts = Path("shapes/prompts.txt").read_text().splitlines()
    Path("prompts.txt").write_text("\n".join(prompts[::8]))
    line = ["--model_name", "runs/shapes/model", "--prompt_file", "prompts.txt"]
    line += ["--guidance_scale", "1.5", "--num_steps", "8", "--folder", "drawn"]
    assert generate.main(line) == 0
    assert sdbench(["judge", "drawn"]) == 0
    return json.loads(Path("drawn/judge.json").read_text())


@pytest.mark.slow
def test_every_command_of_the_recipe_runs(tmp_path, repository):
    short = ("--max_duration", "2ba", "--batch_size", 4, "--device_train_microbatch_size", 4)
    short += ("--num_validation_images", 8, "--validate_every_batches", 1)
    pictures = ("--sample_every_batches", 2, "--sample_steps", 2)
    verdict = go_through(
        repository / "configs", num_images=16, vae=short, diffusion=(*short, *pictures)
    )
    assert verdict["num_pictures"] == 8
    assert len(list(Path("runs/shapes/samples").glob("*.png"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_shortened_recipe_learns(tmp_path, repository):
    """The losses go where those of an untrained model never are."""
    go_through(
        repository / "configs",
        num_images=512,
        vae=("--max_duration", "150ba", "--validate_every_batches", 150),
        diffusion=("--max_duration", "100ba", "--validate_every_batches", 100),
    )
    # A white picture has an error of 0.25, and a model that knows only the mean latent one of 1.
    assert read_events(Path("runs/shapes_vae"), "validation")[-1]["loss"] < 0.1
    assert read_events(Path("runs/shapes"), "validation")[-1]["loss"] < 0.5
