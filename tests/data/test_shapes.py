"""The coloured shapes: what is drawn is judged right, and what is not is not."""

from __future__ import annotations

import collections
import csv
import hashlib
import json
from pathlib import Path

import numpy as np
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


@pytest.fixture(scope="module")
def canvases(tmp_path_factory) -> Path:
    """A picture of each scene on each of three canvases."""
    numbers = ("--num_train_images", "768", "--num_validation_images", "192")
    folder = tmp_path_factory.mktemp("data") / "canvases"
    return write(folder, *numbers, "--canvases", "80x48,48x80,64x64")


def open_all(folder: Path) -> list[tuple[str, Image.Image]]:
    """Captions and pictures of a part of the data set."""
    paths = sorted(folder.glob("*.png"))
    pictures = [Image.open(path).convert("RGB") for path in paths]
    return list(zip(captions(folder), pictures, strict=True))


@pytest.mark.slow
def test_every_drawn_picture_is_judged_right(shapes) -> None:
    for name, num_pictures in (("train", 512), ("validation", 128)):
        verdict = judge(shapes / name)
        assert verdict["num_pictures"] == num_pictures
        assert verdict["colour_share"] == verdict["shape_share"] == verdict["both_share"] == 1.0


def test_squares_have_the_pixels_that_committed_results_rest_on(shapes) -> None:
    digest = hashlib.sha256()
    for name in ("train", "validation"):
        for caption, picture in open_all(shapes / name):
            digest.update(caption.encode() + picture.tobytes())
    assert digest.hexdigest() == (
        "965a8addba9f0abbd1d9ef99d130a279187319597c58d356563f2c073f7a8492"
    )


@pytest.mark.slow
def test_the_note_names_the_flag_that_decides_the_shape(shapes, canvases) -> None:
    notes = [
        json.loads((folder / "train/.made_by.json").read_text()) for folder in (shapes, canvases)
    ]
    assert [note.get("image_size") for note in notes] == [64, None]
    assert "canvases" not in notes[0] and notes[1]["canvases"] == "80x48,48x80,64x64"


def test_no_caption_tells_the_canvas(canvases) -> None:
    for name, num_scenes in (("train", NUM_SCENES - NUM_HELD_OUT), ("validation", NUM_HELD_OUT)):
        seen = collections.Counter(
            (caption, picture.size) for caption, picture in open_all(canvases / name)
        )
        assert len(seen) == 3 * num_scenes and set(seen.values()) == {1}
        assert {size for _, size in seen} == {(80, 48), (48, 80), (64, 64)}


# By the picture's number alone two canvases were bound to the 64 scenes, and five by the number
# moved on by one after each 64.
@pytest.mark.parametrize("num_canvases", [2, 5])
def test_a_scene_is_not_bound_to_a_canvas(tmp_path, num_canvases) -> None:
    sizes = [(16 + number, 16) for number in range(num_canvases)]
    numbers = ("--num_train_images", "1", "--num_validation_images", str(64 * num_canvases))
    text = ",".join(f"{width}x{height}" for width, height in sizes)
    folder = write(tmp_path / "few", *numbers, "--canvases", text)
    pictures = open_all(folder / "validation")
    by_size = collections.Counter(picture.size for _, picture in pictures)
    assert by_size == dict.fromkeys(sizes, 64)
    assert len({(caption, picture.size) for caption, picture in pictures}) == 64 * num_canvases


@pytest.mark.slow
def test_objects_lie_inside_on_every_canvas(canvases) -> None:
    for name in ("train", "validation"):
        for caption, picture in open_all(canvases / name):
            pixels = np.array(picture)
            pixels[1:-1, 1:-1] = 255
            assert pixels.min() == 255, (caption, picture.size)  # the frame is white
        verdict = judge(canvases / name)
        assert verdict["both_share"] == verdict["whole_share"] == 1.0


def test_places_keep_their_distance_from_the_edge_that_they_name(canvases) -> None:
    """Centres are 0.32 of the shorter side from it, within the change of 0.05, else halfway."""
    for caption, picture in open_all(canvases / "train"):
        left, top, right, bottom = Image.eval(picture, lambda value: 255 - value).getbbox()
        shorter = min(picture.size)
        near, far_x, far_y = 0.32 * shorter, *(side - 0.32 * shorter for side in picture.size)
        x, y = picture.width / 2, picture.height / 2
        place = caption.split(maxsplit=4)[4]
        x = {"on the left": near, "on the right": far_x}.get(place, x)
        y = {"at the top": near, "at the bottom": far_y}.get(place, y)
        found = (left + right) / 2, (top + bottom) / 2
        assert found == pytest.approx((x, y), abs=0.05 * shorter + 0.5), caption
        size = {"small": 0.34, "large": 0.52}[caption.split()[1]] * shorter
        assert right - left == pytest.approx(size, abs=0.1 * size + 2), caption
        assert bottom - top == pytest.approx(size, abs=0.1 * size + 2), caption


def test_the_smallest_canvas_holds_every_object(tmp_path) -> None:
    numbers = ("--num_train_images", "512", "--num_validation_images", "1")
    for _, picture in open_all(write(tmp_path / "a", *numbers, "--canvases", "5x6") / "train"):
        pixels = np.array(picture)
        pixels[1:-1, 1:-1] = 255
        assert pixels.min() == 255


def test_a_square_crop_of_a_wide_canvas_cuts_what_is_on_the_left_or_right(
    tmp_path, canvases
) -> None:
    wide = [row for row in open_all(canvases / "validation") if row[1].size == (80, 48)]
    rows = [(caption, picture.crop((16, 0, 64, 48))) for caption, picture in wide]
    pictures = judge(as_generated(tmp_path / "cropped", rows))["pictures"]
    assert len(pictures) == NUM_HELD_OUT
    for facts in pictures:
        assert facts["is_whole"] == (not facts["caption"].endswith((" left", " right"))), facts


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
    both = ("--folder", tmp_path / "new", "--canvases", "80x48", "--image_size", "64")
    assert refusal_of("shapes", *both).flag == "--image_size or --canvases"
    for text in ("80", "80x", "80x48x3", "0x48", "80x48,"):
        assert refusal_of("shapes", *both[:2], "--canvases", text).value == text
    assert refusal_of("shapes", *both[:2], "--canvases", "80x48,80x4").value == "80x4"
    assert not (tmp_path / "new").exists()
    assert refusal_of("judge", tmp_path).value == str(tmp_path)
    folder = as_generated(tmp_path / "cats", [("a cat", Image.new("RGB", (8, 8)))])
    assert refusal_of("judge", folder).value == "a cat"
