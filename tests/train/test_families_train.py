"""SDXL, SD3 and Flux.1 through train.py and all that is done with what it has trained."""

from __future__ import annotations

from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import generate
from sdbench.base.shape import Shape
from sdbench.cli import main as sdbench
from sdbench.data.batches.tokenizer import CaptionTokenizers
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import build_model
from sdbench.models.drawing import DrawingSettings, draw
from tests.data.datasets import write_folder
from tests.refusals import printed_refusal
from tests.train.written import exported, read_events, read_losses, trained

pytestmark = pytest.mark.slow

FAMILIES = ("sdxl", "sd3", "flux")
# T5 of a miniature reads so many bytes.
LENGTHS = {"sdxl": {}, "sd3": {"max_sequence_length": 32}, "flux": {"max_sequence_length": 32}}
# With sides that are multiples of 32 px for SDXL, and of 16 px for the others.
SHAPES = {"sdxl": Shape(64, 96), "sd3": Shape(80, 48), "flux": Shape(48, 80)}
SQUARE = Shape.square(64)
GUIDANCE = {"sdxl": "guidance_scale", "sd3": "guidance_scale", "flux": "true_cfg_scale"}
RECIPE = ("--use_synth_data", "--batch_size", "2", "--engine", "torch", "--precision", "fp32")
RECIPE += ("--lr", "0.01", "--log_every_batches", "1")
EMA = ("--use_ema", "--ema_half_life_batches", "2")
PROMPT, NEGATIVE, SEED = "a red circle", "blurred", 5


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


def argv_of(family: str) -> tuple[str, ...]:
    return ("--model_name", f"tiny-{family}", *RECIPE)


@pytest.fixture(scope="module")
def run(family, tmp_path_factory) -> Path:
    """Three steps with all that happens meanwhile, and the model of the last one."""
    place = tmp_path_factory.mktemp(family)
    write_folder(place / "held-out", num_samples=4)
    looks = ("--validate_every_batches", 3, "--validation_remote", place / "held-out")
    looks += ("--sample_every_batches", 3, "--sample_steps", 2, "--sample_prompts", PROMPT)
    folder = trained("whole", 3, *argv_of(family), *EMA, *looks, results=place)
    _add_contrast(exported(folder))
    return folder


def _add_contrast(model: Path) -> None:
    """Random weights make all pictures nearly grey."""
    (file,) = (model / "vae").glob("*.safetensors")
    weights = load_file(file)
    weights["decoder.conv_out.weight"] *= 20
    save_file(weights, file, metadata={"format": "pt"})


def test_it_is_validated_and_draws_samples(run):
    (validation,) = read_events(run, "validation")
    assert validation["num_samples"] == 4 and validation["loss"] > 0
    (picture,) = run.glob("samples/**/*.png")
    assert np.asarray(Image.open(picture)).std() > 1


def test_a_run_in_parts_has_the_losses_of_the_whole(family, run, tmp_path):
    for num_steps in (1, 3):
        parts = trained("parts", num_steps, *argv_of(family), *EMA, "--resume", "auto")
    assert read_losses(parts) == read_losses(run)
    assert len(set(read_losses(run))) == 3


def pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture, dtype=int)


def load_pipeline(family: str, folder: Path):
    kind = resolve_architecture(str(folder)).family.pipeline
    pipeline = getattr(diffusers, kind).from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_by_diffusers(family: str, pipeline, shape: Shape = SQUARE) -> np.ndarray:
    options = {**LENGTHS[family], GUIDANCE[family]: 3.0}
    if family == "flux":
        options["guidance_scale"] = 1.0
    (picture,) = pipeline(
        PROMPT,
        negative_prompt=NEGATIVE,
        generator=torch.Generator().manual_seed(SEED),
        **shape._asdict(),
        num_inference_steps=2,
        **options,
    ).images
    return pixels(picture)


def draw_by_generate(folder: Path, *argv: object) -> np.ndarray:
    drawn = ("--prompts", PROMPT, "--negative_prompt", NEGATIVE, "--guidance_scale", 3)
    drawn += ("--num_steps", 2, "--seed", SEED, "--folder", folder)
    assert generate.main([str(word) for word in (*drawn, *argv)]) == 0
    return pixels(Image.open(folder / "pictures" / "00000.png"))


def test_diffusers_and_generate_draw_the_same_with_the_export(family, run, tmp_path):
    folder = run / "model"
    own, other = resolve_architecture(f"tiny-{family}"), resolve_architecture(str(folder))
    ids, others = (CaptionTokenizers.of(one)([PROMPT, ""]) for one in (own, other))
    assert ids.keys() == others.keys()
    for name, numbers in ids.items():
        assert np.array_equal(numbers, others[name]), name
    pipeline = load_pipeline(family, folder)
    for shape in (SHAPES[family], SQUARE):
        expected = draw_by_diffusers(family, pipeline, shape)
        sides = ("--width", shape.width, "--height", shape.height)
        drawn = draw_by_generate(tmp_path / str(shape), "--model_name", folder, *sides)
        assert drawn.shape == (shape.height, shape.width, 3)
        assert np.abs(drawn - expected).max() <= 1
        assert expected.std() > 10
    model, tokenize = build_model(other, seed=1), CaptionTokenizers.of(other)
    for negative, is_same in ((NEGATIVE, True), ("", False)):
        settings = DrawingSettings(
            shape=SQUARE, num_steps=2, guidance_scale=3.0, negative_prompt=negative
        )
        (picture,) = draw(model, [PROMPT], [SEED], tokenize=tokenize, settings=settings)
        assert (np.abs(pixels(picture) - expected).max() <= 1) == is_same


def test_the_card_tells_tokens_and_flow(family, run):
    card = (run / "model" / "README.md").read_text()
    assert ("max_sequence_length=32" in card) == (family != "sdxl")
    assert ("## Rectified flow" in card) == (family != "sdxl")
    assert "| time_sampling | logit_normal |" in card or family != "sd3"


def test_the_export_trains_with_the_losses_of_the_model(family, run):
    begun = trained("begun", 1, *argv_of(family), "--init_from", run)
    exports = trained("export", 1, *argv_of(family), "--model_name", run / "model")
    assert read_losses(exports) == pytest.approx(read_losses(begun))


@pytest.mark.parametrize("family", ["flux"], indirect=True)
def test_a_model_of_fewer_blocks_does_not_begin_with_those_of_the_whole(run, capsys):
    fewer = ("--model_name", "tiny-flux-1+2-blocks", "--init_from", run)
    assert not trained("fewer", 1, *argv_of("flux"), *fewer, code=2).exists()
    refusal = printed_refusal(capsys.readouterr().err)
    assert refusal.flag == "--init_from" and "larger model" in refusal.what


def test_lora_of_an_export_draws_the_same_beside_and_in_its_weights(family, run, tmp_path):
    model = run / "model"
    lora = ("--model_name", model, "--lora_rank", 2, "--lora_alpha", 8, "--lr", "0.05")
    folder = trained("lora", 2, *argv_of(family), *lora)
    merged = exported(folder)
    place = tmp_path / "alone"
    exported_lora = ["export", str(folder), "--lora_format", "diffusers", "--folder", str(place)]
    assert sdbench(exported_lora) == 0
    file = place / "pytorch_lora_weights.safetensors"
    expected = draw_by_diffusers(family, load_pipeline(family, merged))
    pipeline = load_pipeline(family, model)
    plain = draw_by_diffusers(family, pipeline)
    pipeline.load_lora_weights(place, weight_name=file.name)
    assert np.abs(draw_by_diffusers(family, pipeline) - expected).max() <= 1
    drawn = draw_by_generate(tmp_path / "out", "--model_name", model, "--lora", file)
    assert np.abs(drawn - expected).max() <= 1
    assert np.abs(plain - expected).max() > 1


def test_latents_of_each_format_train_as_the_pictures_and_resume(family):
    write_folder(Path("data"), num_samples=6)
    argv = (*argv_of(family), "--no_use_synth_data", "--remote")
    # On a processor with bf16 the preset's encoders have it in the step.
    online = read_losses(trained("online", 3, *argv, "data", "--encoder_dtype", "fp32"))
    assert len(set(online)) == 3
    for out_format in ("mds", "parquet", "webdataset"):
        folder = Path(out_format)
        flags = ("--model_name", f"tiny-{family}", "--remote", "data", "--folder", folder)
        line = ["precompute", *map(str, flags), "--out_format", out_format]
        assert sdbench([*line, "--encoder_dtype", "fp32", "--seed", "17"]) == 0
        latents = (*argv, folder, "--latents", "precomputed")
        whole = read_losses(trained(f"{out_format}-whole", 3, *latents))
        # Moments and CLIP's states are stored in fp16.
        assert list(map(float, whole)) == pytest.approx(list(map(float, online)), rel=2e-4)
        for num_steps in (1, 3):
            parts = trained(f"{out_format}-parts", num_steps, *latents, "--resume", "auto")
        assert read_losses(parts) == whole
