"""What families say of models: captions, conditions, sizes, and folders that are none of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sdbench.base.conditions import Captions, Condition
from sdbench.base.shape import Shape
from sdbench.models.architecture import Architecture, resolve_architecture
from sdbench.models.diffusion import build_model
from tests.refusals import refused

FLAG = "--model_name"
MINIATURES = {"sdxl": "tiny-sdxl", "sd3": "tiny-sd3", "flux": "tiny-flux"}
PAD_TOKENS = {("clip", 0): "!", ("clip", 49407): "<|endoftext|>", ("t5", 0): "<pad>"}


def write_folder(folder: Path, name: str, changes: dict[str, dict[str, Any]]) -> str:
    """A folder of diffusers without weights; `changes` of configurations, None: no such part."""
    model = resolve_architecture(name)
    for part, file in model.family.config_files.items():
        content = dict(model.parts[part])
        class_name = model.family.parts.get(part)
        if part in model.family.tokenizers:
            kind, pad_token_id = model.family.tokenizers[part], content["pad_token_id"]
            content = {"pad_token": PAD_TOKENS[kind, pad_token_id]}
        elif part == "scheduler":
            content["_class_name"] = model.family.scheduler
        elif part in model.text_encoders:
            content["model_type"] = "t5" if "T5" in class_name else "clip_text_model"
        else:
            content["_class_name"] = class_name
        if part in changes and changes[part] is None:
            continue
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(json.dumps(content | changes.get(part, {})))
    return str(folder)


@pytest.mark.parametrize("family", MINIATURES)
def test_a_folder_is_of_its_family(family, tmp_path) -> None:
    folder = write_folder(tmp_path / "model", MINIATURES[family], {})
    found = resolve_architecture(folder, random_weights=True)
    built_in = resolve_architecture(MINIATURES[family])
    assert found.family.name == family
    for part in built_in.modules:
        assert built_in.parts[part].items() <= found.parts[part].items()


@pytest.mark.parametrize(
    ("family", "part", "key", "value", "allowed"),
    [
        ("sdxl", "unet", "cross_attention_dim", 32, "64"),
        ("sdxl", "unet", "in_channels", 9, "4"),
        ("sdxl", "unet", "projection_class_embeddings_input_dim", 72, "80"),
        ("sdxl", "unet", "time_cond_proj_dim", 256, "none"),
        ("sdxl", "unet", "addition_embed_type", "text", "text_time"),
        ("sd3", "transformer", "joint_attention_dim", 64, "96"),
        ("sd3", "transformer", "pooled_projection_dim", 32, "64"),
        ("sd3", "transformer", "in_channels", 33, "16"),
        ("sd3", "vae", "_class_name", "AutoencoderTiny", "AutoencoderKL"),
        ("flux", "transformer", "in_channels", 384, "64"),
        ("flux", "transformer", "joint_attention_dim", 96, "32"),
        ("flux", "transformer", "pooled_projection_dim", 48, "32"),
        ("flux", "text_encoder_2", "model_type", "umt5", "t5"),
        ("flux", "scheduler", "_class_name", "DDIM", "FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_another_kind_of_model_is_refused(family, part, key, value, allowed, tmp_path) -> None:
    folder = write_folder(tmp_path / "model", MINIATURES[family], {part: {key: value}})
    with refused(FLAG, value=value, allowed=allowed):
        resolve_architecture(folder, random_weights=True)


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("sdxl", "text_encoder_2"),
        ("sdxl", "tokenizer_2"),
        ("sd3", "text_encoder_2"),
        ("sd3", "tokenizer_3"),
        ("flux", "text_encoder_2"),
        ("flux", "vae"),
        ("flux", "transformer"),
    ],
)
def test_a_part_that_is_missing_is_named(family, part, tmp_path) -> None:
    folder = write_folder(tmp_path / "model", MINIATURES[family], {part: None})
    described = resolve_architecture(MINIATURES[family]).family
    index = json.dumps({"_class_name": described.pipeline})
    Path(folder, "model_index.json").write_text(index)
    with refused(FLAG, value=folder) as caught:
        resolve_architecture(folder, random_weights=True)
    assert f"has no {described.config_files[part]} that can be read" in caught.value.what


def test_a_folder_with_a_single_file_is_no_model(tmp_path) -> None:
    (tmp_path / "model.safetensors").touch()
    with refused(FLAG, value=str(tmp_path / "model.safetensors")) as caught:
        resolve_architecture(str(tmp_path))
    assert "`from_single_file`" in caught.value.allowed


@pytest.mark.parametrize("family", MINIATURES)
def test_a_folder_that_is_named_as_another_family_is_refused(family, tmp_path) -> None:
    folder = write_folder(tmp_path / "model", MINIATURES[family], {})
    for other in {"StableDiffusionPipeline", "FluxPipeline"} - {
        resolve_architecture(MINIATURES[family]).family.pipeline
    }:
        index = json.dumps({"_class_name": other})
        Path(folder, "model_index.json").write_text(index)
        with refused(FLAG, value=other):
            resolve_architecture(folder, random_weights=True)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("flux-dev-20+1-blocks", "flux-dev-N-blocks with 1 to 19 + 1 to 38 for N"),
        ("flux-dev-0+1-blocks", "flux-dev-N-blocks with 1 to 19 + 1 to 38 for N"),
        ("flux-dev-4-blocks", "flux-dev-N-blocks with 1 to 19 + 1 to 38 for N"),
        ("sd3-medium-3+4-blocks", "sd3-medium-N-blocks with 1 to 24 for N"),
        ("sdxl-2-blocks", "sdxl as a whole"),
    ],
)
def test_parts_of_the_blocks_that_no_model_has_are_refused(name, allowed) -> None:
    with refused(FLAG, value=name, allowed=allowed):
        resolve_architecture(name)


def test_a_vae_that_says_no_scale_has_that_of_diffusers(tmp_path) -> None:
    folder = write_folder(tmp_path / "model", "tiny-sdxl", {})
    file = Path(folder, "vae", "config.json")
    config = json.loads(file.read_text())
    del config["scaling_factor"]
    file.write_text(json.dumps(config))
    model = build_model(resolve_architecture(folder, random_weights=True), seed=1)
    assert model.latents.scale == model.vae.config.scaling_factor == 0.18215


def test_t5_reads_as_many_tokens_as_its_folder_says(tmp_path) -> None:
    changes = {"tokenizer_2": {"model_max_length": 40}}
    folder = write_folder(tmp_path / "model", "tiny-flux", changes)
    assert resolve_architecture(folder, random_weights=True).captions[1].num_tokens == 40
    changes = {"tokenizer_2": {"model_max_length": 512}}
    other = write_folder(tmp_path / "other", "tiny-flux", changes)
    assert resolve_architecture(other, random_weights=True).captions[1].num_tokens == 256


def captions_of(name: str) -> list[tuple[str, str, int, int]]:
    captions: tuple[Captions, ...] = resolve_architecture(name).captions
    return [(one.name, one.kind, one.num_tokens, one.pad_token_id) for one in captions]


def test_captions_become_tokens_for_each_encoder() -> None:
    clip = ("input_ids", "clip", 77, 49407)
    second_clip = ("input_ids_2", "clip", 77, 0)
    assert captions_of("sdxl") == [clip, second_clip]
    assert captions_of("sd3-medium") == [clip, second_clip, ("input_ids_3", "t5", 77, 0)]
    assert captions_of("flux-schnell") == [clip, ("input_ids_2", "t5", 256, 0)]
    assert captions_of("flux-dev") == [clip, ("input_ids_2", "t5", 512, 0)]
    assert captions_of("tiny-flux") == [clip, ("input_ids_2", "t5", 32, 0)]


def states(*shape: int, dtype: str) -> Condition:
    return Condition(name="text_embedding", shape=shape, dtype=dtype)


def pooled(width: int) -> Condition:
    return Condition(name="pooled_embedding", shape=(width,), dtype="float16")


def test_conditions_of_t5_are_not_in_fp16() -> None:
    expected = {
        "sdxl": (states(77, 2048, dtype="float16"), pooled(1280)),
        "sd3-medium": (states(154, 4096, dtype="float32"), pooled(2048)),
        "flux-schnell": (states(256, 4096, dtype="float32"), pooled(768)),
        "flux-dev": (states(512, 4096, dtype="float32"), pooled(768)),
    }
    for name, conditions in expected.items():
        assert resolve_architecture(name).conditions == conditions


def test_sd3_may_lack_t5(tmp_path) -> None:
    absent = {"text_encoder_3": None, "tokenizer_3": None}
    changes = {**absent, "transformer": {"joint_attention_dim": 4096}}
    folder = write_folder(tmp_path / "model", "tiny-sd3", changes)
    found = resolve_architecture(folder, random_weights=True)
    assert [one.name for one in found.captions] == ["input_ids", "input_ids_2"]
    assert found.conditions == (states(154, 4096, dtype="float16"), pooled(64))
    other = write_folder(tmp_path / "other", "tiny-sd3", absent)
    with refused(FLAG, value=96, allowed="4096"):
        resolve_architecture(other, random_weights=True)


@pytest.mark.parametrize(
    ("name", "default", "multiple", "largest"),
    [
        ("sdxl", 1024, 32, None),
        ("sd3-medium", 1024, 16, 3072),
        ("flux-dev", 1024, 16, None),
        ("tiny-sdxl", 64, 32, None),
        ("tiny-sd3", 64, 16, 192),
        ("tiny-flux", 64, 16, None),
        ("mini-flux", 64, 16, None),
    ],
)
def test_sizes_of_pictures(name, default, multiple, largest) -> None:
    model: Architecture = resolve_architecture(name)
    assert model.default_image_size == default
    model.check_image_size(default)
    allowed = f"multiples of {multiple}, nearest {default} or {default + multiple}"
    with refused("--image_size", value=default + 1, allowed=allowed):
        model.check_image_size(default + 1)
    if largest is not None:
        model.check_image_size(largest)
        allowed = f"multiples of {multiple}, nearest {largest}, the largest"
        with refused("--image_size", value=largest + multiple, allowed=allowed):
            model.check_image_size(largest + multiple)
    model.check_shape(Shape(multiple, largest or 2 * default), flag="--height")
    allowed = f"multiples of {multiple}, nearest {multiple}"
    for shape, side in ((Shape(default, 1), "height"), (Shape(1, default), "width")):
        with refused("--height", value=1, allowed=allowed) as caught:
            model.check_shape(shape, flag="--height")
        assert caught.value.what == f"the {side} of {shape} does not fit {name}"
    assert model.family.tells_sizes == (model.family.name == "sdxl")


@pytest.mark.parametrize("name", MINIATURES.values())
def test_text_encoders_stay_frozen(name) -> None:
    family = resolve_architecture(name).family
    unsuitable = family.unsuitable
    assert unsuitable["train_text_encoder"][0] == (False,)
    assert unsuitable["learned_token"][0] == (None,)
    has_unet = name == "tiny-sdxl"
    assert ("keep_layout" in unsuitable) == ("convolution" in unsuitable) == (not has_unet)


@pytest.mark.parametrize("name", MINIATURES.values())
def test_encoders_that_overflow_in_fp16_never_compute_in_it(name) -> None:
    family = resolve_architecture(name).family
    with refused("--encoder_dtype", value="fp16"):
        family.check_encoder_dtype("fp16")
    assert family.encoder_dtype("fp16", has_bf16=True) == "bf16"
    assert family.encoder_dtype("fp16", has_bf16=False) == "fp32"
    # amp_fp16, the default on a GPU, casts the denoiser's products alone.
    model = build_model(resolve_architecture(name), seed=1, precision="amp_fp16")
    with model._encoder_autocast(model.vae):
        assert not torch.is_autocast_enabled("cpu")
    plain = build_model(resolve_architecture("tiny"), seed=1, precision="amp_fp16")
    with plain._encoder_autocast(plain.vae):
        assert torch.is_autocast_enabled("cpu")
