"""What of a training job is saved and loaded: training goes on as if it had not been stopped."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from sdbench.base.errors import RunError
from sdbench.engines import ENGINES, load_engine
from sdbench.engines.adamw import AdamWOfMasterWeights
from sdbench.engines.device_batches import Batches
from sdbench.engines.job import EmaSpec
from sdbench.measure.phases import VAE_ENCODE
from tests.engines.linear import (
    BATCH_SIZE,
    NUM_STEPS,
    CountingLoader,
    Hooks,
    LinearModel,
    Pairs,
    ResumingHooks,
    losses_of,
    make_config,
    make_parts,
    watch_of,
    watch_with,
)

NUM_BEFORE = 3


class NoisyModel(LinearModel):
    def __init__(self):
        super().__init__()
        self.bfloat16()

    def forward(self, batch):
        noise = torch.randn_like(batch["input"])
        return self.unet((batch["input"] + noise).bfloat16()).float(), batch["target"]


def train(engine, hooks, *, num_steps=NUM_STEPS, num_before=0):
    """Train fp32 copies of bf16 weights, with an average, whose rate halves after three steps."""
    job = make_parts(
        model=NoisyModel(),
        make_optimizer=lambda groups: AdamWOfMasterWeights(groups, weight_decay=0.1),
        ema=EmaSpec("foreach", half_life_batches=2, interval_batches=2),
        num_steps=num_steps,
    )
    num_left = num_steps - num_before
    watch = watch_of(0, num_left, num_steps=num_left)
    return losses_of(load_engine(engine)(job, make_config(master_weights="fp32"), watch, hooks))


@pytest.mark.parametrize("engine", ENGINES)
def test_training_goes_on_as_if_it_had_not_been_stopped(engine):
    uninterrupted, stopped = Hooks(), Hooks()
    losses = train(engine, uninterrupted)
    assert train(engine, stopped, num_steps=NUM_BEFORE) == losses[:NUM_BEFORE]
    resumed = ResumingHooks(*stopped.saved[-1])
    assert train(engine, resumed, num_before=NUM_BEFORE) == losses[NUM_BEFORE:]
    for found, expected in zip(resumed.saved, uninterrupted.saved[NUM_BEFORE:], strict=True):
        assert found[0] == expected[0]
        assert found[1].keys() == expected[1].keys()
        for name, tensor in found[1].items():
            assert torch.equal(tensor, expected[1][name]), name  # bit for bit


@pytest.fixture
def fake_stream(monkeypatch):
    """A side stream where there is no GPU: copies are done at once."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


@pytest.mark.parametrize(
    ("copy_stream", "encode_ahead"), [("compute", False), ("side", False), ("side", True)]
)
def test_the_position_is_that_of_the_batch_in_training(copy_stream, encode_ahead, fake_stream):
    loader, cpu = CountingLoader(Pairs(), batch_size=BATCH_SIZE), torch.device("cpu")
    config, prepared = make_config(copy_stream=copy_stream, encode_ahead=encode_ahead), []

    def prepare(batch):
        assert not torch.is_grad_enabled()
        prepared.append(batch)
        return {"doubled": 2 * batch["input"]}

    batches = Batches(loader, device=cpu, watch=watch_with(), config=config, prepare=prepare)
    num_ahead = {"compute": 0, "side": 1}[copy_stream]
    inputs = [batch["input"] for batch in DataLoader(Pairs(), batch_size=BATCH_SIZE)]
    for number in range(1, NUM_STEPS + 2):  # and into a second epoch
        batch = next(batches)
        assert torch.equal(batch["doubled"], 2 * inputs[(number - 1) % NUM_STEPS])
        assert len(prepared) == number
        assert batches.state_dict() == {"num_images": number * BATCH_SIZE}
        batches.fetch_ahead()
        assert len(prepared) == number + encode_ahead
        assert loader.num_images_delivered == (number + num_ahead) * BATCH_SIZE
        assert batches.state_dict() == {"num_images": number * BATCH_SIZE}


def test_a_fault_of_the_batch_ahead_is_raised_behind_the_step(fake_stream):
    class FailingLoader(CountingLoader):
        def __iter__(self):
            yield from itertools.islice(super().__iter__(), 2)
            self.num_images_delivered += BATCH_SIZE  # the bad batch is behind it
            raise RunError("a bad picture")

    loader, config = FailingLoader(Pairs(), batch_size=BATCH_SIZE), make_config(copy_stream="side")
    device = torch.device("cpu")
    batches = Batches(loader, device=device, watch=watch_with(), config=config)
    next(batches)
    batches.fetch_ahead()
    next(batches)
    batches.fetch_ahead()
    assert batches.state_dict() == {"num_images": 2 * BATCH_SIZE}
    with pytest.raises(RunError, match="a bad picture"):
        next(batches)


def test_each_profiled_step_encodes_one_batch_also_ahead(fake_stream, sleep):
    """The last of them that of the step that shows the kernels of attention."""
    watch = watch_of(1, 1, 2)

    def prepare(batch):
        sleep(3)
        return batch

    job = make_parts(prepare=watch.phases.phase(VAE_ENCODE)(prepare))
    config = make_config(copy_stream="side", encode_ahead=True)
    breakdown = load_engine("torch")(job, config, watch).breakdown
    assert (breakdown["num_steps"], breakdown["seconds"][VAE_ENCODE]) == (2, 3)
