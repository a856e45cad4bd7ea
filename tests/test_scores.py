"""FID and CLIP score against SciPy, torchmetrics and transformers; from a run and from a folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy.linalg import sqrtm
from transformers import CLIPModel, CLIPProcessor

import generate
from sdbench import data
from sdbench.base.conditions import Captions
from sdbench.base.errors import RunError
from sdbench.base.shape import Shape
from sdbench.cli import main as sdbench
from sdbench.data.batches.tokenizer import CaptionTokenizers
from sdbench.data.source import SourceConfig
from sdbench.evaluate.command import main as score_main
from sdbench.evaluate.networks import ClipNetwork, FidNetwork
from sdbench.evaluate.scores import score_model
from sdbench.models.drawing import DrawingSettings
from sdbench.ranks.distributed import ALONE, Ranks
from sdbench.record.store import load_record
from tests.forked import run_in_group
from tests.refusals import printed_refusal, refusal_of
from tests.score_networks import (
    SIDE_PX,
    OfAnotherSize,
    OneByOne,
    OnRequest,
    features_of,
    make_pictures,
    write_clip,
    write_fid_network,
    write_pictures,
)
from tests.train.smallest_model import build_smallest
from tests.train.written import exported, read_events, trained

LONG = "a caption of far more tokens than CLIP reads " * 20
TINY = ("--model_name", "tiny", "--engine", "torch", "--batch_size", "4", "--use_synth_data")


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("networks") / "clip")


@pytest.fixture(scope="module")
def fid(tmp_path_factory) -> Path:
    return write_fid_network(tmp_path_factory.mktemp("networks") / "fid.pt")


def captions_of(num: int) -> list[str]:
    return [f"picture {number} of {num}" for number in range(num)]


def score(folder: Path, *argv: object) -> dict:
    assert sdbench(["score", str(folder), *map(str, argv)]) == 0
    return json.loads((folder / "score.json").read_text())


def distance_by_formula(one: np.ndarray, other: np.ndarray) -> float:
    first, second = (np.cov(matrix, rowvar=False) for matrix in (one, other))
    difference = one.mean(0) - other.mean(0)
    root = sqrtm(first @ second).real
    return float(difference @ difference + np.trace(first + second - 2 * root))


@pytest.mark.parametrize("network", [None, OnRequest()], ids=["plain", "return_features"])
def test_fid_is_that_of_the_formula(tmp_path, network) -> None:
    file = write_fid_network(tmp_path / "network.pt", network)
    drawn, held_out = make_pictures(1), make_pictures(2, 12)
    facts = score(
        write_pictures(tmp_path / "drawn", drawn, captions_of(9)),
        *("--reference", write_pictures(tmp_path / "held-out", held_out, captions_of(12))),
        *("--fid_network", file, "--device_batch_size", 4),
    )
    features = [np.stack([features_of(one) for one in part]) for part in (held_out, drawn)]
    assert facts.pop("fid") == pytest.approx(distance_by_formula(*features), rel=1e-4)
    assert facts == {
        "num_pictures": 9,
        "num_reference": 12,
        "num_features": 6,
        "fid_note": None,
        "fid_network": {
            "name": "network.pt",
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        },
        "image_size": SIDE_PX,
        "reference": str(tmp_path / "held-out"),
    }


def test_of_a_picture_that_is_no_square_the_centre_is_scored(tmp_path, fid) -> None:
    pictures, captions = make_pictures(4), captions_of(9)
    squares = write_pictures(tmp_path / "squares", pictures, captions)
    wide = [np.pad(one, ((0, 0), (16, 16), (0, 0)), constant_values=200) for one in pictures]
    landscapes = write_pictures(tmp_path / "landscapes", wide, captions)
    for drawn, reference in ((landscapes, squares), (squares, landscapes)):
        facts = score(drawn, "--reference", reference, "--fid_network", fid)
        assert facts["image_size"] == SIDE_PX and abs(facts["fid"]) < 1e-12


@pytest.mark.parametrize("num_pictures", [6, 7])
def test_equal_sets_have_no_distance_and_few_pictures_are_told(
    tmp_path, capsys, fid, num_pictures
) -> None:
    pictures, captions = make_pictures(3, num_pictures), captions_of(num_pictures)
    folder = write_pictures(tmp_path / "same", pictures, captions)
    facts = score(folder, "--reference", folder, "--fid_network", fid)
    assert abs(facts["fid"]) < 1e-12
    has_note = num_pictures <= 6  # a covariance of six features takes seven pictures
    assert (facts["fid_note"] is not None) == has_note
    assert ("comparable only" in capsys.readouterr().out) == has_note
    many = write_pictures(tmp_path / "many", make_pictures(3, 9), captions_of(9))
    for one, other in ((folder, many), (many, folder)):
        facts = score(one, "--reference", other, "--fid_network", fid)
        assert (facts["fid_note"] is not None) == has_note


def test_the_clip_score_is_that_of_transformers(tmp_path, clip) -> None:
    pictures = make_pictures(6)
    captions = [*captions_of(9)[:-1], LONG]
    facts = score(write_pictures(tmp_path / "drawn", pictures, captions), "--clip_network", clip)
    model, processor = CLIPModel.from_pretrained(clip), CLIPProcessor.from_pretrained(clip)
    expected = []
    for picture, caption in zip(pictures, captions, strict=True):
        inputs = processor(
            text=caption,
            images=Image.fromarray(picture),
            return_tensors="pt",
            truncation=True,
            max_length=77,
        )
        with torch.no_grad():
            found = model(**inputs)
        cosine = (found.image_embeds @ found.text_embeds.T).item()
        expected.append(100 * max(cosine, 0.0))
    assert 0 < expected.count(0.0) < 9  # some are cut off at 0
    assert facts["num_pictures"] == 9
    assert facts["clip_score"] == pytest.approx(np.mean(expected), rel=1e-4)
    error = np.std(expected, ddof=1) / math.sqrt(9)
    assert facts["clip_score_error"] == pytest.approx(error, rel=1e-4)
    weights = (clip / "model.safetensors").read_bytes()
    assert facts["clip_network"] == {"name": "clip", "sha256": hashlib.sha256(weights).hexdigest()}
    assert "fid" not in facts


@pytest.mark.slow
def test_a_run_scores_what_its_exported_model_draws(tmp_path, fid, clip) -> None:
    """The look of a run, and export, generate.py and the command, agree."""
    captions = captions_of(5)
    held_out = write_pictures(tmp_path / "held-out", make_pictures(7, 5), captions)
    recipe = (*TINY, "--log_every_batches", 1, "--lr", 0.1, "--use_ema", "--precision", "fp32")
    recipe += ("--encoder_dtype", "fp32", "--ema_half_life_batches", 1, "--ema_interval_batches", 1)
    networks = ("--fid_network", fid, "--clip_network", clip)
    look = ("--score_every_batches", 2, "--validation_remote", held_out, *networks)
    look += ("--num_score_images", 4, "--sample_steps", 2, "--sample_guidance", 3)
    folder = trained("scored", 3, *recipe, *look)
    events = read_events(folder, "scores")
    assert [event["step"] for event in events] == [2, 3]
    found = events[-1]
    assert (found["num_pictures"], found["num_reference"], found["num_bad_samples"]) == (4, 4, 0)
    assert (found["guidance_scale"], found["num_steps"], found["image_size"]) == (3.0, 2, 64)
    assert load_record(folder)["summary"]["other_s"]["scores"] > 0

    Path("prompts.txt").write_text("\n".join(captions[:4]))
    reference = write_pictures(tmp_path / "four", make_pictures(7, 5)[:4], captions[:4])
    drawing = ["--model_name", str(exported(folder)), "--prompt_file", "prompts.txt"]
    drawing += ["--seed", "17", "--num_steps", "2", "--guidance_scale", "3", "--folder", "drawn"]
    assert generate.main(drawing) == 0
    expected = score(Path("drawn"), "--reference", reference, *networks)
    for fact in ("fid", "clip_score", "clip_score_error"):
        assert found[fact] == pytest.approx(expected[fact], rel=1e-3)


@pytest.mark.slow
def test_two_ranks_score_what_one_scores(tmp_path, fid, clip) -> None:
    model = build_smallest(3)
    folder = write_pictures(tmp_path / "held-out", make_pictures(8), captions_of(9))
    (folder / "03.png").write_bytes(b"no picture")
    networks = {"fid": FidNetwork(fid, device="cpu"), "clip": ClipNetwork(clip, device="cpu")}
    tokenize = CaptionTokenizers((Captions(),))

    place = dict(data_format="folder", remote=str(folder), device_batch_size=1, seed=0)
    source = SourceConfig(**place, image_size=SIDE_PX)

    def facts_on(ranks: Ranks, *, on_bad_sample: str = "skip") -> dict:
        return score_model(
            model,
            data.open_batches(dataclasses.replace(source, on_bad_sample=on_bad_sample)),
            networks=networks,
            num_images=8,
            seed=5,
            tokenize=tokenize,
            settings=DrawingSettings(shape=Shape.square(SIDE_PX), num_steps=2, batch_size=3),
            ranks=ranks,
        )

    def run(rank: int) -> None:
        facts = facts_on(Ranks.from_environment())
        (tmp_path / f"{rank}.json").write_text(json.dumps(facts))

    alone = facts_on(ALONE)
    assert (alone["num_pictures"], alone["num_reference"]) == (7, 7)
    assert (alone["num_bad_samples"], alone["sampler"]) == (1, "ddim")
    run_in_group(run, tmp_path)
    for rank in range(2):
        both = json.loads((tmp_path / f"{rank}.json").read_text())
        for fact in ("fid", "clip_score", "clip_score_error"):
            assert both.pop(fact) == pytest.approx(alone[fact], rel=1e-6)
        assert both == {fact: alone[fact] for fact in both} and len(both) == len(alone) - 3
    with pytest.raises(RunError):
        facts_on(ALONE, on_bad_sample="error")


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda file: None, "no such file"),
        (lambda file: file.write_bytes(b"no archive"), "no TorchScript"),
        # A pickle, which is not opened.
        (lambda file: torch.save({"weight": torch.zeros(2)}, file), "no TorchScript"),
        (lambda file: write_fid_network(file, OneByOne()), r"[2, 3, 1, 1]"),
        (lambda file: write_fid_network(file, OfAnotherSize()), "64 px"),
    ],
    ids=["missing", "text", "pickle", "shape", "size"],
)
def test_a_network_that_is_none_is_refused(tmp_path, write, what) -> None:
    file = tmp_path / "network.pt"
    write(file)
    folder = write_pictures(tmp_path / "drawn", make_pictures(1), captions_of(9))
    error = refusal_of("score", folder, "--reference", folder, "--fid_network", file)
    assert (error.flag, error.value) == ("--fid_network", str(file))
    assert what in error.what


# What is said of each damage of a folder with a CLIP.
DAMAGES = {
    "folder": "the folder has no",
    "tokenizer": "the folder has no",
    "cut": "is damaged or cut off",
    "weight": "1 missing (visual_projection.weight)",
    "more": "1 left over (visual_projection.more)",
    "shape": "1 of another shape (visual_projection.weight, [3, 8] in place of [4, 8])",
    "zeros": "visual_projection.weight is a matrix of zeros",
    "short": "fails on pictures",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_clip_that_is_none_is_refused(tmp_path, clip, damage) -> None:
    copy = Path(shutil.copytree(clip, tmp_path / "copy"))
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    if damage == "folder":
        shutil.rmtree(copy)
    elif damage == "tokenizer":
        for name in ("merges.txt", "tokenizer.json"):  # one of them, or both
            (copy / name).unlink(missing_ok=True)
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "weight":
        del tensors["visual_projection.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif damage in ("more", "shape", "zeros"):
        projection = tensors["visual_projection.weight"]
        changed = {"more": projection, "shape": projection[:-1], "zeros": 0 * projection}[damage]
        name = "visual_projection.more" if damage == "more" else "visual_projection.weight"
        save_file(tensors | {name: changed.clone()}, weights, metadata={"format": "pt"})
    else:
        name = "text_model.embeddings.position_embedding.weight"
        tensors[name] = tensors[name][:16].clone()
        save_file(tensors, weights, metadata={"format": "pt"})
        config = json.loads((copy / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = 16
        (copy / "config.json").write_text(json.dumps(config))
    folder = write_pictures(tmp_path / "drawn", make_pictures(1), captions_of(9))
    error = refusal_of("score", folder, "--clip_network", copy)
    assert error.flag == "--clip_network" and str(error.value).startswith(str(copy))
    assert DAMAGES[damage] in error.what


def test_bad_input_of_the_command_is_refused(tmp_path, fid, clip) -> None:
    folder = write_pictures(tmp_path / "drawn", make_pictures(1), captions_of(9))
    one = write_pictures(tmp_path / "one", make_pictures(1, 1), ["one"])
    both = "--reference or --fid_network"
    for argv, flag in (
        ((folder,), "--fid_network or --clip_network"),
        ((folder, "--fid_network", fid), both),
        ((folder, "--clip_network", clip, "--reference", folder), both),
        ((folder, "--fid_network", fid, "--reference", tmp_path / "none"), "--reference"),
        ((one, "--clip_network", clip), "FOLDER"),
        ((tmp_path, "--clip_network", clip), "FOLDER"),
    ):
        assert refusal_of("score", *argv).flag == flag
    (folder / "04.png").write_bytes(b"no picture")
    with pytest.raises(RunError, match=r"04\.png"):
        score_main([str(folder), "--clip_network", str(clip)])


def test_what_a_run_cannot_score_is_refused_before_it_begins(tmp_path, capsys, fid) -> None:
    held_out = write_pictures(tmp_path / "held-out", make_pictures(1), captions_of(9))
    bare = tmp_path / "bare"
    bare.mkdir()
    Image.new("RGB", (8, 8)).save(bare / "a.png")
    single = write_pictures(tmp_path / "single", make_pictures(1, 1), ["one"])
    network, place = ("--fid_network", fid), ("--validation_remote", held_out)
    for argv, flag in (
        (network, "--validation_remote or --score_every_batches"),
        (place, "--fid_network or --clip_network"),
        ((*place, "--fid_network", "none.pt"), "--fid_network"),
        (("--validation_remote", bare, *network), "--validation_remote"),
        (("--validation_remote", single, *network), "--validation_remote"),
        ((*place, *network, "--num_score_images", 1), "--num_score_images"),
        ((*place, *network, *("--latents", "precomputed")), "--latents or --score_every_batches"),
        ((*place, *network, "--train", "vae"), "--score_every_batches or --train"),
    ):
        assert not trained("one", 1, *TINY, "--score_every_batches", 1, *argv, code=2).exists()
        assert printed_refusal(capsys.readouterr().err).flag == flag
