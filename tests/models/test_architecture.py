"""Does a model name lead to the right model, or to a helpful refusal?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from diffusers import DDPMScheduler
from huggingface_hub.errors import OfflineModeIsEnabled

from sdbench.base.errors import ConfigError
from sdbench.models.architecture import built_in_names, resolve_architecture
from sdbench.models.stable_diffusion import build_stable_diffusion

OPTIONS = dict(precision="fp32", encoder_dtype="fp32", memory_format="contiguous", attention="sdpa")


@pytest.fixture(autouse=True)
def hub_out_of_reach(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path) -> Path:
    """The tiny model as diffusers saves it."""
    architecture, _ = resolve_architecture("tiny")
    model = build_stable_diffusion(architecture, seed=9, **OPTIONS)
    folder = tmp_path / "mine"
    for part in ("unet", "vae", "text_encoder"):
        getattr(model, part).save_pretrained(folder / part)
    DDPMScheduler.from_config(architecture.scheduler).save_pretrained(folder / "scheduler")
    (folder / "tokenizer").mkdir()
    tokenizer = {"pad_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_built_ins() -> None:
    assert built_in_names() == ["sd1-base", "sd2-768-v", "sd2-base", "small", "tiny"]
    facts = {}
    for name in built_in_names():
        architecture, note = resolve_architecture(name)
        assert note is None
        assert architecture.weights_folder is None
        facts[name] = (
            architecture.default_image_size,
            architecture.image_size_multiple,
            architecture.tokenizer["pad_token_id"],
            architecture.scheduler["prediction_type"],
        )
    assert facts == {
        "sd1-base": (512, 64, 49407, "epsilon"),
        "sd2-768-v": (768, 64, 0, "v_prediction"),
        "sd2-base": (512, 64, 0, "epsilon"),
        "small": (128, 64, 0, "epsilon"),
        "tiny": (64, 64, 0, "epsilon"),
    }


def test_resolving_a_built_in_imports_no_torch() -> None:
    code = (
        "import sys; from sdbench.models.architecture import resolve_architecture; "
        "resolve_architecture('sd2-base'); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize(
    ("size", "nearest"), [(0, "64"), (32, "64"), (100, "64 or 128"), (500, "448 or 512")]
)
def test_image_size_that_cannot_be_halved_is_refused(size, nearest) -> None:
    architecture, _ = resolve_architecture("sd2-base")
    with pytest.raises(
        ConfigError, match=rf"got {size}; .*of 64, nearest {nearest}; .*--image_size"
    ):
        architecture.check_image_size(size)


def test_image_size_that_fits_is_accepted() -> None:
    architecture, _ = resolve_architecture("sd2-base")
    for size in (64, 256, 512, 768):
        architecture.check_image_size(size)


def test_unknown_name_is_refused_with_the_nearest() -> None:
    match = r"got 'sd2-bas'; allowed: sd1-base, .*did you mean sd2-base\?; .*--model_name"
    with pytest.raises(ConfigError, match=match):
        resolve_architecture("sd2-bas")


def test_built_in_has_no_revision() -> None:
    with pytest.raises(ConfigError, match="only a model from the hub has revisions"):
        resolve_architecture("tiny", revision="main")


@pytest.mark.parametrize(
    ("hub_id", "built_in"),
    [
        ("stabilityai/stable-diffusion-2-base", "sd2-base"),
        ("stabilityai/stable-diffusion-2", "sd2-768-v"),
    ],
)
def test_built_in_stands_in_for_a_hub_model_out_of_reach(hub_id, built_in) -> None:
    architecture, note = resolve_architecture(hub_id)
    assert architecture.name == built_in
    assert architecture.weights_folder is None
    assert f"built-in {built_in} stands in" in note
    assert "cannot be reached (OfflineModeIsEnabled)" in note
    assert "random weights" in note


def test_built_in_stands_in_for_a_hub_model_that_is_gone(monkeypatch) -> None:
    class Gone(huggingface_hub.errors.RepositoryNotFoundError):
        def __init__(self) -> None:
            pass

    def refuse(*args, **kwargs):
        raise Gone

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    _, note = resolve_architecture("stabilityai/stable-diffusion-2-base")
    assert "the hub has no such model" in note


def test_other_hub_model_out_of_reach_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot be had: the hub cannot be reached"):
        resolve_architecture("someone/no-such-model-of-ours")


def test_hub_model_is_loaded_at_its_commit(monkeypatch, folder) -> None:
    commit = "0123abcd" * 5
    snapshot = folder.rename(folder.with_name(commit))
    asked = {}

    files = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*")]
    info = SimpleNamespace(sha=commit, siblings=[SimpleNamespace(rfilename=file) for file in files])

    def download(model_name, *, revision, allow_patterns):
        asked.update(revision=revision, allow_patterns=allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    architecture, note = resolve_architecture("someone/mine", revision="main")
    assert note is None
    assert (architecture.name, architecture.revision) == ("someone/mine", commit)
    assert asked["revision"] == commit
    assert all(
        pattern.endswith((".json", ".txt", ".safetensors")) for pattern in asked["allow_patterns"]
    )


def test_folder_comes_back_with_the_same_weights(folder) -> None:
    architecture, note = resolve_architecture(str(folder))
    assert note is None
    assert (architecture.name, architecture.revision) == ("mine", None)
    assert architecture.weights_folder == folder
    assert architecture.tokenizer_folder == folder / "tokenizer"
    assert architecture.default_image_size == 64
    assert architecture.tokenizer == {"pad_token_id": 49407}
    tiny, _ = resolve_architecture("tiny")
    saved = dict(build_stable_diffusion(tiny, seed=9, **OPTIONS).named_parameters())
    loaded = dict(build_stable_diffusion(architecture, seed=1, **OPTIONS).named_parameters())
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_folder_with_a_piece_missing_is_refused(folder) -> None:
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no vae/config\.json: .*--model_name"):
        resolve_architecture(str(folder))


def test_folder_with_pickled_weights_is_refused(folder) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ConfigError, match="no safetensors weights, and other formats can carry"):
        resolve_architecture(str(folder))


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("unet/config.json", "_class_name", "FluxTransformer2DModel", "U-Net class"),
        ("unet/config.json", "cross_attention_dim", 2048, "cross_attention_dim"),
        ("scheduler/scheduler_config.json", "prediction_type", "sample", "prediction type"),
        ("tokenizer/tokenizer_config.json", "pad_token", "<pad>", "pads with a token"),
    ],
)
def test_folder_with_another_kind_of_model_is_refused(folder, file, key, value, message) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=message):
        resolve_architecture(str(folder))
