"""A model name leads to its architecture and weights, or to an error."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

import benchmark
from sdbench.cli import main
from sdbench.models.architecture import DRAWING, built_in_names, resolve_architecture
from sdbench.models.components import make_part
from sdbench.models.diffusion import build_model
from sdbench.settings.config import parse_request
from tests.refusals import refused
from tests.train.smallest_model import write_model


@pytest.fixture(autouse=True)
def hub_out_of_reach(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("given", "name"),
    [("SDXL", "sdxl"), ("Sd2-Base", "sd2-base"), ("FLUX-dev-2+4-Blocks", "flux-dev-2+4-blocks")],
)
def test_a_built_in_model_has_one_name_however_it_is_typed(given, name) -> None:
    # The name that the record has.
    request = parse_request(["--model_name", given], description="", epilog="")
    assert request.config.model_name == name
    assert resolve_architecture(given) is resolve_architecture(name)
    Path(given).mkdir()  # a folder comes first
    request = parse_request(["--model_name", given], description="", epilog="")
    assert request.config.model_name == given


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mine"
    write_model(folder)
    change(folder / "tokenizer" / "tokenizer_config.json", pad_token={"content": "<|endoftext|>"})
    return folder


@pytest.fixture
def folder(written, tmp_path) -> Path:
    """The smallest model as diffusers saves it, of the seed 9, with the pad token of SD 1."""
    return Path(shutil.copytree(written, tmp_path / "mine"))


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_built_ins() -> None:
    built_in = {name: resolve_architecture(name) for name in built_in_names()}
    assert {
        name: (
            one.family.name,
            one.default_image_size,
            [one.parts[tokenizer]["pad_token_id"] for tokenizer in one.tokenizers],
            one.parts["scheduler"].get("prediction_type"),
        )
        for name, one in built_in.items()
    } == {
        "flux-dev": ("flux", 1024, [49407, 0], None),
        "flux-schnell": ("flux", 1024, [49407, 0], None),
        "mini": ("sd", 64, [0], "epsilon"),
        "mini-flux": ("flux", 64, [49407, 0], None),
        "mini-sd3": ("sd3", 64, [49407, 0, 0], None),
        "mini-sdxl": ("sdxl", 64, [49407, 0], "epsilon"),
        "sd1-base": ("sd", 512, [49407], "epsilon"),
        "sd2-768-v": ("sd", 768, [0], "v_prediction"),
        "sd2-base": ("sd", 512, [0], "epsilon"),
        "sd3-medium": ("sd3", 1024, [49407, 0, 0], None),
        "sdxl": ("sdxl", 1024, [49407, 0], "epsilon"),
        "small": ("sd", 128, [0], "epsilon"),
        "nano": ("sd", 64, [0], "epsilon"),
        "tiny": ("sd", 64, [0], "epsilon"),
        "tiny-flux": ("flux", 64, [49407, 0], None),
        "tiny-sd3": ("sd3", 64, [49407, 0, 0], None),
        "tiny-sdxl": ("sdxl", 64, [49407, 0], "epsilon"),
    }


@pytest.mark.parametrize(
    ("name", "size", "allowed"),
    [
        ("sd2-base", 32, "64, nearest 64"),
        ("sd2-base", 500, "64, nearest 448 or 512"),
        ("mini", 100, "32, nearest 96 or 128"),
    ],
)
def test_image_size_that_cannot_be_halved_is_refused(name, size, allowed) -> None:
    architecture = resolve_architecture(name)
    with refused("--image_size", value=size, allowed=f"multiples of {allowed}"):
        architecture.check_image_size(size)
    architecture.check_image_size(64)


@pytest.mark.parametrize(
    ("name", "revision", "flag"),
    [
        ("sd2-bas", None, "--model_name"),
        ("../x", None, "--model_name"),
        ("a\0b", None, "--model_name"),
        ("tiny", "main", "--model_revision"),
    ],
)
def test_a_name_of_no_model_or_a_revision_of_a_built_in_is_refused(name, revision, flag) -> None:
    with refused(flag, value=revision or name):
        resolve_architecture(name, revision=revision)


def let_hub_raise(monkeypatch, kind: type[Exception]) -> None:
    """Raise an error of the hub, without the server's answer that it is usually made of."""
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", Mock(side_effect=kind.__new__(kind)))


@pytest.mark.parametrize("problem", [OfflineModeIsEnabled, RepositoryNotFoundError])
@pytest.mark.parametrize(
    ("hub_id", "offer"),
    [
        ("stabilityai/stable-diffusion-2-base", "which builds sd2-base with random weights"),
        ("someone/no-such-model-of-ours", "a hub id in reach"),
    ],
)
def test_a_hub_model_that_cannot_be_had_is_an_error(hub_id, offer, problem, monkeypatch) -> None:
    let_hub_raise(monkeypatch, problem)
    with refused("--model_name", value=hub_id) as caught:
        resolve_architecture(hub_id)
    assert offer in caught.value.allowed
    let_hub_raise(monkeypatch, RevisionNotFoundError)
    with refused("--model_revision", value="other"):
        resolve_architecture(hub_id, revision="other")


def test_a_hub_that_does_not_answer_is_waited_for_5_s(monkeypatch) -> None:
    waits_s = []

    def wait(self, *args, timeout=None, **options):
        waits_s.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", wait)
    with refused("--model_name", value="someone/mine"):
        resolve_architecture("someone/mine")
    assert waits_s == [5.0]


@pytest.mark.parametrize("random_weights", [False, True])
def test_hub_model_is_loaded_at_its_commit(monkeypatch, folder, random_weights) -> None:
    commit = "0123abcd" * 5
    snapshot = folder.rename(folder.with_name(commit))
    files = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    fetched = []

    def download(model_name, *, revision, allow_patterns):
        assert (model_name, revision) == ("someone/mine", "main")
        fetched.extend(
            file for file in files if any(fnmatch(file, pattern) for pattern in allow_patterns)
        )
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", Mock())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    architecture = resolve_architecture(
        "someone/mine", revision="main", random_weights=random_weights
    )
    assert (architecture.name, architecture.revision) == ("someone/mine", commit)
    assert architecture.weights_folder == (None if random_weights else snapshot)
    suffixes = {Path(file).suffix for file in fetched}
    assert suffixes - {".txt"} == ({".json"} if random_weights else {".json", ".safetensors"})


def test_a_model_of_the_hub_that_was_loaded_before_needs_no_hub(monkeypatch, folder) -> None:
    commit = "0123abcd" * 5
    place = folder.parent / "models--someone--mine"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "snapshots").mkdir()
    folder.rename(place / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place.parent))
    assert resolve_architecture("someone/mine").revision == commit


def parameters_of(architecture, *, seed):
    return dict(build_model(architecture, seed=seed).named_parameters())


@pytest.mark.parametrize("random_weights", [False, True])
def test_folder_comes_back_with_its_weights_or_random_ones(folder, random_weights) -> None:
    architecture = resolve_architecture(str(folder), random_weights=random_weights)
    assert (architecture.name, architecture.revision) == ("mine", None)
    assert architecture.weights_folder == (None if random_weights else folder)
    assert architecture.tokenizer_folders == {"tokenizer": folder / "tokenizer"}
    assert architecture.parts["tokenizer"] == {"pad_token_id": 49407}
    expected = parameters_of(resolve_architecture("nano"), seed=4 if random_weights else 9)
    found = parameters_of(architecture, seed=4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("random_weights", [False, True])
@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_folder_with_a_piece_missing_is_refused(folder, random_weights, content) -> None:
    (folder / "vae" / "config.json").unlink()
    if content is not None:
        (folder / "vae" / "config.json").write_text(content)
    with refused("--model_name", value=str(folder)):
        resolve_architecture(str(folder), random_weights=random_weights)


def test_the_folder_of_a_run_is_refused_with_the_command_that_makes_a_model_of_it(tmp_path) -> None:
    run = tmp_path / "first"
    (run / "checkpoints").mkdir(parents=True)
    with refused("--model_name", value=str(run)) as caught:
        resolve_architecture(str(run))
    assert f"`python -m sdbench export {run}`" in caught.value.allowed


def test_folder_with_pickled_weights_is_refused(folder) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with refused("--model_name", value=str(folder / "unet")):
        resolve_architecture(str(folder))


@pytest.mark.parametrize("num_bytes", [4, 1000, -1])
def test_folder_with_weights_that_are_cut_off_is_refused(folder, num_bytes) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    with refused("--model_name", value=str(weights)):
        resolve_architecture(str(folder))


def test_folder_with_a_second_text_encoder_is_refused(folder) -> None:
    for part in ("text_encoder", "tokenizer"):  # as SDXL has them, whose U-Net reads more
        shutil.copytree(folder / part, folder / f"{part}_2")
    with refused("--model_name", value="StableDiffusionPipeline"):
        resolve_architecture(str(folder), random_weights=True)
    (folder / "model_index.json").unlink()
    with refused("--model_name", value=None, allowed="text_time"):
        resolve_architecture(str(folder), random_weights=True)


def test_a_single_file_is_refused(tmp_path) -> None:
    file = tmp_path / "sdxl.safetensors"
    file.write_bytes(b"")
    with refused("--model_name", value=str(file)) as caught:
        resolve_architecture(str(file))
    assert "from_single_file" in caught.value.allowed


def test_folder_with_numbers_that_make_no_model_is_refused(folder) -> None:
    change(folder / "unet" / "config.json", block_out_channels="many")
    with refused("--model_name"):
        make_part("unet", resolve_architecture(str(folder)))


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("unet/config.json", "_class_name", "FluxTransformer2DModel"),
        ("unet/config.json", "cross_attention_dim", 2048),
        ("unet/config.json", "in_channels", 9),
        ("unet/config.json", "class_embed_type", "timestep"),
        ("unet/config.json", "addition_embed_type", "text_time"),
        ("scheduler/scheduler_config.json", "prediction_type", "flow_prediction"),
        ("tokenizer/tokenizer_config.json", "pad_token", "<pad>"),
    ],
)
def test_folder_with_another_kind_of_model_is_refused(folder, file, key, value) -> None:
    change(folder / file, **{key: value})
    with refused("--model_name", value=value):
        resolve_architecture(str(folder))


RUN = (
    *("--engine", "torch", "--use_synth_data", "--num_workers", "0", "--results_dir", "runs"),
    *("--warmup_batches", "0", "--measure_batches", "1", "--max_warmup_batches", "0"),
    *("--profile_batches", "0", "--no_measure_peak", "--num_threads", "1"),
)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_replay")
@pytest.mark.parametrize(
    ("flags", "weights"), [((), "loaded"), (("--random_weights",), "random")], ids=str
)
def test_the_record_says_whether_weights_were_loaded(folder, flags, weights) -> None:
    assert benchmark.main(["--model_name", str(folder), *flags, *RUN]) == 0
    (record,) = (json.loads(path.read_text()) for path in Path("runs").glob("*/record.json"))
    assert record["workload"]["architecture"] == "mine"
    assert record["workload"]["weights"] == weights


@pytest.mark.slow
def test_every_program_refuses_a_hub_model_that_cannot_be_had() -> None:
    model = ("--model_name", "stabilityai/stable-diffusion-2-base", "--use_synth_data")
    assert benchmark.main([*model, *RUN]) == 2
    random = (*RUN, "--random_weights", "--no_check_memory", "--print_config")
    assert benchmark.main([*model, *random]) == 0
    assert main(["profile", *model, "--engine", "torch"]) == 2
    assert main(["precompute", *model, "--folder", "latents"]) == 2
    assert not list(Path().glob("*/*/record.json")) and not Path("latents").exists()


def test_a_model_is_known_by_its_files(folder) -> None:
    """Not by weights in other types, or by the version of the library that wrote a file."""

    def identify() -> dict:
        known = resolve_architecture(str(folder)).identify(("vae", "text_encoder"), seed=1)
        assert json.loads(json.dumps(known, allow_nan=False)) == known
        return known

    before = identify()
    assert before["scheduler/scheduler_config.json"]["prediction_type"] == "epsilon"
    files = {path for path in folder.rglob("*") if path.is_file() and path.parent.name != "unet"}
    names = {str(path.relative_to(folder)) for path in files - {folder / "README.md"}}
    assert names | {"unet/config.json"} == before.keys()
    for name in sorted(names):
        path = folder / name
        content = path.read_bytes()
        if path.suffix == ".json":
            change(path, added=1)
        elif path.suffix == ".safetensors":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        else:
            path.write_bytes(content + b"\n")
        now = identify()
        assert {one for one in before.keys() | now.keys() if before[one] != now[one]} == {name}
        path.write_bytes(content)
    weights = next((folder / "vae").glob("*.safetensors"))
    shutil.copy(weights, weights.with_suffix(".fp16.safetensors"))
    change(folder / "vae" / "config.json", _diffusers_version="9.9")
    assert identify() == before
    drawn = resolve_architecture("tiny").identify(("vae",), seed=1)
    assert drawn["vae"] == f"random, seed 1, drawing {DRAWING}"
