"""The recipe of coloured shapes: from nothing to pictures that a program judges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import generate
import train
from sdbench.cli import main as sdbench
from tests.train.written import read_events


def shorten(configs: Path, name: str, num_steps: int, *argv: str) -> None:
    """Train with a recipe for so many steps."""
    line = ["--config", str(configs / f"{name}.yaml"), "--max_duration", f"{num_steps}ba"]
    assert train.main([*line, "--validate_every_batches", str(num_steps), *argv]) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_shortened_recipe_learns(repository):
    """Every command of it runs, and the losses go where those of an untrained model never are."""
    configs = repository / "configs"
    numbers = ("--num_train_images", "512", "--num_validation_images", "64")
    assert sdbench(["shapes", "--folder", "shapes", *numbers]) == 0
    pictures = ("--sample_every_batches", "70", "--sample_steps", "2")
    for name, num_steps, argv in (("shapes_vae", 110, ()), ("shapes", 70, pictures)):
        shorten(configs, name, num_steps, *argv)
    assert len(list(Path("runs/shapes/samples").glob("*.png"))) == 1
    # A white picture has an error of 0.25, and a model that knows only the mean latent one of 1.
    assert read_events(Path("runs/shapes_vae"), "validation")[-1]["loss"] < 0.1
    assert read_events(Path("runs/shapes"), "validation")[-1]["loss"] < 0.5

    assert sdbench(["export", "runs/shapes"]) == 0
    prompts = Path("shapes/prompts.txt").read_text().splitlines()
    Path("prompts.txt").write_text("\n".join(prompts[::8]))
    line = ["--model_name", "runs/shapes/model", "--prompt_file", "prompts.txt"]
    line += ["--guidance_scale", "1.5", "--num_steps", "8", "--folder", "drawn"]
    assert generate.main(line) == 0
    assert sdbench(["judge", "drawn"]) == 0
    assert json.loads(Path("drawn/judge.json").read_text())["num_pictures"] == 8


@pytest.mark.full  # three minutes more
@pytest.mark.timeout(1800)
def test_a_shortened_recipe_of_a_transformer_learns(repository):
    assert sdbench(["shapes", "--folder", "shapes", "--num_train_images", "512"]) == 0
    for name, num_steps in (("shapes_vae", 150), ("shapes_flux", 100)):
        shorten(repository / "configs", name, num_steps)
    # Of a flow the error is 2 for a model that predicts nothing, and 0.92 was measured here.
    assert read_events(Path("runs/shapes_flux"), "validation")[-1]["loss"] < 1.3
