"""What a run of train.py has written, and what its model has."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from sdbench.record.history import read_history
from sdbench.state.checkpoint import Checkpoint


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
