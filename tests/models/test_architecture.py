"""A model name leads to its architecture and weights, or to an error."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from diffusers import DDPMScheduler
from huggingface_hub.errors import OfflineModeIsEnabled

import benchmark
from sdbench.base.errors import ConfigError
from sdbench.cli import main
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
    assert built_in_names() == ["mini", "sd1-base", "sd2-768-v", "sd2-base", "small", "tiny"]
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
        "mini": (64, 32, 0, "epsilon"),
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
    with pytest.raises(ConfigError) as caught:
        architecture.check_image_size(size)
    assert (caught.value.value, caught.value.flag) == (size, "--image_size")
    assert caught.value.allowed == f"multiples of 64, nearest {nearest}"


def test_image_size_that_fits_is_accepted() -> None:
    architecture, _ = resolve_architecture("sd2-base")
    for size in (64, 256, 512, 768):
        architecture.check_image_size(size)


def refusal_of(model_name, **options) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve_architecture(str(model_name), **options)
    return caught.value


def test_unknown_name_is_refused_with_the_nearest() -> None:
    error = refusal_of("sd2-bas")
    assert (error.value, error.flag) == ("sd2-bas", "--model_name")
    assert error.allowed.endswith("the nearest is sd2-base")


def test_built_in_has_no_revision() -> None:
    error = refusal_of("tiny", revision="main")
    assert (error.value, error.flag) == ("main", "--model_revision")


class Gone(huggingface_hub.errors.RepositoryNotFoundError):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("problem", [OfflineModeIsEnabled("HF_HUB_OFFLINE is set"), Gone()])
@pytest.mark.parametrize(
    ("hub_id", "offer"),
    [
        ("stabilityai/stable-diffusion-2-base", "which builds sd2-base with random weights"),
        ("someone/no-such-model-of-ours", "a hub id in reach"),
    ],
)
def test_a_hub_model_that_cannot_be_had_is_an_error(hub_id, offer, problem, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise problem

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    error = refusal_of(hub_id)
    assert (error.value, error.flag) == (hub_id, "--model_name")
    assert offer in error.allowed


@pytest.mark.parametrize(
    ("hub_id", "built_in"),
    [
        ("stabilityai/stable-diffusion-2-base", "sd2-base"),
        ("stabilityai/stable-diffusion-2", "sd2-768-v"),
    ],
)
def test_random_weights_of_a_known_hub_id_need_no_hub(hub_id, built_in) -> None:
    architecture, note = resolve_architecture(hub_id, random_weights=True)
    assert (architecture.name, architecture.weights_folder, note) == (built_in, None, None)


@pytest.mark.parametrize("random_weights", [False, True])
def test_hub_model_is_loaded_at_its_commit(monkeypatch, folder, random_weights) -> None:
    commit = "0123abcd" * 5
    snapshot = folder.rename(folder.with_name(commit))
    files = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    info = SimpleNamespace(sha=commit, siblings=[SimpleNamespace(rfilename=file) for file in files])
    fetched = []

    def download(model_name, *, revision, allow_patterns):
        assert revision == commit
        fetched.extend(
            file for file in files if any(fnmatch(file, pattern) for pattern in allow_patterns)
        )
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    architecture, note = resolve_architecture(
        "someone/mine", revision="main", random_weights=random_weights
    )
    assert (architecture.name, architecture.revision, note) == ("someone/mine", commit, None)
    assert architecture.weights_folder == (None if random_weights else snapshot)
    assert {Path(file).suffix for file in fetched} == (
        {".json"} if random_weights else {".json", ".safetensors"}
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


def test_random_weights_of_a_folder_are_drawn_in_its_architecture(folder) -> None:
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    architecture, _ = resolve_architecture(str(folder), random_weights=True)
    assert architecture.weights_folder is None
    assert architecture.tokenizer_folder == folder / "tokenizer"
    tiny, _ = resolve_architecture("tiny")
    drawn = dict(build_stable_diffusion(architecture, seed=4, **OPTIONS).named_parameters())
    expected = dict(build_stable_diffusion(tiny, seed=4, **OPTIONS).named_parameters())
    assert drawn.keys() == expected.keys()
    assert all(torch.equal(drawn[name], expected[name]) for name in drawn)


def test_folder_with_a_piece_missing_is_refused(folder) -> None:
    (folder / "vae" / "config.json").unlink()
    for random_weights in (False, True):
        error = refusal_of(folder, random_weights=random_weights)
        assert (error.value, error.flag) == (str(folder), "--model_name")


def test_folder_with_pickled_weights_is_refused(folder) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    error = refusal_of(folder)
    assert (error.value, error.flag) == (str(folder / "unet"), "--model_name")


def test_folder_with_a_damaged_configuration_is_refused(folder) -> None:
    (folder / "unet" / "config.json").write_text("{")
    assert refusal_of(folder).value == str(folder)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("unet/config.json", "_class_name", "FluxTransformer2DModel"),
        ("unet/config.json", "cross_attention_dim", 2048),
        ("scheduler/scheduler_config.json", "prediction_type", "flow_prediction"),
        ("tokenizer/tokenizer_config.json", "pad_token", "<pad>"),
    ],
)
def test_folder_with_another_kind_of_model_is_refused(folder, file, key, value) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    error = refusal_of(folder)
    assert (error.value, error.flag) == (value, "--model_name")


RUN = (
    *("--engine", "torch", "--use_synth_data", "--num_workers", "0", "--results_dir", "runs"),
    *("--warmup_batches", "0", "--measure_batches", "1", "--max_warmup_batches", "0"),
    *("--profile_batches", "0", "--no_measure_peak", "--num_threads", "1"),
)


@pytest.mark.usefixtures("plain_replay")
@pytest.mark.parametrize(
    ("flags", "weights"), [((), "loaded"), (("--random_weights",), "random")], ids=str
)
def test_the_record_says_whether_weights_were_loaded(folder, flags, weights) -> None:
    assert benchmark.main(["--model_name", str(folder), *flags, *RUN]) == 0
    (record,) = (json.loads(path.read_text()) for path in Path("runs").glob("*/record.json"))
    assert record["workload"]["architecture"] == "mine"
    assert record["workload"]["weights"] == weights


def test_every_program_refuses_a_hub_model_that_cannot_be_had() -> None:
    model = ("--model_name", "stabilityai/stable-diffusion-2-base", "--use_synth_data")
    assert benchmark.main([*model, *RUN]) == 2
    random = (*RUN, "--random_weights", "--no_check_memory", "--print_config")
    assert benchmark.main([*model, *random]) == 0
    assert main(["profile", *model, "--engine", "torch"]) == 2
    assert main(["precompute", *model, "--folder", "latents"]) == 2
    assert not list(Path().glob("*/*/record.json")) and not Path("latents").exists()
