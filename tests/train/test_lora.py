"""train.py with --lora_rank, its exports, and generate.py with --lora."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import generate
from sdbench.cli import main as sdbench
from sdbench.models.lora import is_lora
from sdbench.state.checkpoint_files import Checkpoint
from sdbench.training.checkpoint_weights import read_weights
from tests.refusals import printed_refusal, refusal_of
from tests.train.smallest_model import build_smallest
from tests.train.written import exported, has_same, trained, weights_of

RECIPE = ("--model_name", "nano", "--use_synth_data", "--batch_size", "4")
RECIPE += ("--engine", "torch", "--precision", "fp32", "--lr", "0.01")
LORA = ("--lora_rank", "4", "--lora_alpha", "6", "--train_text_encoder")
# Of train.py, and so of the random weights; generate.py draws the same ones by it.
SEED = 17


def picture(folder: Path, *argv: object, code: int = 0) -> bytes:
    """What generate.py draws or, where it refuses to, has drawn before."""
    options = ("--prompts", "a cat", "--num_steps", 2, "--seed", SEED, "--folder", folder)
    assert generate.main([*map(str, (*options, *argv))]) == code
    return (folder / "pictures" / "00000.png").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run of LoRA, exported."""
    folder = trained("dog", 3, *RECIPE, *LORA, results=tmp_path_factory.mktemp("lora"))
    exported(folder)
    return folder


@pytest.mark.slow
def test_lora_alone_is_trained_and_saved_and_the_export_has_it_in_its_weights(folder):
    drawn = dict(build_smallest(SEED).named_parameters())
    merged = {
        f"{part}.{name}": weight
        for part in ("unet", "vae", "text_encoder")
        for name, weight in weights_of(folder / "model", part).items()
    }
    checkpoint = Checkpoint.open(folder / "checkpoints" / "step_00000003")
    names = [name for name in checkpoint.tensors() if not name.startswith("random.")]
    assert names and all(map(is_lora, names))
    lora = read_weights(checkpoint, use_ema=False)
    for name, weight in sorted(merged.items()):
        layer, expected = name.removesuffix(".weight"), drawn[name]
        if (down := lora.get(f"{layer}.lora_A.default.weight")) is None:
            assert torch.equal(weight, expected), name
            continue
        change = 6 / 4 * lora[f"{layer}.lora_B.default.weight"] @ down
        torch.testing.assert_close(weight, expected + change, msg=name)
        assert change.abs().max() > 1e-3, name
    assert len(lora) / 2 == 32 + 8


@pytest.mark.slow
def test_lora_that_was_trained_beside_few_bits_is_added_to_whole_weights():
    model = ("--model_name", "tiny-flux", "--frozen_bits", "nf4")
    folder = trained("few", 2, *RECIPE, *model, "--lora_rank", 2)
    merged = weights_of(exported(folder), "transformer")
    plain = trained("plain", 1, *RECIPE, *model[:2], "--lora_rank", 2, "--lr", "1e-30")
    drawn = weights_of(exported(plain), "transformer")
    saved = Checkpoint.open(folder / "checkpoints" / "step_00000002")
    lora = read_weights(saved, use_ema=False)
    assert all(map(is_lora, lora))
    for name, weight in merged.items():
        layer = f"transformer.{name.removesuffix('.weight')}"
        change = torch.zeros_like(weight)
        if (down := lora.get(f"{layer}.lora_A.default.weight")) is not None:
            change = lora[f"{layer}.lora_B.default.weight"] @ down
        torch.testing.assert_close(weight, drawn[name] + change, msg=name)


@pytest.mark.slow
def test_pictures_with_its_file_are_those_of_the_export(folder, tmp_path, capsys):
    expected = picture(tmp_path / "merged", "--model_name", folder / "model")
    plain = picture(tmp_path / "plain", "--model_name", "nano")
    assert plain != expected
    place, out = tmp_path / "lora", tmp_path / "out"
    line = ["export", str(folder), "--lora_format", "diffusers", "--folder", str(place)]
    assert sdbench(line) == 0
    file = place / "pytorch_lora_weights.safetensors"
    with_file = ("--model_name", "nano", "--lora", file)
    with_adapters = picture(out, *with_file)
    # W x + B A x is rounded otherwise than (W + B A) x: a step of 255 between two of them.
    one, other = (
        np.asarray(Image.open(io.BytesIO(png)), dtype=int) for png in (with_adapters, expected)
    )
    difference = np.abs(one - other)
    assert difference.max() <= 1 and (difference > 0).mean() < 0.001
    assert picture(tmp_path / "none", *with_file[:-1], f"{file}:0") == plain
    assert f'weight_name="{file.name}"' in (place / "README.md").read_text()
    # The same file again is the same job, another share of it is not.
    assert picture(out, *with_file) == with_adapters
    capsys.readouterr()
    assert picture(out, *with_file[:-1], f"{file}:0.5", code=2) == with_adapters
    refusal = printed_refusal(capsys.readouterr().err)
    assert refusal.flag == "--folder" and "lora" in refusal.what


@pytest.mark.slow
def test_it_goes_beside_the_weights_of_another_run_which_it_keeps():
    first = trained("first", 2, *RECIPE)
    refusal = refusal_of("export", first, "--lora_format", "diffusers")
    assert (refusal.flag, refusal.value) == ("--lora_format", "diffusers")
    model = exported(first)
    # B stays 0 but for 1e-30, which no weight feels.
    argv = (*RECIPE, "--lora_rank", 2, "--init_from", first, "--lr", "1e-30", "--resume", "auto")
    trained("second", 1, *argv)
    second = exported(trained("second", 2, *argv))
    assert all(has_same(part, second, model) for part in ("unet", "vae", "text_encoder"))


@pytest.mark.parametrize(
    ("flag", "argv"),
    [
        ("--lora_layers", ("--lora_rank", "4", "--lora_layers", "to_q,nope")),
        ("--lora_text_encoder_layers", (*LORA, "--lora_text_encoder_layers", "self_attn")),
        (
            "--lora_text_encoder_layers or --train_text_encoder",
            ("--lora_rank", "4", "--lora_text_encoder_layers", "fc1"),
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_there_is_a_folder(flag, argv, capsys):
    assert not trained("one", 1, *RECIPE, *argv, code=2).exists()
    assert printed_refusal(capsys.readouterr().err).flag == flag


@pytest.mark.slow
def test_lora_without_its_weights_begins_no_other_run(folder, capsys):
    trained("one", 1, *RECIPE, "--init_from", folder, code=2)
    assert printed_refusal(capsys.readouterr().err).flag == "--init_from"
