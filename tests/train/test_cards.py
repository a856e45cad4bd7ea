"""The recipes for one card in configs/cards: each file tells the memory of its step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sdbench.forecast.memory_tables import CARDS
from sdbench.models import memory, replay
from sdbench.plan.memory_limit import MAX_MEMORY_FRACTION, find_need
from sdbench.plan.resolve import plan_step
from sdbench.ranks.distributed import Ranks
from sdbench.settings.recipe import parse_request
from tests.machines import make_machine

RECIPES = sorted(Path(__file__).parents[2].glob("configs/cards/*.yaml"))
MODELS = {"sdxl": "sdxl", "sd3": "sd3-medium", "flux": "flux-dev"}
TOLD = re.compile(r"# Estimated peak: ([\d.]+) GiB, of ([\d.]+) that a GPU of (\d+) GB has")


def plan_of(recipe: Path):
    text = recipe.read_text()
    (model,) = (MODELS[name] for name in MODELS if name in recipe.stem.split("_"))
    given = {"model_name": model, "remote": "here", "instance_prompt": "a photo of unqtkn dog"}
    argv = [
        word for name in given if f"\n{name}: ???" in text for word in (f"--{name}", given[name])
    ]
    request = parse_request(["--config", str(recipe), *argv], description="", epilog="")
    _, size, card = TOLD.search(text).groups()
    assert float(size) == CARDS[int(card)] and recipe.stem.endswith(f"_{card}gb")
    memory = {"device_memory_gib": float(size), "free_memory_gib": float(size)}
    machine = make_machine(num_devices=1, **memory)
    return plan_step(request, machine=machine, ranks=Ranks(0, 1, 0, 1))


def test_there_is_a_recipe_for_each_task_of_each_family():
    assert [recipe.stem for recipe in RECIPES] == [
        *("dreambooth_flux_24gb", "dreambooth_sd3_24gb", "dreambooth_sdxl_16gb"),
        *("flux_80gb", "flux_lora_24gb", "sd3_lora_16gb", "sdxl_24gb", "sdxl_lora_16gb"),
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_keeps_all_that_it_asks_for_on_its_card(recipe):
    plan = plan_of(recipe)
    name = plan.config.run_name
    assert name == recipe.stem.replace("_", "-") and f"cards/{recipe.name}" in recipe.read_text()
    for setting in ("optimizer", "update_in_backward", "frozen_bits", "activation_checkpointing"):
        if plan.request.is_users(setting):
            asked = getattr(plan.request.config, setting)
            assert getattr(plan.config, setting) == asked, setting


# To replay the encoders for DreamBooth, or a LoRA on a large model, takes minutes.
QUICKEST = ("flux_80gb", "sd3_lora_16gb")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.slow if path.stem in QUICKEST else pytest.mark.full,
        )
        for path in RECIPES
    ],
)
def test_the_memory_that_a_recipe_tells_is_estimated_and_leaves_a_margin(recipe, monkeypatch):
    # Not the replay of a plain step, which tests have instead.
    monkeypatch.setattr(memory, "profile_step", replay.profile_step)
    told_gib, size_gib, _ = map(float, TOLD.search(recipe.read_text()).groups())
    need = find_need(plan_of(recipe))
    assert need.total_gib == pytest.approx(told_gib, abs=0.06)
    assert need.total_gib < MAX_MEMORY_FRACTION * size_gib
