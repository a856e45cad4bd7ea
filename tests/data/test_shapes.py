"""The coloured shapes: what is drawn is judged right, and what is not is not."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from sdbench.cli import main as sdbench
from tests.data.datasets import read_files
from tests.refusals import refusal_of

NUM_SCENES = 8 * 4 * 2 * 5
NUM_HELD_OUT = 64


def write(folder: Path, *argv: str) -> Path:
    assert sdbench(["shapes", "--folder", str(folder), *argv]) == 0
    return folder


def judge(folder: Path) -> dict:
    assert sdbench(["judge", str(folder)]) == 0
    return json.loads((folder / "judge.json").read_text())


def captions(folder: Path) -> list[str]:
    with (folder / "captions.csv").open(newline="") as file:
        return [row["caption"] for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    """Two pictures of each scene."""
    numbers = ("--num_train_images", "512", "--num_validation_images", "128")
    return write(tmp_path_factory.mktemp("data") / "shapes", *numbers)


def test_every_drawn_picture_is_judged_right(shapes) -> None:
    for name, num_pictures in (("train", 512), ("validation", 128)):
        verdict = judge(shapes / name)
        assert verdict["num_pictures"] == num_pictures
        assert verdict["colour_share"] == verdict["shape_share"] == verdict["both_share"] == 1.0


def test_the_prompts_are_of_no_training_picture(shapes) -> None:
    prompts = (shapes / "prompts.txt").read_text().splitlines()
    known = set(captions(shapes / "train"))
    assert len(prompts) == len(set(prompts)) == NUM_HELD_OUT
    assert set(captions(shapes / "validation")) == set(prompts)
    assert len(known) == NUM_SCENES - NUM_HELD_OUT and not known & set(prompts)
    # Colour and shape together, without the article, the size and the place.
    pairs = [tuple(prompt.split()[2:4]) for prompt in prompts]
    assert all(pairs.count(pair) == 2 for pair in pairs) and len(set(pairs)) == 32


def test_a_seed_gives_the_same_pictures(tmp_path) -> None:
    few = ("--num_train_images", "4", "--num_validation_images", "4", "--image_size", "96")

    def content(name: str, *argv: str) -> dict[str, bytes]:
        return read_files(write(tmp_path / name, *few, *argv))

    first = content("first")
    assert content("again") == first
    assert Image.open(tmp_path / "first" / "train" / "00000.png").size == (96, 96)
    assert judge(tmp_path / "first" / "train")["both_share"] == 1.0
    other = content("other", "--seed", "1")
    assert other.keys() == first.keys() and other["prompts.txt"] != first["prompts.txt"]


def as_generated(folder: Path, rows: list[tuple[str, Image.Image]]) -> Path:
    """A folder as generate.py leaves it, with these captions and pictures."""
    (folder / "pictures").mkdir(parents=True)
    with (folder / "prompts.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("uid", "caption", "seed", "file"))
        for number, (caption, picture) in enumerate(rows):
            picture.save(folder / "pictures" / f"{number}.png")
            table.writerow((number, caption, number, f"{number}.png"))
    return folder


def test_wrong_pictures_are_judged_wrong(tmp_path, shapes) -> None:
    known = dict(
        zip(captions(shapes / "train"), sorted((shapes / "train").glob("*.png")), strict=True)
    )
    caption = next(caption for caption in known if "large red square" in caption)
    picture = Image.open(known[caption])
    blank = Image.new("RGB", (64, 64), "white")
    noise = Image.effect_noise((64, 64), 200).convert("RGB")
    dark = Image.new("RGB", (64, 64), "black")
    rows = [
        (caption, picture),
        (caption.replace("red", "blue"), picture),
        (caption.replace("square", "circle"), picture),
        (caption, blank),
        (caption, noise),
        (caption, dark),
    ]
    verdict = judge(as_generated(tmp_path / "drawn", rows))
    right = [(row["colour_is_right"], row["shape_is_right"]) for row in verdict["pictures"]]
    assert right[:4] == [(True, True), (False, True), (True, False), (False, False)]
    assert not right[4][0] and not right[5][0]
    assert verdict["colour_share"] == pytest.approx(2 / 6)


def test_an_object_at_an_edge_is_not_whole(tmp_path) -> None:
    caption = "a small red square in the middle"
    rows, expected = [], []
    for width, height in ((80, 48), (48, 80), (64, 64)):
        right, bottom = width - 1, height - 1
        boxes = {
            (1, 1, 20, 20): True,
            (right - 20, bottom - 20, right - 1, bottom - 1): True,
            (0, 1, 19, 20): False,
            (1, 0, 20, 19): False,
            (right - 19, 1, right, 20): False,
            (1, bottom - 19, 20, bottom): False,
        }
        for box, is_whole in boxes.items():
            picture = Image.new("RGB", (width, height), "white")
            ImageDraw.Draw(picture).rectangle(box, fill=(220, 0, 0))
            rows.append((caption, picture))
            expected.append(is_whole)
    rows.append((caption, Image.new("RGB", (80, 48), "white")))
    expected.append(False)
    verdict = judge(as_generated(tmp_path / "drawn", rows))
    assert [facts["is_whole"] for facts in verdict["pictures"]] == expected
    assert verdict["whole_share"] == pytest.approx(6 / 19)
    assert verdict["both_share"] == pytest.approx(18 / 19)  # cut or not, it is seen


def test_a_long_picture_is_not_taken_for_an_empty_one(tmp_path) -> None:
    picture = Image.new("RGB", (1024, 64), "white")
    ImageDraw.Draw(picture).rectangle((500, 20, 519, 39), fill=(220, 0, 0))
    folder = as_generated(tmp_path / "long", [("a small red square in the middle", picture)])
    assert judge(folder)["both_share"] == 1.0


def test_the_printed_line_names_every_share(tmp_path, capsys) -> None:
    picture = Image.new("RGB", (80, 48), "white")
    ImageDraw.Draw(picture).rectangle((0, 10, 19, 29), fill=(220, 0, 0))
    judge(as_generated(tmp_path / "cut", [("a red circle", picture)]))
    assert capsys.readouterr().out == (
        "1 picture: the colour is right in 100.0%, the shape in 0.0%, both in 0.0%; "
        "the shape lies wholly inside in 0.0%\n"
    )


def test_refusals(tmp_path, shapes) -> None:
    assert refusal_of("shapes", "--folder", shapes).value == str(shapes)
    assert refusal_of("judge", tmp_path).value == str(tmp_path)
    folder = as_generated(tmp_path / "cats", [("a cat", Image.new("RGB", (8, 8)))])
    assert refusal_of("judge", folder).value == "a cat"
