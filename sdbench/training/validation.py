"""The validation loss: held-out samples at fixed time steps and noise, the same at every call.

It is deterministic, so it falls smoothly where a training loss scatters, and the losses by time
step show where a model learns. It is the plain squared error, even if training weights it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.base.stop import STOPS
from sdbench.data.batches.batches import BatchReader
from sdbench.data.order.epochs import Key
from sdbench.data.source import SourceConfig
from sdbench.engines.job import TrainJob
from sdbench.engines.sharding import forget_gathered
from sdbench.models.autoencoder import Autoencoder
from sdbench.models.diffusion import DiffusionModel
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks

if TYPE_CHECKING:
    from sdbench.engines.train_state import TrainState
    from sdbench.measure.watch import Alone

NUM_TIMESTEPS = 8
# Where in each of so many parts of the schedule, by the value of ``--validation_times``.
PLACES = {"middles": 0.5, "starts": 0.0}
# Numbers of held-out samples (None for one that only fills the batch), and their tensors.
NumberedBatch = tuple[Sequence[int | None], Mapping[str, Tensor]]


def open_held_out(source: SourceConfig) -> BatchReader:
    """Open held-out samples, to be read without augmentation; raises as `data.check`."""
    plain = dataclasses.replace(
        source,
        device_batch_size=1,
        crop="center",
        horizontal_flip_probability=0.0,
        caption_drop_probability=0.0,
    )
    return data.open_batches(plain)


def read_once(reader: BatchReader, *, num_samples: int, ranks: Ranks) -> None:
    """Read this rank's share of the first held-out samples, so that a bad one is found early.

    It ends the run with a RunError before a step is trained, or if it may be left out is named.
    """
    for number in range(ranks.rank, min(num_samples, reader.num_samples), ranks.world_size):
        if reader.bucket_of(number) >= 0:
            for sentence in reader.read_good([Key(0, number)]).report.bad:
                print(f"Left out of evaluations: {sentence}", file=sys.stderr)


def held_out_batches(
    reader: BatchReader,
    *,
    num_samples: int | None,
    batch_size: int,
    ranks: Ranks,
    alone: Alone = contextlib.nullcontext,
) -> Iterator[NumberedBatch]:
    """Read this rank's share of the first held-out samples, or of all, in stored order.

    All ranks get the same number of batches. Each is read in a context of `alone`. Raises RunError
    if a sample is bad and may not be left out, or if all are bad.
    """
    num_samples = min(num_samples or reader.num_samples, reader.num_samples)
    has_good = False
    for numbers in reader.split(range(num_samples)):
        for batch in _batches_of_shape(
            reader, numbers, batch_size=batch_size, ranks=ranks, alone=alone
        ):
            has_good = True
            yield batch
    if not has_good:
        with alone():
            last = reader.name(num_samples - 1)
            raise RunError(f"All {num_samples} held-out samples are bad, the last: {last}")


def _batches_of_shape(
    reader: BatchReader,
    samples: Sequence[int],
    *,
    batch_size: int,
    ranks: Ranks,
    alone: Alone,
) -> Iterator[NumberedBatch]:
    num_samples = len(samples)
    num_each = -(-num_samples // ranks.world_size)
    mine = range(ranks.rank, num_each * ranks.world_size, ranks.world_size)
    for first in range(0, num_each, batch_size):
        wanted = [samples[place % num_samples] for place in mine[first : first + batch_size]]
        # Places behind the last sample fill the batch alone.
        is_own = [place < num_samples for place in mine[first : first + batch_size]]
        with alone():
            good = reader.read_good([Key(0, number) for number in wanted])
            if not good.keys:
                # Ranks have equally many batches: a sample that counts elsewhere fills this one.
                fillers = (reader.read_good([Key(0, number)]) for number in samples)
                good = next((filler for filler in fillers if filler.keys), good)
        if not good.keys:
            return  # on all ranks: none of this shape is good
        found = {key.index: position for position, key in enumerate(good.keys)}
        # Another sample fills the place of a bad one, and of one that this rank lacks at the end.
        numbers = [
            number if own and number in found else None
            for number, own in zip(wanted, is_own, strict=True)
        ]
        positions = [found.get(number, 0) for number in wanted]
        yield numbers, {name: tensor[positions] for name, tensor in good.tensors.items()}


def validation_loss(
    model: DiffusionModel,
    batches: Iterable[NumberedBatch],
    *,
    ranks: Ranks,
    times: str = "middles",
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure the mean error of a model's predictions, over all time steps and ``by_timestep``.

    Each sample is predicted at the middles, or the starts, of `NUM_TIMESTEPS` equal parts of the
    schedule, with noise that is seeded by its number. The latents of an image are the means of the
    VAE. The global random state is left alone. Every rank has to call, with its own share of the
    samples. `check` is called before each prediction; it may raise.
    """
    timesteps = model.objective.validation_times(NUM_TIMESTEPS, place=PLACES[times])
    errors_of = functools.partial(_errors, model, timesteps=timesteps, check=check)
    rows = _measure(model, batches, errors_of, ranks=ranks)
    return {
        "loss": rows.mean().item(),
        "by_timestep": rows.mean(0).tolist(),
        "timesteps": timesteps,
        "num_samples": len(rows),
    }


def reconstruction_loss(
    model: Autoencoder, batches: Iterable[NumberedBatch], *, ranks: Ranks
) -> dict[str, Any]:
    """Measure a VAE's mean squared error of pixels in [-1, 1], decoded from means of latents."""
    rows = _measure(
        model, batches, lambda _, batch: model.reconstruction_errors(batch)[:, None], ranks=ranks
    )
    return {"loss": rows.mean().item(), "num_samples": len(rows)}


@torch.no_grad()
def _measure(
    model: nn.Module,
    batches: Iterable[NumberedBatch],
    errors_of: Callable[[Sequence[int | None], dict[str, Tensor]], Tensor],
    *,
    ranks: Ranks,
) -> Tensor:
    """The errors (N, T) of the samples of all ranks in order, in fp64 on the CPU.

    `errors_of` returns the errors (B, T) of a batch on the device of the model.
    """
    device = next(model.parameters()).device
    errors: dict[int, list[float]] = {}
    was_training = model.training
    model.eval()
    try:
        for numbers, batch in batches:
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            of_samples = zip(numbers, errors_of(numbers, on_device).tolist(), strict=True)
            errors |= {number: row for number, row in of_samples if number is not None}
    finally:
        model.train(was_training)
    return torch.tensor(distributed.gather_numbered(errors, ranks), dtype=torch.float64)


def _errors(
    model: DiffusionModel,
    numbers: Sequence[int | None],
    batch: Mapping[str, Tensor],
    *,
    timesteps: Sequence[float],
    check: Callable[[], None],
) -> Tensor:
    """Mean squared errors (B, T)."""
    latents, conditions = model.encode_means(batch)
    noise = torch.stack(
        [
            torch.randn(
                (len(timesteps), *latents.shape[1:]),
                generator=torch.Generator().manual_seed(number or 0),
            )
            for number in numbers
        ]
    ).to(latents.device)
    errors = []
    for position, timestep in enumerate(timesteps):
        check()
        prediction, target = model.predict(
            latents,
            conditions,
            times=torch.full((len(latents),), timestep, device=latents.device),
            noise=noise[:, position],
        )
        errors.append((prediction.float() - target).square().mean((1, 2, 3)))
    return torch.stack(errors, dim=1)


@contextlib.contextmanager
def averaged_weights(job: TrainJob, state: TrainState, *, ranks: Ranks) -> Iterator[None]:
    """Replace the model's weights by their moving averages, if they are kept, during the block.

    Every rank has to call. Weights and averages of one dtype are swapped one tensor at a time,
    without a second copy of the model. No save may read them meanwhile: the state is whole again
    once all weights are back. Averages that this rank does not keep come from the ranks that have
    them (ZeRO-1).
    """
    averages = state.averages
    if averages is None:
        yield
        return
    was_whole, state.is_whole = state.is_whole, False
    forget_gathered(job)
    weights = job.trained_weights()
    owners = _find_owners(weights, averages, ranks)
    kept: dict[str, Tensor] = {}
    swapped: list[str] = []
    try:
        try:
            with torch.no_grad():
                for name, weight in weights.items():
                    average = averages.get(name)
                    if owners[name] is None and average.dtype == weight.dtype:
                        _swap(weight, average)
                        swapped.append(name)
                        continue
                    kept[name] = weight.detach().clone()
                    if average is not None:
                        weight.copy_(average)
                    if owners[name] is not None:
                        torch.distributed.broadcast(weight.detach(), src=owners[name])
        except STOPS:
            was_whole = False  # a value may be lost in the middle of a swap
            raise
        forget_gathered(job)
        yield
    finally:
        with torch.no_grad():
            for name in swapped:
                _swap(weights[name], averages[name])
            for name, value in kept.items():
                weights[name].copy_(value)
        forget_gathered(job)
        state.is_whole = was_whole


def _find_owners(
    weights: Mapping[str, Tensor], averages: Mapping[str, Tensor], ranks: Ranks
) -> dict[str, int | None]:
    """The first rank that has the average of each weight; None where all have it."""
    held = distributed.gather(set(averages), ranks)
    return {
        name: None
        if all(name in names for names in held)
        else next(rank for rank, names in enumerate(held) if name in names)
        for name in weights
    }


def _swap(one: Tensor, other: Tensor) -> None:
    value = one.detach().clone()
    one.copy_(other)
    other.copy_(value)
