"""Reads the weights of a training run's checkpoint, for another run or for an export."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sdbench.base.errors import ConfigError, blamed_on
from sdbench.models.architecture import Architecture
from sdbench.models.components import make_part
from sdbench.models.learned_token import is_learned_row
from sdbench.models.lora import is_lora, named_weights
from sdbench.models.stored import compare_weights
from sdbench.state.checkpoint_files import (
    AVERAGED_PREFIX,
    DESCRIPTION_NAME,
    FROZEN_PREFIX,
    Checkpoint,
    weight_prefixes,
    weights_of,
)
from sdbench.state.checkpoints import FOLDER_NAME, PREFIX, find_newest, tell_of_passed_over


def open_checkpoint(run: Path, *, flag: str, reads_all: bool = False) -> Checkpoint:
    """Open the checkpoint in a folder, or the newest whole one of the run in it.

    `reads_all` is passed to `find_newest`. The error for a damaged checkpoint names an older one.
    """
    if (run / DESCRIPTION_NAME).is_file() or run.resolve().parent.name == FOLDER_NAME:
        try:
            checkpoint = Checkpoint.open(run)
            if reads_all:
                checkpoint.check_share()
        except ConfigError as error:
            allowed = f"a whole checkpoint{_describe_older(run.resolve())}"
            raise ConfigError(error.what, value=error.value, allowed=allowed, flag=flag) from None
        return dataclasses.replace(checkpoint, is_checked=reads_all)
    with blamed_on(flag):
        checkpoint = find_newest(run, reads_all=reads_all)
    if checkpoint is None:
        raise ConfigError(
            "the run has saved no checkpoint" if run.exists() else "no such folder",
            value=str(run),
            allowed="the folder of a run of train.py that has saved one, or a checkpoint",
            flag=flag,
        )
    tell_of_passed_over(checkpoint)
    return checkpoint


def _describe_older(damaged: Path) -> str:
    """The end of a sentence: the newest whole checkpoint that is older than a damaged one."""
    step = damaged.name.removeprefix(PREFIX)
    if damaged.parent.name != FOLDER_NAME or not step.isdecimal():
        return ""
    with contextlib.suppress(ConfigError):  # all are damaged
        older = find_newest(damaged.parent.parent, reads_all=True, before=int(step))
        if older is not None:
            return f": the next older one is {older.folder}"
    return "; the run has no older one that is whole"


def has_averages(checkpoint: Checkpoint) -> bool:
    """Whether the run kept a moving average of its weights."""
    return any(name.startswith(AVERAGED_PREFIX) for name in checkpoint.tensors())


def parts_in(checkpoint: Checkpoint) -> set[str]:
    """The sub-models whose full weights a checkpoint has, not only LoRA or a token."""
    weights = weights_of(checkpoint.tensors(), use_ema=has_averages(checkpoint))
    return {name.partition(".")[0] for name in weights if not _is_beside(name)}


def _is_beside(name: str) -> bool:
    return is_lora(name) or is_learned_row(name)


def read_weights(checkpoint: Checkpoint, *, use_ema: bool) -> dict[str, Tensor]:
    """Read the trained weights or their averages, and the frozen ones that the run kept.

    They are on the CPU, by the name ``<module>.<parameter>``.
    """
    return weights_of(checkpoint.read(weight_prefixes(use_ema=use_ema)), use_ema=use_ema)


def check_weights(
    checkpoint: Checkpoint, architecture: Architecture, *, parts: Sequence[str]
) -> None:
    """Check that a checkpoint has one of the parts, and of each that it has exactly the weights."""
    there = weights_of(checkpoint.tensors(), use_ema=has_averages(checkpoint))
    refusal = {"value": str(checkpoint.folder), "flag": "--init_from"}
    if any(map(_is_beside, there)):
        raise ConfigError(
            "the checkpoint has LoRA or a token without the weights that they belong to",
            allowed="its export, which has both, as --model_name",
            **refusal,
        )
    allowed = "a run with a model of the same architecture"
    shared = [part for part in parts if part in parts_in(checkpoint)]
    if not shared:
        raise ConfigError(
            "the checkpoint has none of this run's weights", allowed=allowed, **refusal
        )
    for part in shared:
        own = make_part(part, architecture).named_parameters()
        compare_weights(
            {f"{part}.{name}": tuple(weight.shape) for name, weight in own},
            {n: tuple(one.shape) for n, one in there.items() if n.startswith(f"{part}.")},
            what=f"the {part} in the checkpoint is not that of this run",
            allowed=allowed,
            **refusal,
        )


def take_weights(model: nn.Module, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], str]:
    """Load the weights of another run that have the same names, averaged ones if it has them.

    The model is not sharded yet, and `check_weights` has accepted the checkpoint. Returns the
    weights that are frozen in the model, in the dtype of the checkpoint, and a sentence about all.
    """
    use_ema = has_averages(checkpoint)
    weights = read_weights(checkpoint, use_ema=use_ema)
    own = named_weights(model)
    shared = [name for name in own if name in weights]
    put_weights(model, {name: weights[name] for name in shared})
    kept = {name: weights[name] for name in shared if not own[name].requires_grad}
    counts = collections.Counter(name.split(".")[0] for name in shared)
    parts = " and ".join(f"{part} ({count} tensors)" for part, count in counts.items())
    return kept, (
        f"Beginning with {parts} of step {checkpoint.step} in {checkpoint.folder}"
        f"{', averaged' if use_ema else ''}."
    )


def take_kept(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Load the frozen weights in a checkpoint of this run; returns them as they were saved."""
    saved = checkpoint.read((FROZEN_PREFIX,))
    kept = {name.removeprefix(FROZEN_PREFIX): weight for name, weight in saved.items()}
    put_weights(model, kept)
    return kept


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model by the names of `lora.named_weights`."""
    own = named_weights(model)
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
