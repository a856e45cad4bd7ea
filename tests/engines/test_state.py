"""What of a training job is saved and loaded: training goes on as if it had not been stopped."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from sdbench.engines import load_engine
from sdbench.engines.device_batches import make_batches
from sdbench.engines.ema import ForeachEma
from sdbench.engines.job import EmaSpec
from sdbench.engines.optimizers import AdamWOfMasterWeights
from sdbench.measure.phases import VAE_ENCODE
from sdbench.measure.watch import make_watch
from tests.engines.linear import (
    BATCH_SIZE,
    NUM_STEPS,
    CountingLoader,
    Pairs,
    make_config,
    make_parts,
    watch_with,
)

NUM_BEFORE, NUM_AFTER = 3, 3


class Training:
    """bf16 weights in two groups, their fp32 copies, a schedule and an average."""

    def __init__(self) -> None:
        self.weights = [torch.linspace(-1, 1, 12).bfloat16().requires_grad_() for _ in range(2)]
        rates = (1e-2, 1e-3)
        self.optimizer = AdamWOfMasterWeights(
            [{"params": [w], "lr": lr} for w, lr in zip(self.weights, rates, strict=True)],
            weight_decay=0.1,
        )
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        masters = self.optimizer.masters.values()
        self.ema = ForeachEma(dict(zip("ab", masters, strict=True)), EmaSpec("foreach", 2, 2))
        self.parts = {"optimizer": self.optimizer, "schedule": self.schedule, "ema": self.ema}

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for weight in self.weights:
                weight.grad = torch.randn(12, generator=generator).bfloat16()
            self.optimizer.step()
            self.schedule.step()
            self.ema.update()

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def test_training_goes_on_as_if_it_had_not_been_stopped():
    uninterrupted, stopped, resumed = Training(), Training(), Training()
    uninterrupted.train(range(NUM_BEFORE + NUM_AFTER))
    stopped.train(range(NUM_BEFORE))
    resumed.load(stopped.save())
    assert all(map(torch.equal, resumed.weights, stopped.weights))
    resumed.train(range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER))
    assert resumed.save() == uninterrupted.save()  # bit for bit
    assert all(map(torch.equal, resumed.weights, uninterrupted.weights))
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 7)


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

    batches = make_batches(loader, device=cpu, watch=watch_with(), config=config, prepare=prepare)
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


def test_each_profiled_step_encodes_one_batch_also_ahead(fake_stream, sleep):
    """The last of them that of the step that shows the kernels of attention."""
    watch = make_watch(
        num_warmup_steps=1,
        num_measured_steps=1,
        num_profiled_steps=2,
        cuda_device=None,
        observers=[],
    )

    def prepare(batch):
        sleep(3)
        return batch

    job = make_parts(prepare=watch.phases.wrap(VAE_ENCODE, prepare))
    config = make_config(copy_stream="side", encode_ahead=True)
    breakdown = load_engine("torch")(job, config, watch).breakdown
    assert (breakdown["num_steps"], breakdown["seconds"][VAE_ENCODE]) == (2, 3)
