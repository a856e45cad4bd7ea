"""`sdbench before-after`: the sheet, and how alike pictures are, against transformers itself."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, CLIPModel, Dinov2Model

from sdbench.cli import main as sdbench
from sdbench.evaluate.networks import DinoNetwork
from tests.refusals import refusal_of, refused
from tests.score_networks import make_pictures, write_clip, write_dino, write_pictures

SUBJECT, CLASS = "photo of a unqtkn dog", "photo of a dog"
CAPTIONS = [SUBJECT] * 2 + [CLASS] * 2 + ["unqtkn dog on the moon"] * 2
PROMPTS = ("--prompt", SUBJECT, "--class_prompt", CLASS)


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("networks") / "clip")


@pytest.fixture(scope="module")
def dino(tmp_path_factory) -> Path:
    return write_dino(tmp_path_factory.mktemp("networks") / "dino")


@pytest.fixture
def drawn(tmp_path) -> Path:
    """A folder with pictures before and after, and three of the subject beside it."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_pictures(folder / "before", make_pictures(1, 6), CAPTIONS)
    write_pictures(folder / "after", make_pictures(2, 6), CAPTIONS)
    write_pictures(tmp_path / "my-dog", make_pictures(3, 3), ["a", "b", "c"])
    return folder


def compare(folder: Path, *argv: object) -> dict:
    arguments = ["before-after", str(folder), "--subject", "my-dog", *map(str, argv)]
    assert sdbench(arguments) == 0
    return json.loads((folder / "dreambooth.json").read_text())


def embedding_by(network: type[torch.nn.Module], folder: Path) -> Callable[[Path], np.ndarray]:
    model = network.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, use_fast=True)

    def embed(file: Path) -> np.ndarray:
        with Image.open(file) as picture, torch.no_grad():
            pixels = processor(picture, return_tensors="pt")["pixel_values"]
            if network is Dinov2Model:
                return model(pixels).pooler_output[0].numpy()
            return model.visual_projection(model.vision_model(pixels).pooler_output)[0].numpy()

    return embed


def mean_cosine(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    cosines = [one @ two / np.linalg.norm(one) / np.linalg.norm(two) for one, two in pairs]
    return float(np.mean(cosines, dtype=np.float64))


def test_the_similarity_is_that_of_every_pair(drawn, clip, dino, capsys) -> None:
    facts = compare(drawn, *PROMPTS, "--clip_network", clip, "--dino_network", dino)
    for name, embed in (
        ("clip", embedding_by(CLIPModel, clip)),
        ("dino", embedding_by(Dinov2Model, dino)),
    ):
        sets = {
            (when, caption): [embed(drawn / when / f"{n:02d}.png") for n in numbers]
            for when in ("before", "after")
            for caption, numbers in (("subject", (0, 1)), ("class", (2, 3)))
        }
        own = [embed(Path("my-dog", f"{number:02d}.png")) for number in range(3)]
        found = facts["scores"][name]
        for when in ("before", "after"):
            for row, caption in (("subject", "subject"), ("class_to_subject", "class")):
                expected = mean_cosine([*product(sets[when, caption], own)])
                assert found[row][when] == pytest.approx(expected, abs=1e-5)
                assert found[row][f"num_pairs_{when}"] == 6
        expected = mean_cosine([*combinations(sets["before", "class"], 2)])
        assert found["class"]["before"] == pytest.approx(expected, abs=1e-5)
        before, after = sets["before", "class"], sets["after", "class"]
        of_other_seeds = [(before[0], after[1]), (before[1], after[0])]
        assert found["class"]["after"] == pytest.approx(mean_cosine(of_other_seeds), abs=1e-5)
        assert [found["class"][f"num_pairs_{when}"] for when in ("before", "after")] == [2, 2]
    numbers = ("num_subject_pictures", "num_drawn_pictures", "num_drawn_class_pictures")
    assert [facts[number] for number in numbers] == [3, 2, 2]
    weights = (dino / "model.safetensors").read_bytes()
    assert facts["networks"]["dino"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert f"{facts['scores']['dino']['class']['after']:.3g}" in capsys.readouterr().out


def test_the_sheet_has_a_row_for_each_prompt(drawn) -> None:
    assert sdbench(["before-after", str(drawn), "--subject", "my-dog", "--prompt", SUBJECT]) == 0
    assert not (drawn / "dreambooth.json").exists()  # nothing is scored without a network
    with Image.open(drawn / "before_after.png") as sheet:
        assert sheet.size == (4 + 4 * 116, 4 + 3 * 84)
        for number, when, column, row in ((0, "before", 0, 0), (3, "after", 3, 1)):
            left, top = 4 + column * 116, 4 + row * 84
            with Image.open(drawn / when / f"{number:02d}.png") as picture:
                shown = sheet.crop((left, top, left + 64, top + 64))
                assert np.array_equal(np.asarray(shown), np.asarray(picture))


def test_one_class_picture_cannot_be_compared_with_itself(drawn, clip) -> None:
    for when in ("before", "after"):
        shutil.rmtree(drawn / when)
        write_pictures(drawn / when, make_pictures(4, 2), [SUBJECT, CLASS])
    # A space at the end is no other prompt.
    facts = compare(drawn, *PROMPTS[:3], f"{CLASS} ", "--clip_network", clip)
    of_class = facts["scores"]["clip"]["class"]
    assert set(of_class.items()) == {
        *((when, None) for when in ("before", "after")),
        *((f"num_pairs_{when}", 0) for when in ("before", "after")),
    }
    without = compare(drawn, "--prompt", SUBJECT, "--clip_network", clip)
    assert list(without["scores"]["clip"]) == ["subject"]


def test_what_cannot_be_compared_is_refused(drawn, clip, dino, tmp_path) -> None:
    own = ("before-after", drawn, "--subject", "my-dog")
    scored = (*own, "--dino_network", dino)
    for argv, flag in (
        ((*scored, "--prompt", "a cat"), "--prompt"),
        ((*scored, "--prompt", SUBJECT, "--class_prompt", "a cat"), "--class_prompt"),
        ((*scored[:2], "--subject", "none", *scored[4:], "--prompt", SUBJECT), "--subject"),
        ((*own, "--prompt", SUBJECT, "--dino_network", clip), "--dino_network"),
        ((*own, "--prompt", SUBJECT, "--dino_network", tmp_path), "--dino_network"),
        ((*own, "--prompt", SUBJECT, "--clip_network", dino), "--clip_network"),
    ):
        assert refusal_of(*argv).flag == flag
    shutil.rmtree(drawn / "after")
    write_pictures(drawn / "after", make_pictures(2, 5), CAPTIONS[:5])
    assert refusal_of(*own, "--prompt", SUBJECT).flag == "FOLDER"


def test_a_dino_with_a_head_is_compared_without_it_and_one_that_lacks_weights_is_refused(
    dino, tmp_path
) -> None:
    folder = Path(shutil.copytree(dino, tmp_path / "copy"))
    file, metadata = folder / "model.safetensors", {"format": "pt"}
    tensors = load_file(file)
    named = {f"dinov2.{name}": one for name, one in tensors.items()}
    save_file(named | {"classifier.weight": torch.ones(2, 2)}, file, metadata=metadata)
    pictures = torch.from_numpy(np.stack(make_pictures(3))).permute(0, 3, 1, 2)
    found, expected = (
        DinoNetwork(one, device="cpu").embeddings(pictures) for one in (folder, dino)
    )
    assert np.array_equal(found, expected)
    del tensors["embeddings.cls_token"]
    save_file(tensors, file, metadata=metadata)
    with refused("--dino_network", value=str(folder)) as caught:
        DinoNetwork(folder, device="cpu")
    assert "1 missing (embeddings.cls_token)" in caught.value.what
