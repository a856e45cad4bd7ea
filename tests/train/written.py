"""Runs of train.py in this process, what they have written, and what their models have."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import train
from sdbench.cli import main as sdbench
from sdbench.record.history import read_history
from sdbench.state.checkpoint_files import Checkpoint


def trained(
    name: str, num_steps: int, *argv: object, results: Path | str = "runs", code: int = 0
) -> Path:
    """Train in this process up to a step, and return the folder of the run."""
    place = ("--results_dir", results, "--run_name", name, "--max_duration", f"{num_steps}ba")
    assert train.main([str(word) for word in (*place, *argv)]) == code
    return Path(results, name)


def exported(run: Path, *argv: object) -> Path:
    """Export the model of a run, and return its folder for diffusers."""
    folder = run / "model"
    shutil.rmtree(folder, ignore_errors=True)
    assert sdbench(["export", str(run), *map(str, argv)]) == 0
    return folder


def has_same(part: str, one: Path, other: Path) -> bool:
    """Whether two diffusers folders have the same weights of a part."""
    ours, others = weights_of(one, part), weights_of(other, part)
    assert ours.keys() == others.keys()
    return all(torch.equal(ours[name], others[name]) for name in ours)


def read_steps(run: Path) -> list[dict[str, str]]:
    """The rows of steps.csv."""
    with (run / "steps.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_losses(run: Path) -> list[str]:
    """The loss of each step."""
    return [row["loss"] for row in read_steps(run)]


def read_events(run: Path, kind: str) -> list[dict]:
    """The events of a kind in history.jsonl."""
    return [event for event in read_history(run) if event["event"] == kind]


def saved_steps(run: Path) -> list[int]:
    """The steps that have a checkpoint."""
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step_*"))


def read_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors of a checkpoint but for the random states, on the CPU."""
    tensors = {
        name: torch.empty_like(like, device="cpu")
        for name, like in checkpoint.tensors().items()
        if not name.startswith("random.")
    }
    checkpoint.load_into(tensors)
    return tensors


def weights_of(model: Path, part: str) -> dict[str, Tensor]:
    """The weights of a part of a diffusers folder."""
    (file,) = (model / part).glob("*.safetensors")
    return load_file(file)
