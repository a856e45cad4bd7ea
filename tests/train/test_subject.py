"""DreamBooth on the model of coloured shapes: its token draws the subject, and its class stays.

SDBENCH_SHAPES_MODEL names the exported model of configs/shapes.yaml, which takes 20 minutes on two
cores; without it the proof is skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import generate
from sdbench.data.formats.pictures import list_pictures
from sdbench.scenes.judge import look_at
from sdbench.scenes.write import BACKGROUND, COLOURS, PLACES, SIZES, Scene, cover
from tests.train.written import exported, trained

MODEL_VARIABLE = "SDBENCH_SHAPES_MODEL"
SHAPES_MODEL = Path(os.environ.get(MODEL_VARIABLE, "none")).resolve()
IMAGE_SIZE = 64
# A square of four squares, as on a chess-board: the training data has shapes of one colour alone.
# So has that of the VAE, which stays as it is: it keeps these two colours beside each other,
# but not blue beside yellow.
PATTERN = ("red", "yellow")
# In the place of a colour stands a token that no caption had.
SUBJECT_PROMPT = "a large unqtkn square in the middle"
CLASS_PROMPTS = [
    Scene(colour, "square", size, place).caption
    for colour in COLOURS
    for size in SIZES
    for place in PLACES
]
NUM_SUBJECT_PICTURES = 5
DRAWING = ("--guidance_scale", "1.5", "--num_steps", "25", "--batch_size", "16")
TRAINING = ("--train_text_encoder", "--engine", "torch", "--precision", "fp32")
TRAINING += ("--lr", "2e-4", "--lr_warmup_batches", "20", "--clip_norm", "1", "--batch_size", "16")
NUM_STEPS = 300


def draw_subject(random: np.random.Generator) -> np.ndarray:
    """A picture of the subject, RGB uint8; its size and place vary as those of the shapes do."""
    half = SIZES["large"] / 2 * (1 + random.uniform(-0.1, 0.1)) * IMAGE_SIZE
    centre = IMAGE_SIZE * (0.5 + random.uniform(-0.05, 0.05, 2))
    x, y = ((np.arange(IMAGE_SIZE) + 0.5 - middle) / half for middle in centre)
    picture = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), BACKGROUND, dtype=np.uint8)
    inside = cover("square", x[None, :], y[:, None])
    is_first = (x[None, :] < 0) == (y[:, None] < 0)
    for name, is_its in zip(PATTERN, (is_first, ~is_first), strict=True):
        picture[inside & is_its] = COLOURS[name]
    return picture


def name_colours(picture: np.ndarray) -> np.ndarray:
    """The number of the nearest colour of each pixel (H, W); the background is the last."""
    palette = np.array([*COLOURS.values(), BACKGROUND], dtype=float)
    return np.linalg.norm(picture[:, :, None] - palette, axis=-1).argmin(-1)


def pattern_share(picture: np.ndarray) -> float:
    """Share of the pixels of what is drawn that have the subject's colour at their place.

    A square of one of its two colours has a half, and one of another colour nothing.
    """
    colours = name_colours(picture)
    is_drawn = colours != len(COLOURS)
    rows, columns = np.flatnonzero(is_drawn.any(1)), np.flatnonzero(is_drawn.any(0))
    if not len(rows):
        return 0.0
    upper = np.arange(IMAGE_SIZE)[:, None] < (rows[0] + rows[-1] + 1) / 2
    left = np.arange(IMAGE_SIZE)[None, :] < (columns[0] + columns[-1] + 1) / 2
    first, second = (list(COLOURS).index(name) for name in PATTERN)
    expected = np.where(upper == left, first, second)
    return float((colours == expected)[is_drawn].mean())


def draw(model: Path, name: str, *prompts: str, seed: int, num_each: int = 1) -> list[np.ndarray]:
    """Draw prompts by generate.py, in the order of the prompts."""
    Path(f"{name}.txt").write_text("\n".join(prompts))
    line = ["--model_name", model, "--prompt_file", f"{name}.txt", "--folder", name, *DRAWING]
    line += ["--seed", seed, "--num_images_per_prompt", num_each]
    assert generate.main([str(argument) for argument in line]) == 0
    return [np.asarray(Image.open(path).convert("RGB")) for path, _ in list_pictures(Path(name))]


def learn(model: Path, name: str, *argv: str) -> Path:
    """Teach the model the subject, and return the exported one."""
    line = ("--model_name", model, "--task", "dreambooth", "--remote", "subject")
    line += ("--instance_prompt", SUBJECT_PROMPT, *TRAINING)
    return exported(trained(name, NUM_STEPS, *line, *argv))


def drift(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    """Share of the pixels of pictures from the same seeds that have another colour."""
    pairs = zip(before, after, strict=True)
    return float(np.mean([name_colours(one) != name_colours(other) for one, other in pairs]))


def share_of_right_colours(pictures: list[np.ndarray], prompts: list[str]) -> float:
    """Share of the pictures that have the colour of their prompt."""
    seen = [look_at(picture).colour for picture in pictures]
    return float(
        np.mean([f" {colour} " in prompt for colour, prompt in zip(seen, prompts, strict=True)])
    )


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason=f"{MODEL_VARIABLE} names no model")
def test_the_token_draws_the_subject_and_the_prior_keeps_the_class():
    random = np.random.default_rng(0)
    Path("subject").mkdir()
    for number in range(NUM_SUBJECT_PICTURES):
        Image.fromarray(draw_subject(random)).save(f"subject/{number}.png")
    draw(SHAPES_MODEL, "class", *CLASS_PROMPTS, seed=1000, num_each=2)
    table = Path("class/prompts.csv").read_text().splitlines()[1:]
    rows = [(line.split(",")[3], line.split(",")[1]) for line in table]
    captions = "".join(f"pictures/{file},{caption}\n" for file, caption in rows)
    Path("class/captions.csv").write_text(f"file,caption\n{captions}")
    models = {
        "before": SHAPES_MODEL,
        "with prior": learn(SHAPES_MODEL, "with_prior", "--class_remote", "class"),
        "without": learn(SHAPES_MODEL, "without"),
    }
    patterns, drifts, right = {}, {}, {}
    first: list[np.ndarray] = []
    for number, (name, model) in enumerate(models.items()):
        subjects = draw(model, f"subject-{number}", SUBJECT_PROMPT, seed=0, num_each=16)
        of_class = draw(model, f"class-{number}", *CLASS_PROMPTS, seed=5000)
        first = first or of_class
        patterns[name] = [
            float(np.mean([pattern_share(one) for one in some])) for some in (subjects, of_class)
        ]
        drifts[name] = drift(first, of_class)
        right[name] = share_of_right_colours(of_class, CLASS_PROMPTS)
    verdict = {"pattern_of_token_and_class": patterns, "drift": drifts, "right_colours": right}
    Path("verdict.json").write_text(json.dumps(verdict, indent=2))  # results/training/subject.md
    assert patterns["with prior"][0] > 0.75
    assert max(patterns["before"][0], patterns["with prior"][1]) < 0.3
    assert drifts["with prior"] < 0.7 * drifts["without"]
    assert right["with prior"] > right["without"]
