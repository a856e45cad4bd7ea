"""An exported folder is loaded by diffusers, and by this suite, and draws the run's pictures."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline
from safetensors.torch import load_file

from sdbench.base.conditions import Captions
from sdbench.base.errors import RunError
from sdbench.base.shape import Shape
from sdbench.data.batches.tokenizer import CaptionTokenizer, CaptionTokenizers
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.discover import families
from sdbench.models.drawing import DrawingSettings, draw
from sdbench.models.export import export, make_card
from sdbench.models.objective import Objective
from sdbench.state.checkpoint_files import weights_of
from tests.refusals import refused

TINY = resolve_architecture("tiny")
UNET_FILE = "unet/diffusion_pytorch_model.safetensors"
CONV_IN = "unet.conv_in.weight"
SD2 = families()["sd"]
PROMPT = "a red circle"


def build(**objective) -> DiffusionModel:
    options = {"memory_format": "channels_last", "objective": Objective(**objective)}
    model = build_model(TINY, seed=3, **options)
    with torch.no_grad():
        model.vae.decoder.conv_out.weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> CaptionTokenizers:
    return CaptionTokenizers((Captions(),))


@pytest.fixture
def write(tokenizer, tmp_path):

    def write(model: DiffusionModel, **changes) -> Path:
        tokenizers = {"tokenizer": tokenizer.tokenizers[0].for_diffusers()}
        options = {"trained": {}, "tokenizers": tokenizers, "card": "# a card\n"}
        export(model, tmp_path / "model", **(options | changes))
        return tmp_path / "model"

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [{}, {"prediction_type": "v_prediction", "zero_terminal_snr": True}],
    ids=["plain", "zero_terminal_snr"],
)
def test_diffusers_loads_the_folder_and_draws_what_the_run_drew(
    write, tokenizer, objective
) -> None:
    model = build(**objective)
    folder = write(model)
    settings = DrawingSettings(shape=Shape.square(64), num_steps=4)
    (drawn,) = draw(model, [PROMPT], [5], tokenize=tokenizer, settings=settings)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    (loaded,) = pipeline(
        [PROMPT], generator=[torch.Generator().manual_seed(5)], num_inference_steps=4
    ).images
    difference = np.asarray(drawn).astype(int) - np.asarray(loaded).astype(int)
    assert abs(difference).max() <= 1  # one of them is in another memory layout
    assert np.asarray(drawn).std() > 10


@pytest.mark.slow
def test_sd3_without_t5_is_loaded_by_diffusers_and_by_this_suite(tmp_path) -> None:
    whole, absent = resolve_architecture("tiny-sd3"), ("text_encoder_3", "tokenizer_3")
    parts = {name: part for name, part in whole.parts.items() if name not in absent}
    parts["transformer"] = {**parts["transformer"], "joint_attention_dim": 4096}
    architecture = dataclasses.replace(whole, parts=parts)
    model, tokenize = build_model(architecture, seed=3), CaptionTokenizers.of(architecture)
    with torch.no_grad():
        model.vae.decoder.conv_out.weight.mul_(20)
    tokenizers = (tokenizer.for_diffusers() for tokenizer in tokenize.tokenizers)
    folder = tmp_path / "model"
    export(
        model,
        folder,
        trained={},
        tokenizers=dict(zip(architecture.tokenizers, tokenizers, strict=True)),
        sampler="flow_euler",
        card="",
    )
    settings = DrawingSettings(shape=Shape.square(64), num_steps=2, guidance_scale=3.0)
    loaded = resolve_architecture(str(folder))
    assert loaded.captions == tuple(
        dataclasses.replace(one, folder=folder / name)
        for one, name in zip(architecture.captions, architecture.tokenizers, strict=True)
    )
    (drawn,), (again,) = (
        draw(one, [PROMPT], [5], tokenize=tokenize, settings=settings)
        for one in (model, build_model(loaded, seed=1))
    )
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        folder, local_files_only=True, **dict.fromkeys(absent)
    )
    (expected,) = pipeline(
        [PROMPT],
        generator=[torch.Generator().manual_seed(5)],
        num_inference_steps=2,
        guidance_scale=3.0,
        max_sequence_length=77,
    ).images
    assert np.array_equal(np.asarray(drawn), np.asarray(expected))
    assert np.array_equal(np.asarray(again), np.asarray(expected))
    assert np.asarray(drawn).std() > 10


def test_a_disk_without_space_is_a_refusal_and_nothing_is_left(write, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with refused("--folder", value=str(tmp_path / "model")):
            write(build())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_folder_has_no_pickle_and_every_part_and_this_suite_loads_it(
    write, tokenizer, tmp_path
) -> None:
    model = build(prediction_type="v_prediction", zero_terminal_snr=True)
    (tmp_path / "model").mkdir()  # an empty one is taken
    folder = write(model, sampler="dpm")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    # Some releases of transformers keep the tokenizer in text files, others in one of JSON.
    suffixes = {Path(name).suffix for name in names}
    assert suffixes - {".txt"} == {".json", ".safetensors", ".md"}
    assert {"model_index.json", UNET_FILE, "tokenizer/tokenizer_config.json"} <= names
    assert (folder / "README.md").read_text() == "# a card\n"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["_class_name"] == "DPMSolverMultistepScheduler"
    assert (scheduler["timestep_spacing"], scheduler["steps_offset"]) == ("trailing", 1)
    architecture = resolve_architecture(str(folder))
    loaded = build_model(architecture, seed=1)
    assert torch.equal(loaded.objective.signal_scale, model.objective.signal_scale)
    assert (loaded.objective.prediction_type, loaded.latents.scale) == ("v_prediction", 0.18215)
    again = CaptionTokenizer(folder=architecture.tokenizer_folders["tokenizer"], pad_token_id=0)
    captions = ["A red circle", "", "50% off... (really?)", "word " * 100]
    assert again(captions).tolist() == tokenizer(captions)["input_ids"].tolist()


@pytest.mark.slow
def test_weights_of_a_checkpoint_take_the_place_of_the_models(write) -> None:
    model = build()
    weight = model.state_dict()[CONV_IN]
    tensors = {
        f"model.{CONV_IN}": weight + 1,
        f"ema.{CONV_IN}": weight + 2,
        "optimizer.exp_avg": weight,
    }
    assert weights_of(tensors, use_ema=False)[CONV_IN] is tensors[f"model.{CONV_IN}"]
    folder = write(model, trained=weights_of(tensors, use_ema=True), dtype="fp16")
    stored = load_file(folder / UNET_FILE)
    assert {value.dtype for value in stored.values()} == {torch.float16}
    assert torch.equal(stored["conv_in.weight"], (weight + 2).half())
    assert torch.equal(stored["conv_out.weight"], model.state_dict()["unet.conv_out.weight"].half())
    assert torch.equal(model.state_dict()[CONV_IN], weight)
    text = load_file(folder / "text_encoder" / "model.safetensors")
    assert {value.dtype for value in text.values()} == {torch.float16}


def test_a_weight_that_fp16_cannot_hold_is_an_error(write, tmp_path) -> None:
    model = build()
    trained = {CONV_IN: torch.full_like(model.state_dict()[CONV_IN], 1e6)}
    with pytest.raises(RunError, match=CONV_IN):
        write(model, trained=trained, dtype="fp16")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(write, tmp_path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")
    with refused("--folder", value=str(tmp_path / "model")):
        write(build())
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "thesis.txt"]


def test_the_card_tells_data_settings_figures_and_commit() -> None:
    sections = {
        "Data": {"remote": "https://me:password@host/tars?key=1"},
        "Figures": {"validation_loss": 0.03, "odd": "a | b\nc"},
    }
    card = make_card("shapes", sections=sections, commit="0" * 40, sampler="ddim", family=SD2)
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert "| validation_loss | 0.03 |" in rows and "| odd | a \\| b c |" in rows
    assert '("a prompt").images' in card and "=None" not in card
    assert "0" * 40 in card and "password" not in card and "key=1" not in card


def test_the_card_of_a_model_with_t5_or_without_an_optional_part_tells_how_to_load_it() -> None:
    sd3 = families()["sd3"]
    options = {"sections": {}, "commit": None, "sampler": "flow_euler", "family": sd3}
    card = make_card("shapes", **options, absent=["text_encoder_3"], num_t5_tokens=77)
    assert '("THIS_FOLDER", local_files_only=True, text_encoder_3=None)' in card
    assert 'pipeline("a prompt", max_sequence_length=77)' in card
