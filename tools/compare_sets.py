"""Compares what two sets of packages make of each other's models; run by hand, some minutes.

Each set trains a miniature of each family for two steps, in each way, and exports it. Then both
sets read all exports and draw with them, and resume copies of all runs:

    python tools/compare_sets.py .venv/bin/python other/bin/python --folder build/sets

The table has a row for each export. It fails, with exit code 1, if the sets read other weights
from a folder, if an export has other names of weights than that of the other set, if pictures
differ by more than 1 of 255, or if a loss after a resume differs by more than 1e-4 of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# A script's own folder is on the path, the repository is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sdbench.report.tables import make_table, to_markdown
from tools.comparison import ROOT, write_json

MAX_LOSS_DIFFERENCE, MAX_PIXEL_DIFFERENCE = 1e-4, 1
FAMILIES = ("tiny", "tiny-sdxl", "tiny-sd3", "tiny-flux")
COMMON = ("--engine", "torch", "--precision", "fp32", "--encoder_dtype", "fp32")
COMMON += ("--num_workers", "0", "--num_threads", "1", "--batch_size", "2", "--lr", "0.01")
COMMON += ("--log_every_batches", "1", "--resume", "auto")
SYNTHETIC = ("--use_synth_data", "--image_size", "64")
EMA, LORA = ("--use_ema", "--ema_half_life_batches", "2"), ("--lora_rank", "2")
TEXT = ("--train_text_encoder",)
TOKEN = ("--task", "dreambooth", "--instance_prompt", "my <dog>", "--learned_token", "<dog>")
TOKEN += ("--initial_token", "dog")
# How a model is trained, for all families and for those that train their text encoder.
WAYS = {"all weights": SYNTHETIC, "EMA": (*SYNTHETIC, *EMA), "LoRA": (*SYNTHETIC, *LORA)}
WAYS_OF_TEXT = {
    "text encoder": (*SYNTHETIC, *TEXT),
    "LoRA of text encoder": (*SYNTHETIC, *LORA, *TEXT),
    "learned token": TOKEN,
}
PROMPTS = {"learned token": "a <dog>"}
# The pictures of random weights are grey without it.
CONTRAST = 20


def cases() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Family, way of training and flags of each export."""
    for family in FAMILIES:
        ways = WAYS | (WAYS_OF_TEXT if family == "tiny" else {})
        yield from ((family, way, flags) for way, flags in ways.items())


def name_of(family: str, way: str) -> str:
    """The name of a run."""
    return f"{family}-{way}".replace(" ", "-")


def train(folder: Path, family: str, way: str, flags: tuple[str, ...], *, num_steps: int) -> None:
    """Train up to a step in this process, in the folder `runs` of a folder."""
    import train

    place = ("--results_dir", str(folder / "runs"), "--run_name", name_of(family, way))
    argv = [*place, "--model_name", family, "--max_duration", f"{num_steps}ba", *COMMON, *flags]
    if way == "learned token":
        argv += ["--remote", str(folder.parent / "subject")]
    if train.main(argv) != 0:
        sys.exit(f"this run failed: {' '.join(argv)}")


def make(folder: Path) -> None:
    """Train and export all cases with the packages of this Python."""
    from safetensors.torch import load_file, save_file

    from sdbench.cli import main as sdbench

    for family, way, flags in cases():
        train(folder, family, way, flags, num_steps=2)
        run, model = folder / "runs" / name_of(family, way), folder / name_of(family, way)
        export = ["export", str(run), "--folder"]
        if sdbench([*export, str(model)]) != 0:
            sys.exit(f"the export of {run} failed")
        if "--lora_rank" in flags and sdbench(
            [*export, f"{model}-alone", "--lora_format", "diffusers"]
        ):
            sys.exit(f"the export of the LoRA of {run} failed")
        (file,) = (model / "vae").glob("*.safetensors")
        weights = load_file(file)
        weights["decoder.conv_out.weight"] *= CONTRAST
        save_file(weights, file, metadata={"format": "pt"})


def read(folder: Path, side: Path) -> None:
    """Read all that the side `folder` has made, and write to `side` what this Python makes of it.

    Weights are the checksums of the model that is built; a picture is drawn with each export, and
    one with each LoRA file on the export without it; runs go on for a step in copies.
    """
    import generate
    from sdbench.models.architecture import resolve_architecture
    from sdbench.models.diffusion import build_model
    from sdbench.models.lora_files import fuse_lora_files
    from sdbench.report.runs import read_steps
    from sdbench.settings.lora import LoraFile

    found: dict[str, Any] = {}
    for family, way, flags in cases():
        name, plain = name_of(family, way), name_of(family, "all weights")
        sources = {name: (folder / name, None)}
        if "--lora_rank" in flags:
            (lora,) = (folder / f"{name}-alone").glob("*.safetensors")
            sources[f"{name}-alone"] = (folder / plain, lora)
        facts: dict[str, Any] = {"sums": {}}
        for source, (model, lora) in sources.items():
            built = build_model(resolve_architecture(str(model)), seed=1)
            if lora is not None:
                fuse_lora_files(built, [LoraFile(str(lora))])
            for weight, value in built.state_dict().items():
                content = value.detach().contiguous().numpy().tobytes()
                facts["sums"][f"{source}/{weight}"] = hashlib.sha256(content).hexdigest()
            argv = ["--model_name", str(model), "--prompts", PROMPTS.get(way, "a cat")]
            argv += ["--num_steps", "4", "--seed", "17", "--dtype", "fp32"]
            argv += ["--folder", str(side / "drawn" / source)]
            if generate.main(argv + ([] if lora is None else ["--lora", str(lora)])) != 0:
                sys.exit(f"{source} in {folder} cannot be drawn with")
        shutil.copytree(folder / "runs" / name, side / "runs" / name)
        train(side, family, way, flags, num_steps=3)
        steps = read_steps(side / "runs" / name / "steps.csv", columns=["loss"], flag="", least=1)
        found[name] = facts | {"loss": steps[-1]["loss"]}
    write_json(side / "found.json", found)


def names_in(model: Path) -> dict[str, list[str]]:
    """The names of the weights in the files of an export, by file."""
    from safetensors import safe_open

    names = {}
    for file in sorted(model.glob("**/*.safetensors")):
        with safe_open(file, "numpy") as opened:
            names[str(file.relative_to(model))] = sorted(opened.keys())
    return names


def pixel_difference(one: Path, other: Path, name: str) -> int:
    """The largest difference of the pictures of two sides, of 255."""
    differences = []
    for source in (name, f"{name}-alone"):
        for picture in one.glob(f"{source}/pictures/*.png"):
            pair = [picture, other / picture.relative_to(one)]
            first, second = (np.asarray(Image.open(file)).astype(int) for file in pair)
            differences.append(int(abs(first - second).max()))
    return max(differences)


def compare(folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """A row for each export of each set, and whether all is equal or as near as it has to be."""
    rows, is_good = [], True
    for writer in (0, 1):
        sides = [folder / f"{writer}-read-by-{reader}" for reader in (0, 1)]
        found = [json.loads((side / "found.json").read_text()) for side in sides]
        for family, way, _ in cases():
            name = name_of(family, way)
            one, other = (of_side[name] for of_side in found)
            has_names = names_in(folder / "0" / name) == names_in(folder / "1" / name)
            num_other = sum(one["sums"][key] != other["sums"].get(key) for key in one["sums"])
            is_equal = num_other == 0 and one["sums"].keys() == other["sums"].keys()
            pixels = pixel_difference(sides[0] / "drawn", sides[1] / "drawn", name)
            of_loss = abs(one["loss"] - other["loss"]) / abs(one["loss"])
            is_good &= has_names and is_equal and pixels <= MAX_PIXEL_DIFFERENCE
            is_good &= of_loss <= MAX_LOSS_DIFFERENCE
            rows.append(
                {
                    "written by": f"set {writer + 1}",
                    "model": family,
                    "trained": way,
                    "names": "equal" if has_names else "differ",
                    "weights": f"{len(one['sums'])} equal" if is_equal else f"{num_other} differ",
                    "pictures, of 255": pixels,
                    "loss after a resume": f"{of_loss:.1e}",
                }
            )
    return rows, is_good


def main() -> int:
    """Run both sets on all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="+", help="those of the two sets")
    parser.add_argument("--folder", type=Path, required=True, help="a new folder, for all files")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.make:
        make(flags.make)
        return 0
    if flags.read:
        read(*flags.read)
        return 0
    if len(flags.pythons) != 2:
        parser.error("two sets are compared")
    folder = flags.folder.resolve()
    (folder / "subject").mkdir(parents=True)
    for number in range(2):
        picture = Image.new("RGB", (64, 64), (40 * number, 100, 200))
        picture.save(folder / "subject" / f"{number}.png")

    def work(side: int, *arguments: str | Path) -> None:
        script = [flags.pythons[side], __file__, "-", "--folder", folder, *arguments]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run(
            [*map(str, script)], cwd=ROOT, env=environment, check=True, stdout=sys.stderr
        )

    for side in (0, 1):
        work(side, "--make", folder / str(side))
    for writer in (0, 1):
        for reader in (0, 1):
            work(reader, "--read", folder / str(writer), folder / f"{writer}-read-by-{reader}")
    rows, is_good = compare(folder)
    print(to_markdown(make_table(rows)))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
