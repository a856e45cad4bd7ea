"""Pictures are those of diffusers' own pipeline, whatever draws them and beside what."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from sdbench.base.conditions import Captions
from sdbench.base.shape import Shape
from sdbench.data.batches.tokenizer import CaptionTokenizers
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.drawing import DrawingSettings, draw, draw_samples, make_grid, make_sampler
from sdbench.models.family import DDPM, ZEROS_KEY
from sdbench.models.objective import Objective
from sdbench.models.samplers import SAMPLERS, check_sampler
from sdbench.plan.resolve import find_model
from sdbench.ranks.distributed import Ranks
from tests.forked import run_in_group
from tests.refusals import refused
from tests.train.smallest_model import write_model

TINY = resolve_architecture("tiny")
PORTRAIT, LANDSCAPE = Shape(64, 128), Shape(192, 64)
PROMPTS = ["a red circle", "", "a blue square on white"]
SETTINGS = DrawingSettings(shape=Shape.square(64), num_steps=4, batch_size=2)
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


@pytest.mark.slow
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
    expected = draw_by_diffusers(model, tokenize, sampler)
    assert np.array_equal(pixels(drawn), pixels(expected))
    assert pixels(drawn).shape == (3, 64, 64, 3)


def draw_by_diffusers(
    model: DiffusionModel, tokenize: CaptionTokenizers, sampler: str, **size: int
) -> list[Image.Image]:
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
    return pipeline(
        PROMPTS,
        generator=[torch.Generator().manual_seed(seed) for seed in (5, 6, 7)],
        num_inference_steps=4,
        guidance_scale=3.0,
        **size,
    ).images


@pytest.mark.parametrize("shape", [PORTRAIT, LANDSCAPE], ids=str)
def test_pictures_of_other_shapes_are_those_of_diffusers(model, tokenize, shape) -> None:
    settings = dataclasses.replace(SETTINGS, shape=shape, guidance_scale=3.0)
    drawn = draw(model, PROMPTS, [5, 6, 7], tokenize=tokenize, settings=settings)
    expected = draw_by_diffusers(model, tokenize, "ddim", **shape._asdict())
    assert np.array_equal(pixels(drawn), pixels(expected))
    assert {picture.size for picture in drawn} == {shape}


def test_each_prompt_has_the_shape_of_its_turn_and_its_own_seed(model, tokenize) -> None:
    shapes = (LANDSCAPE, PORTRAIT)
    options = {"tokenize": tokenize, "settings": SETTINGS}
    drawn = draw_samples(model, PROMPTS, seed=9, shapes=shapes, ranks=ALONE, **options)
    assert [picture.size for picture in drawn] == [LANDSCAPE, PORTRAIT, LANDSCAPE]
    for numbers, shape in (((0, 2), LANDSCAPE), ((1,), PORTRAIT)):
        options["settings"] = dataclasses.replace(SETTINGS, shape=shape)
        prompts, seeds = [PROMPTS[number] for number in numbers], [9 + one for one in numbers]
        expected = draw(model, prompts, seeds, **options)
        assert np.array_equal(pixels([drawn[number] for number in numbers]), pixels(expected))


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [(), (PORTRAIT, LANDSCAPE)], ids=["squares", "shapes"])
def test_two_ranks_draw_what_one_draws(model, tokenize, tmp_path, shapes) -> None:
    prompts = [*PROMPTS, "a green star", "a cat"]  # three batches for two ranks

    def samples(ranks: Ranks) -> np.ndarray:
        options = {"tokenize": tokenize, "settings": SETTINGS, "shapes": shapes, "ranks": ranks}
        drawn = draw_samples(model, prompts, seed=9, **options)
        return np.concatenate([np.ravel(picture) for picture in drawn])

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


def test_a_grid_has_room_for_pictures_of_several_shapes() -> None:
    pictures = [
        Image.new("RGB", size, colour)
        for size, colour in (((128, 64), "red"), ((48, 96), "green"), ((64, 64), "blue"))
    ]
    grid = make_grid(pictures, captions=["one", "two", "three"])
    assert grid.size == (4 + 2 * 132, 4 + 2 * (100 + 16))
    seen = np.asarray(grid).copy()
    for picture, (x, y) in zip(pictures, ((4, 4), (136, 4), (4, 120)), strict=True):
        width, height = picture.size
        assert (seen[y : y + height, x : x + width] == np.asarray(picture)).all()
        # Its caption is right below it, and all else is white.
        caption = seen[y + height : y + height + 16, x : x + 128]
        assert caption.min() < 64
        seen[y : y + height, x : x + width] = caption[:] = 255
    assert (seen == 255).all()


@pytest.mark.slow
@pytest.mark.parametrize("said", [True, False, None], ids=["zeros", "encoded", "not said"])
@torch.no_grad()
def test_an_empty_negative_prompt_of_sdxl_is_what_its_folder_asks_for(tmp_path, said) -> None:
    write_model(tmp_path / "model", name="tiny-sdxl")
    file = tmp_path / "model" / "model_index.json"
    index = json.loads(file.read_text())
    assert index[ZEROS_KEY] is False  # an export says what it was trained with
    index[ZEROS_KEY] = said
    file.write_text(json.dumps({name: value for name, value in index.items() if value is not None}))
    architecture = resolve_architecture(str(tmp_path / "model"))
    model = build_model(architecture, seed=3)
    settings = dataclasses.replace(SETTINGS, guidance_scale=5.0)
    tokenize = CaptionTokenizers.of(architecture)
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(tmp_path / "model")
    pictures = []
    for negative_prompt in (None, "", "a dog"):
        options = dataclasses.replace(settings, negative_prompt=negative_prompt)
        drawn = pixels(draw(model, PROMPTS, [5, 6, 7], tokenize=tokenize, settings=options))
        expected = pipeline(
            PROMPTS,
            negative_prompt=negative_prompt and [negative_prompt] * 3,
            generator=[torch.Generator().manual_seed(seed) for seed in (5, 6, 7)],
            num_inference_steps=4,
            guidance_scale=5.0,
            **SETTINGS.shape._asdict(),
        ).images
        assert np.abs(drawn - pixels(expected)).max() <= 1
        pictures.append(drawn)
    assert np.array_equal(pictures[0], pictures[1]) == (said is False)


def test_training_that_drops_captions_draws_with_the_encoded_empty_one(tmp_path) -> None:
    write_model(tmp_path / "model", name="tiny-sdxl")
    file = tmp_path / "model" / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {ZEROS_KEY: True}))
    config = {"model_name": str(tmp_path / "model"), "model_revision": None}
    config |= {"random_weights": False}
    for probability in (0.0, 0.1):
        settings = SimpleNamespace(**config, caption_drop_probability=probability)
        assert find_model(settings).zeroes_empty_prompt == (not probability)
