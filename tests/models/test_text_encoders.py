"""Weights of text encoders have the hub's names, whatever transformers calls them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdbench.data.batches.tokenizer import CaptionTokenizers
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import build_model
from sdbench.models.stored import CLIP_NAMING
from tests.train.smallest_model import write_model

MODELS = ("tiny", "tiny-sdxl", "tiny-sd3", "tiny-flux")
LAYER = r"(self_attn\.(q|k|v|out)_proj|mlp\.fc[12]|layer_norm[12])\.(weight|bias)"
CLIP = (
    r"text_model\.(embeddings\.(token|position)_embedding\.weight|"
    rf"encoder\.layers\.\d+\.{LAYER}|final_layer_norm\.(weight|bias))"
)
# Names of weights as in the folders of the hub, by class.
HUB_NAMES = {
    "CLIPTextModel": CLIP,
    "CLIPTextModelWithProjection": rf"{CLIP}|text_projection\.weight",
    "T5EncoderModel": (
        r"shared\.weight|encoder\.final_layer_norm\.weight|encoder\.block\.\d+\.layer\.[01]\."
        r"(SelfAttention\.([qkvo]|relative_attention_bias)|DenseReluDense\.(wi_[01]|wo)|layer_norm)"
        r"\.weight"
    ),
}


def without_level(name: str) -> str:
    """The name that transformers 5.6 and later save for a weight of a CLIPTextModel."""
    return name.removeprefix("text_model.")


def rewrite(file: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {without_level(name): tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / request.param
    write_model(folder, name=request.param)
    return folder


def test_an_export_has_the_names_of_the_hub_and_transformers_reads_all_of_it(exported) -> None:
    architecture = resolve_architecture(str(exported))
    for part in architecture.text_encoders:
        kind = architecture.family.parts[part]
        stored = load_file(exported / part / "model.safetensors")
        strange = [name for name in stored if not re.fullmatch(HUB_NAMES[kind], name)]
        assert stored and not strange
        model, report = getattr(transformers, kind).from_pretrained(
            exported / part, output_loading_info=True
        )
        assert not [*report["missing_keys"], *report["unexpected_keys"]]
        # By the translation of the names that this release of transformers has.
        found = {CLIP_NAMING.own_name(name): weight for name, weight in model.named_parameters()}
        assert found.keys() == stored.keys()
        assert all(torch.equal(weight, stored[name]) for name, weight in found.items())
        assert {CLIP_NAMING.own_name(name) for name in stored} == stored.keys()
        if kind != "T5EncoderModel":
            assert {CLIP_NAMING.own_name(without_level(name)) for name in stored} == stored.keys()


def test_an_export_names_the_tokens_of_t5_as_the_hub(exported) -> None:
    names = {
        key: type(value)
        for file in exported.glob("tokenizer*/tokenizer_config.json")
        for key, value in json.loads(file.read_text()).items()
        if key.endswith("_special_tokens")
    }
    # transformers 4 reads `extra_special_tokens` as a mapping, and saves an empty one.
    assert names.get("additional_special_tokens", list) is list
    assert names.get("extra_special_tokens", dict) is dict


def test_a_folder_of_either_form_has_the_same_weights_and_tokens(exported) -> None:
    captions = ["a red circle", "<extra_id_0> ?"]
    expected_ids = CaptionTokenizers.of(resolve_architecture(str(exported)))(captions)
    expected = {
        name: weight.clone()
        for name, weight in build_model(resolve_architecture(str(exported)), seed=1)
        .state_dict()
        .items()
    }
    for part in exported.glob("text_encoder*"):
        rewrite(part / "model.safetensors", rename)
    for file in exported.glob("tokenizer*/tokenizer_config.json"):
        config = json.loads(file.read_text())
        if tokens := config.pop("additional_special_tokens", None):
            file.write_text(json.dumps(config | {"extra_special_tokens": tokens}))
    ids = CaptionTokenizers.of(resolve_architecture(str(exported)))(captions)
    assert {name: some.tolist() for name, some in ids.items()} == {
        name: some.tolist() for name, some in expected_ids.items()
    }
    found = build_model(resolve_architecture(str(exported)), seed=2).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_to_write_and_to_load_a_folder_prints_no_line_of_a_library(tmp_path, capfd):
    write_model(tmp_path / "model", name="tiny-sdxl")
    build_model(resolve_architecture(str(tmp_path / "model")), seed=1)
    assert capfd.readouterr() == ("", "")
