"""Pictures are those of diffusers' own pipeline, whatever draws them and beside what."""

from __future__ import annotations

import dataclasses

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from sdbench.base.conditions import Captions
from sdbench.data.pipeline.tokenizer import CaptionTokenizers
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.drawing import DrawingSettings, draw, draw_samples, make_grid, make_sampler
from sdbench.models.family import DDPM
from sdbench.models.objective import SAMPLERS, Objective, check_sampler
from sdbench.ranks.distributed import Ranks
from tests.forked import run_in_group
from tests.refusals import refused

TINY = resolve_architecture("tiny")
PROMPTS = ["a red circle", "", "a blue square on white"]
SETTINGS = DrawingSettings(image_size=64, num_steps=4, batch_size=2)
ALONE = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
ZERO_TERMINAL_SNR = {"prediction_type": "v_prediction", "zero_terminal_snr": True}


def build(**objective) -> DiffusionModel:
    trained = ("unet", "text_encoder")
    model = build_model(TINY, seed=3, objective=Objective(**objective), trained=trained)
    with torch.no_grad():
        # Random weights make all pictures nearly grey.
        model.unet.conv_out.weight.mul_(8)
        model.vae.decoder.conv_out.weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return build()


@pytest.fixture(scope="module")
def tokenize() -> CaptionTokenizers:
    return CaptionTokenizers((Captions(),))


def pixels(pictures: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(picture) for picture in pictures]).astype(int)


@pytest.mark.parametrize(
    ("sampler", "objective"),
    [
        *((sampler, {}) for sampler in SAMPLERS[DDPM]),
        *((sampler, {"prediction_type": "v_prediction"}) for sampler in ("pndm", "dpm")),
        *((sampler, {"prediction_type": "sample"}) for sampler in ("ddim", "euler", "dpm")),
        *((sampler, ZERO_TERMINAL_SNR) for sampler in ("ddim", "euler", "dpm")),
    ],
    ids=str,
)
def test_pictures_are_those_of_diffusers(tokenize, sampler, objective) -> None:
    model = build(**objective)
    settings = dataclasses.replace(SETTINGS, sampler=sampler, guidance_scale=3.0)
    if objective == ZERO_TERMINAL_SNR:
        scheduler = make_sampler(sampler, model.objective.config)
        scheduler.set_timesteps(25)
        assert scheduler.timesteps[0] == 999  # noise alone
    drawn = draw(model, PROMPTS, [5, 6, 7], tokenize=tokenize, settings=settings)
    kind = getattr(diffusers, SAMPLERS[DDPM][sampler])
    pipeline = diffusers.StableDiffusionPipeline(
        unet=model.unet,
        vae=model.vae,
        text_encoder=model.text_encoder,
        tokenizer=tokenize.tokenizers[0].for_diffusers(),
        scheduler=kind.from_config(
            model.objective.config, steps_offset=1, set_alpha_to_one=False, skip_prk_steps=True
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    expected = pipeline(
        PROMPTS,
        generator=[torch.Generator().manual_seed(seed) for seed in (5, 6, 7)],
        num_inference_steps=4,
        guidance_scale=3.0,
    ).images
    assert np.array_equal(pixels(drawn), pixels(expected))
    assert pixels(drawn).shape == (3, 64, 64, 3)


def test_two_ranks_draw_what_one_draws(model, tokenize, tmp_path) -> None:
    prompts = [*PROMPTS, "a green star", "a cat"]  # three batches for two ranks

    def samples(ranks: Ranks) -> np.ndarray:
        options = {"tokenize": tokenize, "settings": SETTINGS, "ranks": ranks}
        return pixels(draw_samples(model, prompts, seed=9, **options))

    def run(rank: int) -> None:
        np.save(tmp_path / f"{rank}.npy", samples(Ranks.from_environment()))

    alone = samples(ALONE)
    run_in_group(run, tmp_path)
    assert np.array_equal(alone, np.load(tmp_path / "0.npy"))
    assert np.array_equal(alone, np.load(tmp_path / "1.npy"))


@pytest.mark.parametrize("objective", [{"prediction_type": "sample"}, ZERO_TERMINAL_SNR])
def test_pndm_refuses_what_it_does_not_know(objective) -> None:
    schedule = Objective(**objective).schedule(TINY.parts["scheduler"])
    with refused("--scheduler", value="pndm", allowed="ddim | euler | dpm"):
        check_sampler("pndm", schedule)


def test_a_grid_has_its_pictures_in_rows_with_their_captions() -> None:
    colours = ["red", "green", "blue", "black", "white"]
    pictures = [Image.new("RGB", (64, 48), colour) for colour in colours]
    plain = make_grid(pictures)
    assert plain.size == (4 + 3 * 68, 4 + 2 * 52)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, 3)
        x, y = 4 + 68 * column, 4 + 52 * row
        assert plain.crop((x, y, x + 64, y + 48)).tobytes() == picture.tobytes()
    captioned = make_grid(pictures, num_columns=2, captions=["a caption that is much too long"] * 5)
    assert captioned.size == (4 + 2 * 116, 4 + 3 * (52 + 16))
    below = np.asarray(captioned)[52:68, 4:116]
    assert below.min() < 64 and below.max() == 255
    # No caption runs into what lies beside it.
    assert (np.asarray(captioned)[:, 116:120] == 255).all()
