"""generate.py through its front door: pictures, tables, ranks, resumes and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

import generate
from sdbench.base.conditions import Captions
from sdbench.base.shape import Shape
from sdbench.data.batches.tokenizer import CaptionTokenizer, CaptionTokenizers
from sdbench.drawing.generate import GenerateFlags, read_prompts
from sdbench.models.drawing import DrawingSettings, draw, make_sampler
from tests.forked import exit_codes, forked_ranks
from tests.refusals import refused
from tests.train.smallest_model import build_smallest

OPTIONS = ("--model_name", "nano", "--num_steps", "2", "--device_batch_size", "2", "--seed", "40")
PROMPTS = "a red circle | a blue square|a green star"
PROMPT_FLAG = "--prompts or --prompt_file"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A run of another test may have left several, with which sums have no order of their own."""
    torch.set_num_threads(1)


def run(*argv: object) -> dict:
    """Draw in this process: to what generate.json tells."""
    arguments = [str(argument) for argument in argv]
    assert generate.main([*OPTIONS, *arguments]) == 0
    return json.loads(Path(arguments[arguments.index("--folder") + 1], "generate.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "pictures").iterdir()}


def test_each_prompt_is_drawn_with_its_seed(tmp_path, capsys):
    record = run("--prompts", PROMPTS, "--folder", "out")
    assert (record["kind"], record["status"]) == ("generate", "ok")
    assert record["config"]["scheduler"] == record["job"]["scheduler"] == "ddim"
    assert record["job"]["model_name"] == "nano"
    assert (record["summary"]["num_pictures"], record["summary"]["num_drawn"]) == (3, 3)
    with Path("out", "prompts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"uid": "00000", "caption": "a red circle", "seed": "40", "file": "00000.png"},
        {"uid": "00001", "caption": "a blue square", "seed": "41", "file": "00001.png"},
        {"uid": "00002", "caption": "a green star", "seed": "42", "file": "00002.png"},
    ]
    model = build_smallest(40)
    expected = draw(
        model,
        ["a green star"],
        [42],
        tokenize=CaptionTokenizers((Captions(),)),
        settings=DrawingSettings(shape=Shape.square(64), num_steps=2),
    )
    (picture,) = expected
    with Image.open("out/pictures/00002.png") as drawn:
        difference = np.abs(np.asarray(drawn, dtype=int) - np.asarray(picture, dtype=int))
    # In a process that has trained before, the last bits of the two may differ: a step of 255 in a
    # few pixels. Another caption or seed changes four pixels of five, by 30 steps and more.
    assert difference.max() <= 1 and (difference > 0).mean() < 0.001
    with Image.open("out/grid.png") as grid:
        assert grid.size == (4 + 2 * 116, 4 + 2 * 84)
    output = capsys.readouterr().out
    assert "random weights" in output and "Drawing 3 pictures" in output
    assert "python -m sdbench score out --clip_network FOLDER\n" in output


@pytest.mark.slow
def test_a_negative_prompt_takes_the_place_of_the_empty_caption_in_guidance(tmp_path):
    argv = ("--prompts", "a red circle", "--guidance_scale", "3", "--folder")
    run("--negative_prompt", "blurred", *argv, "with")
    model = build_smallest(40)
    tokenize = CaptionTokenizer(pad_token_id=0)
    pipeline = StableDiffusionPipeline(
        unet=model.unet,
        vae=model.vae,
        scheduler=make_sampler("ddim", model.objective.config),
        **dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor")),
        requires_safety_checker=False,
    )
    with torch.no_grad():
        (states, negative) = (
            model.text_encoder(torch.from_numpy(tokenize([text])))[0]
            for text in ("a red circle", "blurred")
        )
        picture = pipeline(
            prompt_embeds=states,
            negative_prompt_embeds=negative,
            guidance_scale=3.0,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(40),
            height=64,
            width=64,
        ).images[0]
    with Image.open("with/pictures/00000.png") as drawn:
        difference = np.abs(np.asarray(drawn, dtype=int) - np.asarray(picture, dtype=int))
    assert difference.max() <= 1 and (difference > 0).mean() < 0.001
    # Without it, and with another one, the folder is of another job.
    for other in ((), ("--negative_prompt", "sharp")):
        assert generate.main([*OPTIONS, *other, *argv, "with"]) == 2
    run(*argv, "without")
    assert contents(Path("without")) != contents(Path("with"))


@pytest.mark.slow
def test_a_picture_has_its_width_and_height(tmp_path, capsys):
    record = run("--prompts", "a cat", "--width", 128, "--folder", "out")
    assert "Drawing 1 picture of 128x64 px by nano into out" in capsys.readouterr().out
    assert (record["job"]["width"], record["job"]["height"]) == (128, 64)
    (expected,) = draw(
        build_smallest(40),
        ["a cat"],
        [40],
        tokenize=CaptionTokenizers((Captions(),)),
        settings=DrawingSettings(shape=Shape(128, 64), num_steps=2),
    )
    with Image.open("out/pictures/00000.png") as drawn:
        assert drawn.size == (128, 64)
        difference = np.abs(np.asarray(drawn, dtype=int) - np.asarray(expected, dtype=int))
    assert difference.max() <= 1 and (difference > 0).mean() < 0.001
    same, other = ("--image_size", "64", "--width", "128"), ("--width", "128", "--height", "128")
    argv = ("--prompts", "a cat", "--folder", "out")
    assert run(*argv, *same)["summary"]["num_drawn"] == 0
    assert generate.main([*OPTIONS, *argv, *other]) == 2


def test_a_table_names_its_pictures(tmp_path):
    Path("captions.csv").write_text('\ufeffuid,caption,other\nb-1,"one, two",x\n7,,y\n')
    record = run(
        *("--prompt_file", "captions.csv", "--folder", "out", "--num_images_per_prompt", 2)
    )
    assert record["summary"]["num_pictures"] == 4
    assert sorted(contents(Path("out"))) == ["7_0.png", "7_1.png", "b-1_0.png", "b-1_1.png"]
    with Path("out", "prompts.csv").open() as file:
        rows = {row["file"]: (row["caption"], row["seed"]) for row in csv.DictReader(file)}
    assert rows["b-1_1.png"] == ("one, two", "41") and rows["7_0.png"] == ("", "42")


@pytest.mark.slow
def test_what_is_there_is_not_drawn_again_and_not_taken_for_that_of_another_job(tmp_path):
    folder = Path("out")
    run("--prompts", PROMPTS, "--folder", folder)
    before = contents(folder)
    first = (folder / "pictures" / "00000.png").stat().st_mtime_ns
    (folder / "pictures" / "00002.png").unlink()
    (folder / ".failed").touch()
    record = run("--prompts", PROMPTS, "--folder", folder)
    assert record["summary"]["num_drawn"] == 1
    after = contents(folder)
    assert {name: after[name] for name in before} == before
    assert (folder / "pictures" / "00000.png").stat().st_mtime_ns == first
    assert run("--prompts", PROMPTS, "--folder", folder)["summary"]["num_drawn"] == 0

    table = (folder / "prompts.csv").read_bytes()
    for change in (("--seed", "41"), ("--num_steps", "3"), ("--prompts", "a cat")):
        assert generate.main([*OPTIONS, "--prompts", PROMPTS, "--folder", "out", *change]) == 2
        assert contents(folder) == after and (folder / "prompts.csv").read_bytes() == table
    for path in (folder / "pictures").iterdir():
        path.unlink()
    assert run("--prompts", "a cat", "--folder", folder)["summary"]["num_drawn"] == 1


@pytest.mark.slow
def test_two_ranks_draw_what_one_draws(tmp_path):
    run("--prompts", PROMPTS, "--folder", "alone", "--num_images_per_prompt", 3)
    argv = [*OPTIONS, "--prompts", PROMPTS, "--folder", "both", "--num_images_per_prompt", "3"]
    with forked_ranks(lambda: generate.main(argv), tmp_path) as ranks:
        assert exit_codes(ranks) == [0, 0]
    assert contents(Path("both")) == contents(Path("alone"))
    record = json.loads(Path("both/generate.json").read_text())
    assert record["summary"]["num_drawn"] == 9


@pytest.mark.parametrize(
    "change",
    [
        ("--image_size", "100"),
        ("--width", "100"),
        ("--width", "64", "--height", "-64"),
        ("--width", "64", "--height", "128", "--image_size", "64"),
        ("--scheduler", "heun"),
        ("--scheduler", "flow_euler"),
        ("--lora", "nothing.safetensors"),
        ("--lora", "nothing.safetensors:nan"),
        ("--dtype", "fp16"),
        ("--negative_prompt", "a dog", "--guidance_scale", "1"),
        ("--negative_prompt", "a dog", "--model_name", "tiny-flux"),
        ("--model_name", "tinny"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_there_is_a_folder(tmp_path, change):
    assert generate.main([*OPTIONS, "--prompts", "a cat", "--folder", "out", *change]) == 2
    assert not Path("out").exists()


def test_the_name_of_diffusers_for_the_number_of_steps_is_known(capsys):
    flags = ("--prompts", "a cat", "--folder", "out", "--num_inference_steps", "3")
    assert generate.main([*OPTIONS, *flags]) == 2
    assert "of diffusers' scripts is --num_steps here: got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "content", "value"),
    [
        ({}, None, None),
        ({"prompts": "a", "prompt_file": "p.txt"}, "a", "p.txt"),
        ({"prompts": " | "}, None, " | "),
        ({"prompts": "p.txt"}, None, "p.txt"),
        ({"prompt_file": "p.txt"}, None, "p.txt"),
        ({"prompt_file": "p.txt"}, "\n \n", "p.txt"),
        ({"prompt_file": "p.csv"}, "", "p.csv"),
        ({"prompt_file": "p.csv"}, "uid,text\n1,a cat\n", "p.csv"),
        ({"prompt_file": "p.csv"}, "uid,caption\n", "p.csv"),
        ({"prompt_file": "p.csv"}, "uid,caption\n1,a cat\n1,a dog\n", "1"),
        ({"prompt_file": "p.csv"}, "uid,caption\n../up,a cat\n", "../up"),
        ({"prompt_file": "p.csv"}, "uid,caption\n1.5,a cat\n", "1.5"),
        ({"prompt_file": "p.csv"}, "uid,caption\n,a cat\n", ""),
        # More than the module csv takes.
        pytest.param(
            {"prompt_file": "p.csv"}, f"uid,caption\n1,{131_073 * 'a'}\n", "p.csv", id="long"
        ),
    ],
    ids=str,
)
def test_bad_prompts_are_refused(tmp_path, flags, content, value):
    if content is not None:
        Path(flags["prompt_file"]).write_text(content)
    with refused(PROMPT_FLAG, value=value):
        read_prompts(GenerateFlags(model_name="nano", folder="out", **flags))


@pytest.mark.parametrize(
    ("prompts", "read"),
    [
        ("a red circle", [("00000", "a red circle")]),
        (PROMPTS, [(f"0000{n}", text.strip()) for n, text in enumerate(PROMPTS.split("|"))]),
        ("p.txt", [("00000", "a cat"), ("00001", "a | dog")]),
        ("P.CSV", [("b", "a cat")]),
        ("no-ending", [("00000", "a cow")]),
    ],
)
def test_prompts_are_texts_or_a_file(tmp_path, prompts, read):
    Path("p.txt").write_text("a cat\n\na | dog\n")
    Path("P.CSV").write_text("uid,caption\nb,a cat\n")
    Path("no-ending").write_text("a cow")
    assert read_prompts(GenerateFlags(model_name="nano", folder="out", prompts=prompts)) == read
