"""A model has exactly the weights of its folder: what lacks, is left over or damaged is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import generate
import train
from sdbench.base.errors import RunError
from sdbench.cli import main as sdbench
from sdbench.models.architecture import Architecture, resolve_architecture
from sdbench.models.components import check_folders, make_part
from sdbench.models.parts import replace_parts
from sdbench.models.stored import NAMINGS
from sdbench.models.weights import Weights, check_filled, draw_weights, fill_with_nan, own_weights
from sdbench.training.checkpoint_weights import check_weights
from tests.refusals import printed_refusal, refused
from tests.train.smallest_model import write_model

MODELS = ("nano", "tiny-sdxl", "tiny-sd3", "tiny-flux")
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def write_parts(folder: Path, name: str) -> Architecture:
    """A model whose parts are in a folder."""
    architecture = resolve_architecture(name)
    for part in architecture.modules:
        (folder / part).mkdir(parents=True)
        weights = own_weights(make_part(part, architecture, weights=Weights(seed=1)))
        stem = architecture.family.weights_stem(part)
        save_file(weights, folder / part / f"{stem}.safetensors")
    return dataclasses.replace(architecture, weights_folder=folder)


@pytest.fixture(scope="module", params=MODELS)
def stored(request, tmp_path_factory) -> Architecture:
    return write_parts(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "nano"
    write_model(folder)
    return folder


@pytest.fixture
def folder(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "nano"))


def file_of(folder: Path, part: str) -> Path:
    (file,) = (folder / part).glob("*.safetensors")
    return file


def rewrite(file: Path, change: Change) -> None:
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def load_part(model: Path | Architecture, part: str) -> dict[str, Tensor]:
    architecture = model if isinstance(model, Architecture) else resolve_architecture(str(model))
    return make_part(part, architecture, weights=Weights(seed=1)).state_dict()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def rename(old: str, new: str) -> Change:
    return lambda tensors: {name.replace(old, new): one for name, one in tensors.items()}


def largest(tensors: dict[str, Tensor]) -> str:
    return max(tensors, key=lambda name: tensors[name].numel())


def leave_out(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    left_out = largest(tensors)
    return {name: one for name, one in tensors.items() if name != left_out}


def rename_largest(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return leave_out(tensors) | {f"old.{largest(tensors)}": tensors[largest(tensors)]}


def add(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"strange.weight": torch.ones(3)}


def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {largest(tensors): tensors[largest(tensors)][:-1].clone()}


DAMAGES = {
    leave_out: ("1 missing ({})", "a shard"),
    rename_largest: ("1 missing ({}), 1 left over (old.{})", "named them"),
    add: ("1 left over (strange.weight)", "a larger model"),
    cut: ("1 of another shape ({}, ", "another model"),
}


def test_a_part_that_lacks_weights_or_has_others_is_refused_in_every_family(stored) -> None:
    folder = stored.weights_folder
    for part in stored.modules:
        file = file_of(folder, part)
        content, tensors = file.read_bytes(), load_file(file)
        # The rule is one for all: the miniature has each damage, and the others one.
        damages = DAMAGES if stored.name == "nano" else (rename_largest,)
        for change in damages:
            said, reason = DAMAGES[change]
            save_file(change(tensors), file)
            with refused("--model_name", value=str(folder / part)) as caught:
                make_part(part, stored)
            assert f"the {part} " in caught.value.what and reason in caught.value.what
            assert f": of {len(tensors)} weights " in caught.value.what
            assert said.replace("{}", largest(tensors)) in caught.value.what
        file.write_bytes(content)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_programs_refuse_it_before_they_build_or_write_anything(
    part, folder, tmp_path, capsys, monkeypatch
) -> None:
    def build(*args, **options) -> None:
        raise AssertionError("a model is built")

    monkeypatch.setattr("sdbench.models.components.load_weights", build)
    rewrite(file_of(folder, part), rename_largest)
    out = tmp_path / "out"
    model = ["--model_name", str(folder), "--use_synth_data"]
    for main, argv in (
        (generate.main, [*model[:2], "--prompts", "a cat", "--folder", str(out)]),
        (train.main, [*model, "--max_duration", "1ba", "--results_dir", str(out)]),
        (sdbench, ["precompute", *model, "--folder", str(out)]),
    ):
        assert main(argv) == 2
        refusal = printed_refusal(capsys.readouterr().err)
        assert (refusal.flag, refusal.value) == ("--model_name", str(folder / part))
        assert not out.exists()


def test_a_part_from_another_folder_is_refused_with_the_flag_of_parts(folder) -> None:
    rewrite(file_of(folder, "vae"), leave_out)
    architecture = replace_parts(resolve_architecture("nano"), {"vae": {"pretrained": str(folder)}})
    with refused("--model_parts", value=str(folder / "vae")):
        check_folders(architecture)


def test_a_file_of_no_weights_at_all_is_refused(folder) -> None:
    rewrite(file_of(folder, "text_encoder"), lambda tensors: {})
    with refused("--model_name"):
        load_part(folder, "text_encoder")


OLD_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def name_as_old_diffusers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for own, old in OLD_ATTENTION.items():
        tensors = rename(f".{own}.", f".{old}.")(tensors)
    return tensors


def test_names_of_old_vaes_are_read_as_diffusers_reads_them(folder) -> None:
    expected, file = load_part(folder, "vae"), file_of(folder, "vae")
    rewrite(file, name_as_old_diffusers)
    assert not load_file(file).keys() & {"encoder.mid_block.attentions.0.to_q.weight"}
    assert_same(load_part(folder, "vae"), expected)
    options = {"use_safetensors": True, "low_cpu_mem_usage": False}
    by_diffusers = diffusers.AutoencoderKL.from_pretrained(folder / "vae", **options)
    assert_same(dict(by_diffusers.state_dict()), expected)
    # A weight under both names would be one of two.
    both = {"encoder.mid_block.attentions.0.to_q.weight": torch.zeros(1)}
    rewrite(file, lambda tensors: tensors | both)
    with refused("--model_name") as caught:
        load_part(folder, "vae")
    assert "left over (encoder.mid_block.attentions.0.query.weight)" in caught.value.what


def other_names(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    if kind == "AutoencoderKL":
        return name_as_old_diffusers(tensors)
    if kind == "T5EncoderModel":
        return rename("shared.", "encoder.embed_tokens.")(tensors)
    return {name.removeprefix("text_model."): one for name, one in tensors.items()}


def test_every_renaming_leads_to_own_names_and_leaves_them_as_they_are(stored) -> None:
    kinds = {part: stored.family.parts[part] for part in stored.modules}
    for part in [part for part, kind in kinds.items() if kind in NAMINGS]:
        naming, file = NAMINGS[kinds[part]], file_of(stored.weights_folder, part)
        content, own, tensors = file.read_bytes(), load_part(stored, part), load_file(file)
        assert all(naming.own_name(name) == name and naming.is_read(name) for name in tensors)
        others = other_names(tensors, kinds[part])
        assert {naming.own_name(name) for name in others} == tensors.keys() != others.keys()
        save_file(others, file)
        assert_same(load_part(stored, part), own)
        file.write_bytes(content)


def test_what_libraries_saved_beside_the_weights_is_left(tmp_path) -> None:
    model = write_parts(tmp_path, "tiny-sd3")
    beside = {
        "text_encoder": {"text_model.embeddings.position_ids": torch.arange(77)[None]},
        "text_encoder_3": {
            "encoder.embed_tokens.weight": torch.ones(2),
            "decoder.block.0.layer.0.layer_norm.weight": torch.ones(2),
            "lm_head.weight": torch.ones(2, 2),
        },
    }
    for part, more in beside.items():
        expected = load_part(model, part)
        rewrite(file_of(tmp_path, part), lambda tensors, more=more: tensors | more)
        assert_same(load_part(model, part), expected)


@pytest.fixture
def shards(folder) -> Path:
    """The folder of a U-Net in several files."""
    unet = diffusers.UNet2DConditionModel.from_pretrained(
        folder / "unet", use_safetensors=True, low_cpu_mem_usage=False
    )
    file_of(folder, "unet").unlink()
    unet.save_pretrained(folder / "unet", max_shard_size="200KB")
    assert len(list((folder / "unet").glob("*-of-*.safetensors"))) > 2
    return folder / "unet"


def test_a_model_in_shards_is_that_of_one_file(written, shards) -> None:
    assert_same(load_part(shards.parent, "unet"), load_part(written, "unet"))


def test_shards_that_are_not_there_or_not_whole_are_refused(written, shards) -> None:
    index = shards / "diffusion_pytorch_model.safetensors.index.json"
    first, second, *_ = sorted(shards.glob("*-of-*.safetensors"))
    contents = {file: file.read_bytes() for file in (index, first)}
    one = file_of(written, "unet")
    bad_index = "the index of the shards of weights cannot be read"
    cases = (
        (first.unlink, shards, f"shards of weights are not there: {first.name}"),
        (lambda: first.write_bytes(contents[first][:-1]), first, "is damaged or cut off"),
        (lambda: shutil.copy(second, first), [first.name, second.name], "two files of weights"),
        (lambda: index.write_text("{"), index, bad_index),
        (lambda: index.write_text('{"weight_map": {"a": 1}}'), index, bad_index),
        (lambda: index.write_text('{"weight_map": {"a": "../b"}}'), index, bad_index),
        (lambda: shutil.copy(one, shards / one.name), shards, "one file and an index"),
    )
    for damage, value, what in cases:
        damage()
        shown = value if isinstance(value, list) else str(value)
        with refused("--model_name", value=shown) as caught:
            resolve_architecture(str(shards.parent))
        assert what in caught.value.what
        (shards / one.name).unlink(missing_ok=True)
        for file, content in contents.items():
            file.write_bytes(content)
    # As if the first shard were the model.
    shutil.move(first, shards / one.name)
    index.unlink()
    with refused("--model_name", value=str(shards)) as caught:
        check_folders(resolve_architecture(str(shards.parent)))
    assert "such as a shard" in caught.value.what


def with_first(value: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["conv_in.weight"].view(-1)[0] = value
        return tensors

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (with_first(math.nan), "conv_in.weight is not finite"),
        (with_first(-math.inf), "conv_in.weight is not finite"),
        # The content of a file that got its length first has not come.
        (
            lambda tensors: tensors | {"conv_in.weight": 0 * tensors["conv_in.weight"]},
            "conv_in.weight is a matrix of zeros",
        ),
        (
            lambda tensors: tensors | {"conv_in.weight": tensors["conv_in.weight"].char()},
            "1 of {} weights of the unet are no floating-point numbers",
        ),
    ],
    ids=["nan", "infinite", "zeros", "integers"],
)
def test_numbers_that_are_no_weights_are_refused(folder, change, what) -> None:
    file = file_of(folder, "unet")
    rewrite(file, change)
    with refused("--model_name") as caught:
        load_part(folder, "unet")
    assert what.format(len(load_file(file))) in caught.value.what


@pytest.mark.parametrize("random_weights", [False, True])
def test_a_folder_in_half_precision_has_weights_in_fp32(folder, random_weights) -> None:
    for part in ("unet", "vae", "text_encoder"):
        rewrite(file_of(folder, part), lambda some: {n: one.half() for n, one in some.items()})
    config = folder / "text_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    architecture = resolve_architecture(str(folder), random_weights=random_weights)
    for part in architecture.modules:
        found = make_part(part, architecture, weights=Weights(seed=1)).state_dict()
        assert {weight.dtype for weight in found.values()} == {torch.float32}
        is_rounded = all(torch.equal(one, one.half().float()) for one in found.values())
        assert is_rounded != random_weights


class _Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def test_a_weight_that_nothing_has_set_is_an_error() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(4, 3), _Forgetful(3, 2))
    with pytest.raises(RunError, match=r"1\.bias"):
        draw_weights(layers, Weights(seed=3))
    layer = nn.Linear(2, 2)
    fill_with_nan(layer, "cpu")
    layer.reset_parameters()
    check_filled(layer)
    # Shapes alone, on a device with memory: whatever is computed with them is not a number.
    shapes = make_part("vae", resolve_architecture("nano"), weights=Weights(seed=None))
    assert all(weight.isnan().all() for weight in shapes.parameters())


def checkpoint_of(architecture: Architecture, *parts: str) -> SimpleNamespace:
    """The tensors of a run that has trained parts of a model."""
    tensors = {
        f"model.{part}.{name}": weight
        for part in parts
        for name, weight in own_weights(make_part(part, architecture)).items()
    }
    return SimpleNamespace(folder=Path("run"), tensors=lambda: tensors)


def test_a_run_begins_with_a_whole_part_of_another_or_with_none_of_it() -> None:
    whole, fewer = map(resolve_architecture, ("tiny-flux", "tiny-flux-1+2-blocks"))
    parts = ("transformer", "vae")
    check_weights(checkpoint_of(whole, "transformer"), whole, parts=parts)
    for there, wanted, kind in ((fewer, whole, "missing"), (whole, fewer, "left over")):
        with refused("--init_from", value="run") as caught:
            check_weights(checkpoint_of(there, *parts), wanted, parts=parts)
        assert "the transformer in the checkpoint" in caught.value.what
        assert f"{kind} (transformer.transformer_blocks.1." in caught.value.what
