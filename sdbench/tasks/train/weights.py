"""Reads the weights of a training run's checkpoint, for another run or for an export."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sdbench.base.errors import ConfigError
from sdbench.models.architecture import Architecture
from sdbench.models.components import make_part
from sdbench.models.learned_token import is_learned_row
from sdbench.models.lora import is_lora, named_weights
from sdbench.state.checkpoint import (
    AVERAGED_PREFIX,
    COPIES_PREFIX,
    DESCRIPTION_NAME,
    FROZEN_PREFIX,
    TRAINED_PREFIX,
    Checkpoint,
    weights_of,
)
from sdbench.state.checkpoints import find_newest, tell_of_passed_over


def open_checkpoint(run: Path, *, flag: str) -> Checkpoint:
    """Open a checkpoint, or the newest whole one of a run.

    Args:
        run: Folder of a run, or of a checkpoint.
        flag: The flag that named the folder.

    Raises:
        ConfigError: There is no whole checkpoint.
    """
    if (run / DESCRIPTION_NAME).is_file():
        return Checkpoint.open(run)
    checkpoint = find_newest(run)
    if checkpoint is None:
        raise ConfigError(
            "there is no whole checkpoint",
            value=str(run),
            allowed="the folder of a run of train.py that has saved one, or a checkpoint",
            flag=flag,
        )
    tell_of_passed_over(checkpoint)
    return checkpoint


def has_averages(checkpoint: Checkpoint) -> bool:
    """Whether the run kept a moving average of its weights."""
    return any(name.startswith(AVERAGED_PREFIX) for name in checkpoint.tensors())


def parts_in(checkpoint: Checkpoint) -> set[str]:
    """The sub-models whose whole weights a checkpoint has, not LoRA or a token alone."""
    weights = weights_of(checkpoint.tensors(), use_ema=has_averages(checkpoint))
    whole = [name for name in weights if not (is_lora(name) or is_learned_row(name))]
    return {name.partition(".")[0] for name in whole}


def read_weights(checkpoint: Checkpoint, *, use_ema: bool) -> dict[str, Tensor]:
    """Read the trained weights, and the frozen ones that the run kept.

    Args:
        checkpoint: Checkpoint of a run of train.py.
        use_ema: Read the moving averages of the trained weights instead.

    Returns:
        Tensors on the CPU by the name ``<module>.<parameter>``.

    Raises:
        ConfigError: There are no averages, or a file is damaged.
    """
    trained = (AVERAGED_PREFIX,) if use_ema else (TRAINED_PREFIX, COPIES_PREFIX)
    return weights_of(_read(checkpoint, (*trained, FROZEN_PREFIX)), use_ema=use_ema)


def _read(checkpoint: Checkpoint, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors whose names begin with one of the prefixes, on the CPU."""
    tensors = {
        name: torch.empty_like(like, device="cpu")
        for name, like in checkpoint.tensors().items()
        if name.startswith(prefixes)
    }
    checkpoint.load_into(tensors)
    return tensors


def check_weights(
    checkpoint: Checkpoint, architecture: Architecture, *, parts: Sequence[str]
) -> None:
    """Check by names and shapes that a model can begin with the weights of a checkpoint.

    Args:
        checkpoint: Checkpoint of another run.
        architecture: Architecture of the model.
        parts: The sub-models that this run has.

    Raises:
        ConfigError: No name is shared, a shape differs, or the checkpoint has LoRA or a token.
    """
    there = weights_of(checkpoint.tensors(), use_ema=has_averages(checkpoint))
    if any(is_lora(name) or is_learned_row(name) for name in there):
        raise ConfigError(
            "the checkpoint has LoRA or a token without the weights that they belong to",
            value=str(checkpoint.folder),
            allowed="its export, which has both, as --model_name",
            flag="--init_from",
        )
    here = {
        f"{part}.{name}": weight
        for part in parts
        for name, weight in make_part(part, architecture).named_parameters()
    }
    shared = [name for name in here if name in there]
    if not shared:
        raise _refusal("the checkpoint has none of this run's weights", checkpoint)
    for name in shared:
        if there[name].shape != here[name].shape:
            sizes = f"{list(there[name].shape)} there, {list(here[name].shape)} here"
            raise _refusal(f"the checkpoint is of another model: {name} is {sizes}", checkpoint)


def take_weights(model: nn.Module, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], str]:
    """Load the weights of another run that have the same names, averaged ones if it has them.

    Args:
        model: Built, and not sharded yet; changed in place.
        checkpoint: A checkpoint that `check_weights` accepts.

    Returns:
        The weights that are frozen in the model, in the type of the checkpoint, and a sentence that
        says what was loaded.
    """
    use_ema = has_averages(checkpoint)
    weights = read_weights(checkpoint, use_ema=use_ema)
    own = named_weights(model)
    shared = [name for name in own if name in weights]
    put_weights(model, {name: weights[name] for name in shared})
    kept = {name: weights[name] for name in shared if not own[name].requires_grad}
    return kept, (
        f"Beginning with {_count_parts(shared)} of step {checkpoint.step} in {checkpoint.folder}"
        f"{', averaged' if use_ema else ''}."
    )


def take_kept(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Load the frozen weights in a checkpoint of this run; returns them as they were saved."""
    kept = {
        name.removeprefix(FROZEN_PREFIX): weight
        for name, weight in _read(checkpoint, (FROZEN_PREFIX,)).items()
    }
    put_weights(model, kept)
    return kept


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model by the names of `lora.named_weights`."""
    own = named_weights(model)
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)


def _count_parts(names: list[str]) -> str:
    """The modules of some weights, e.g. ``vae (88 tensors)``."""
    counts = collections.Counter(name.split(".")[0] for name in names)
    return " and ".join(f"{part} ({count} tensors)" for part, count in counts.items())


def _refusal(what: str, checkpoint: Checkpoint) -> ConfigError:
    return ConfigError(
        what,
        value=str(checkpoint.folder),
        allowed="a run with a model of the same architecture",
        flag="--init_from",
    )
