"""The validation loss against the forward process by hand; averages come and go."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from sdbench.base.errors import RunError
from sdbench.data.source import SourceConfig
from sdbench.engines.job import TrainedModule
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.sd.network import StableDiffusionNetwork
from sdbench.ranks.distributed import Ranks
from sdbench.settings.setting import BF16
from sdbench.training.validation import (
    averaged_weights,
    held_out_batches,
    open_held_out,
    validation_loss,
)
from tests.engines.linear import make_config
from tests.forked import run_in_group
from tests.reference.families import predict_flux

TINY = resolve_architecture("nano")
NUM_SAMPLES = 5
# bf16 weights, whose copies in fp32 are shared out.
COPIES = "copies"
SHARDINGS = ("zero1", "full", COPIES)


def place(rank: int = 0, world_size: int = 1) -> Ranks:
    return Ranks(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def build(*, encoders: bool = False, precision: str = "fp32") -> DiffusionModel:
    return build_model(TINY, seed=3, encoders=encoders, precision=precision)


def samples() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "latent": torch.randn((NUM_SAMPLES, 4, 8, 8), generator=generator),
        "text_embedding": torch.randn((NUM_SAMPLES, 77, 32), generator=generator),
    }


def batches(*groups: tuple[int | None, ...]):
    """Batches of these samples."""
    for numbers in groups:
        positions = [number or 0 for number in numbers]
        yield numbers, {name: tensor[positions] for name, tensor in samples().items()}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ("middles", [62, 187, 312, 437, 562, 687, 812, 937]),
        ("starts", [0, 125, 250, 375, 500, 625, 750, 875]),
    ],
)
def test_the_loss_is_that_of_fixed_noise_at_fixed_time_steps(times, expected) -> None:
    model, data = build(), samples()
    found = validation_loss(model, batches((0, 1, 2), (3, 4)), ranks=place(), times=times)
    assert found["timesteps"] == expected
    powers = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2, 0)
    means = []
    for part, timestep in enumerate(found["timesteps"]):
        errors = []
        for number in range(NUM_SAMPLES):
            noise = torch.randn((8, 4, 8, 8), generator=torch.Generator().manual_seed(number))[part]
            alpha, sigma = math.sqrt(powers[timestep]), math.sqrt(1 - powers[timestep])
            noised = alpha * data["latent"][number] + sigma * noise
            with torch.no_grad():
                states = data["text_embedding"][number : number + 1]
                predicted = model.unet(noised[None], timestep, states).sample[0]
            errors.append(((predicted - noise) ** 2).mean().item())
        means.append(sum(errors) / NUM_SAMPLES)
    assert found["by_timestep"] == pytest.approx(means, rel=1e-4)
    assert found["loss"] == pytest.approx(sum(means) / 8, rel=1e-4)
    assert found["num_samples"] == NUM_SAMPLES


def test_the_loss_of_mlperf_is_that_of_a_flow_at_eighths() -> None:
    """t = k / 8, k = 0 .. 7; every sample counts the same at each."""
    model = build_model(resolve_architecture("tiny-flux"), seed=3, encoders=False)
    generator = torch.Generator().manual_seed(2)
    shapes = {"latent": (16, 8, 8), "text_embedding": (32, 32), "pooled_embedding": (32,)}
    held_out = {
        name: torch.randn((3, *shape), generator=generator) for name, shape in shapes.items()
    }
    found = validation_loss(model, [((0, 1, 2), held_out)], ranks=place(), times="starts")
    assert found["timesteps"] == [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875]
    errors = []
    for number in range(3):
        noises = torch.randn((8, 16, 8, 8), generator=torch.Generator().manual_seed(number))
        latent, text, pooled = (values[number : number + 1] for values in held_out.values())
        for part in range(8):
            noise, share = noises[part : part + 1], part / 8
            with torch.no_grad():
                predicted = predict_flux(
                    model.transformer,
                    (1 - share) * latent + share * noise,
                    shares=torch.tensor([share]),
                    states=text,
                    pooled=pooled,
                )
            errors.append(((predicted - (noise - latent)) ** 2).mean().item())
    assert found["loss"] == pytest.approx(sum(errors) / len(errors), rel=1e-4)


@pytest.mark.slow
def test_neither_chance_nor_batches_nor_stand_ins_change_it() -> None:
    model = build()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = validation_loss(model, batches((0, 1, 2), (3, 4)), ranks=place())
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and model.unet.training
    torch.manual_seed(2)
    assert validation_loss(model, batches((0, 1, 2), (3, 4)), ranks=place()) == first
    others = batches((4, None), (2, 3), (1, 0, None))
    assert validation_loss(model, others, ranks=place())["by_timestep"] == pytest.approx(
        first["by_timestep"], rel=1e-6
    )


def source(folder, **changes) -> SourceConfig:
    options = dict(data_format="folder", remote=str(folder), image_size=64, device_batch_size=1)
    return SourceConfig(**(options | {"seed": 0} | changes))


def test_ranks_share_the_samples_in_equally_many_batches(picture_folder) -> None:
    augmented = source(picture_folder, crop="random", caption_drop_probability=0.5)
    reader = open_held_out(augmented)
    (whole,) = held_out_batches(reader, num_samples=None, batch_size=16, ranks=place())
    assert list(whole[0]) == list(range(10))
    for world_size, batch_size in ((2, 1), (3, 2), (4, 1)):
        shares = [
            list(
                held_out_batches(
                    reader, num_samples=None, batch_size=batch_size, ranks=place(rank, world_size)
                )
            )
            for rank in range(world_size)
        ]
        assert len({len(share) for share in shares}) == 1
        found = {}
        for numbers, batch in itertools.chain.from_iterable(shares):
            assert len(numbers) == len(batch["image"]) == len(batch["input_ids"])
            found |= zip(numbers, batch["image"], strict=True)
        found.pop(None, None)
        assert sorted(found) == list(range(10))
        assert all(torch.equal(found[number], whole[1]["image"][number]) for number in found)


def test_bad_samples_are_left_out_or_stop_the_run(picture_folder) -> None:
    (picture_folder / "3.png").write_bytes(b"no picture")
    with pytest.raises(RunError):
        strict = open_held_out(source(picture_folder))
        list(held_out_batches(strict, num_samples=5, batch_size=2, ranks=place()))
    lenient = open_held_out(source(picture_folder, on_bad_sample="skip", max_bad_fraction=1.0))
    found = held_out_batches(lenient, num_samples=5, batch_size=2, ranks=place())
    assert [list(numbers) for numbers, _ in found] == [[0, 1], [2, None], [4]]


def test_images_are_encoded_without_chance(picture_folder) -> None:
    Image.effect_noise((64, 64), 90).convert("RGB").save(picture_folder / "0.png")
    model, reader = build(encoders=True), open_held_out(source(picture_folder))

    def measure() -> dict:
        found = held_out_batches(reader, num_samples=3, batch_size=2, ranks=place())
        return validation_loss(model, found, ranks=place())

    first = measure()
    assert first == measure() and first["num_samples"] == 3


def as_job(model: DiffusionModel) -> SimpleNamespace:
    """What is read of a job."""
    weights = {f"unet.{name}": weight for name, weight in model.unet.named_parameters()}
    return SimpleNamespace(
        model=model,
        trained={"unet": TrainedModule(model.unet, lr=1e-4, weight_decay=0.0)},
        sharded_blocks=StableDiffusionNetwork.sharded_blocks,
        casts_inputs=StableDiffusionNetwork.casts_inputs,
        trained_weights=lambda: weights,
    )


def state_of(averages) -> SimpleNamespace:
    """What of a `TrainState` is asked for."""
    return SimpleNamespace(averages=averages, is_whole=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_averages_take_the_place_of_weights_and_go_again(precision) -> None:
    model = build(precision=precision)
    job = as_job(model)
    before = {name: weight.detach().clone() for name, weight in job.trained_weights().items()}
    averages = {name: weight.float() + 0.123 for name, weight in before.items()}
    kept = {name: average.clone() for name, average in averages.items()}
    state = state_of(averages)
    with pytest.raises(ZeroDivisionError), averaged_weights(job, state, ranks=place()):
        for name, weight in job.trained_weights().items():
            assert torch.equal(weight, kept[name].to(weight.dtype))
        assert not state.is_whole
        raise ZeroDivisionError
    assert all(torch.equal(before[name], weight) for name, weight in job.trained_weights().items())
    assert all(torch.equal(kept[name], average) for name, average in averages.items())
    assert state.is_whole


@pytest.mark.parametrize(("error", "is_whole"), [(MemoryError, True), (KeyboardInterrupt, False)])
def test_averages_that_do_not_come_in_leave_the_weights_or_a_state_that_is_not_whole(
    error, is_whole, monkeypatch
) -> None:
    """No memory for a copy, and a signal in the middle of a swap."""
    job = as_job(build())
    before = {name: weight.detach().clone() for name, weight in job.trained_weights().items()}
    state = state_of(averages_of(job))
    turns = itertools.count()
    clone = torch.Tensor.clone

    def clone_a_few(tensor):
        if next(turns) == 3:
            raise error
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", clone_a_few)
    with pytest.raises(error), averaged_weights(job, state, ranks=place()):
        raise AssertionError("all were swapped")
    assert all(torch.equal(before[name], weight) for name, weight in job.trained_weights().items())
    assert state.is_whole == is_whole


def averages_of(job) -> dict[str, torch.Tensor]:
    return {name: 0.9 * weight.detach() for name, weight in job.trained_weights().items()}


def measure(job, averages, *groups, ranks: Ranks) -> list[dict]:
    """The losses before, with and after averages."""
    losses = [validation_loss(job.model, batches(*groups), ranks=ranks)]
    with averaged_weights(job, state_of(averages), ranks=ranks):
        losses.append(validation_loss(job.model, batches(*groups), ranks=ranks))
    return [*losses, validation_loss(job.model, batches(*groups), ranks=ranks)]


def measure_as_rank(rank: int, folder: Path) -> None:
    """Measure under each sharding."""
    from sdbench.engines.sharding import shard_weights

    ranks, found = Ranks.from_environment(), {}
    share = [((0, 1), (2,)), ((3, 4), (None,))][rank]
    for sharding in SHARDINGS:
        model = build(precision="bf16" if sharding == COPIES else "fp32")
        job = as_job(model)
        if sharding == COPIES:
            shard_weights(job, config=make_config(sharding="grad_op", master_weights="fp32"))
        elif sharding == "full":
            shard_weights(job, config=make_config(sharding=sharding))
        job = as_job(model)
        averages = averages_of(job)
        if sharding == "zero1":
            averages = {name: averages[name] for name in list(averages)[rank::2]}
        found[sharding] = measure(job, averages, *share, ranks=ranks)
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_two_ranks_measure_what_one_measures_with_averages_too(tmp_path) -> None:
    run_in_group(lambda rank: measure_as_rank(rank, tmp_path), tmp_path)
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for sharding in SHARDINGS:
        alone = as_job(build(precision="bf16" if sharding == COPIES else "fp32"))
        expected = measure(alone, averages_of(alone), tuple(range(5)), ranks=place())
        assert expected[0]["loss"] != pytest.approx(expected[1]["loss"], rel=BF16)
        # The ranks' batches are smaller than that of one, and in bf16 they round in other ways.
        tolerance = BF16 if sharding == COPIES else 1e-5
        for losses in (of_rank[sharding] for of_rank in of_ranks):
            for found, one in zip(losses, expected, strict=True):
                assert found["num_samples"] == NUM_SAMPLES
                assert found["by_timestep"] == pytest.approx(one["by_timestep"], rel=tolerance)
