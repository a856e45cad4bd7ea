"""Every engine against one hand-written loop: same losses, same weights, same average, same counts.

The parts are a linear model on fixed data, so that nothing but the engine is under test.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sdbench.engines import ENGINES, load_engine
from sdbench.errors import RunError
from sdbench.measure.watch import make_watch
from sdbench.parts import EmaSpec, Parts

BATCH_SIZE, MICROBATCH, NUM_STEPS, NUM_FEATURES = 8, 2, 5, 6
LEARNING_RATE = 0.05
# Half-life of 2 steps: decay 0.5 ** (1/2), so that the average differs from the weights in 5 steps.
HALF_LIFE_BATCHES = 2


class Pairs(Dataset):
    """Fixed inputs and targets."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(BATCH_SIZE * NUM_STEPS, NUM_FEATURES, generator=generator)
        self.targets = torch.randn(BATCH_SIZE * NUM_STEPS, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input": self.inputs[index], "target": self.targets[index]}


class CountingLoader(DataLoader):
    """Counts images as the sources' loader does."""

    num_images_delivered = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.num_images_delivered += len(batch["input"])
            yield batch


class LinearModel(torch.nn.Module):
    """The smallest model with a trained part."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = torch.nn.Linear(NUM_FEATURES, 1)
        with torch.no_grad():
            self.unet.weight.copy_(torch.linspace(-1, 1, NUM_FEATURES)[None])
            self.unet.bias.fill_(0.5)

    def forward(self, batch):
        return self.unet(batch["input"]), batch["target"]


def mean_squared_error(output):
    prediction, target = output
    return (prediction - target).square().mean()


def make_parts(*, ema=None, loss=mean_squared_error) -> Parts:
    model = LinearModel()
    return Parts(
        model=model,
        trained=model.unet,
        loss=loss,
        loader=CountingLoader(Pairs(), batch_size=BATCH_SIZE),
        make_optimizer=lambda placed: torch.optim.SGD(placed.parameters(), lr=LEARNING_RATE),
        schedule=lambda step: 1.0 if step < 3 else 0.5,
        ema=ema,
        images_per_step=BATCH_SIZE,
        num_steps=NUM_STEPS,
        flops_per_image=1.0,
        num_parameters=NUM_FEATURES + 1,
        num_trainable_parameters=NUM_FEATURES + 1,
    )


class Listener:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.indices = []

    def loop_begins(self):
        assert self.indices == []

    def step_ends(self, *, index, phase, loss, num_steps):
        self.indices.append(index)


def watch_with(*observers):
    return make_watch(
        num_warmup_steps=2, num_measured_steps=3, cuda_device=None, observers=observers
    )


def make_config():
    return SimpleNamespace(precision="fp32", device_train_microbatch_size=MICROBATCH, seed=17)


def reference_loop() -> tuple[list[float], list[torch.Tensor]]:
    """Whole-batch gradient descent, written with the derivative of the squared error."""
    pairs = Pairs()
    weight, bias = LinearModel().unet.weight.detach()[0].clone(), torch.tensor(0.5)
    losses, weights = [], [weight.clone()]
    for step in range(NUM_STEPS):
        rows = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        inputs, targets = pairs.inputs[rows], pairs.targets[rows, 0]
        error = inputs @ weight + bias - targets
        losses.append(float((error**2).mean()))
        rate = LEARNING_RATE * (1.0 if step < 3 else 0.5)
        weight = weight - rate * 2 * (error[:, None] * inputs).mean(0)
        bias = bias - rate * 2 * error.mean()
        weights.append(weight.clone())
    return losses, weights


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_weights_and_counts_are_those_of_the_reference(engine):
    listener = Listener()
    parts = make_parts()
    measurements = load_engine(engine)(parts, make_config(), watch_with(listener))
    losses, weights = reference_loop()
    steps = measurements.timings.steps
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(parts.trained.weight.detach()[0], weights[-1])
    assert [step.phase for step in steps] == ["warmup"] * 2 + ["measured"] * 3
    assert listener.indices == list(range(NUM_STEPS))
    assert measurements.num_images == BATCH_SIZE * NUM_STEPS
    assert measurements.peak_memory_gib > 0
    assert sum(step.step_time_s for step in measurements.timings.measured) == pytest.approx(
        measurements.timings.window_s, abs=1e-3
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_is_not_a_number_ends_the_run(engine):
    def loss(output):
        value = mean_squared_error(output)
        return (
            value * float("nan") if bool(output[1][0] == Pairs().targets[2 * BATCH_SIZE]) else value
        )

    with pytest.raises(RunError, match="the loss is nan at step 3") as caught:
        load_engine(engine)(make_parts(loss=loss), make_config(), watch_with())
    assert caught.value.status == "invalid"


def closed_form_average(weights: list[torch.Tensor]) -> torch.Tensor:
    """decay^(n-1) w_1 + (1 - decay) sum_{i=2..n} decay^(n-i) w_i, for weights w_0 .. w_n."""
    decay, num_steps = 0.5 ** (1 / HALF_LIFE_BATCHES), len(weights) - 1
    terms = [(1 - decay) * decay ** (num_steps - i) * weights[i] for i in range(2, len(weights))]
    return decay ** (num_steps - 1) * weights[1] + sum(terms)


@pytest.mark.parametrize("implementation", ["composer", "foreach"])
def test_composer_keeps_the_average_of_the_closed_form(implementation, monkeypatch):
    from sdbench.engines import composer

    kept = {}
    for name in ("EMA", "ForeachEma"):
        original = getattr(composer, name)

        def remember(*args, _original=original, **kwargs):
            kept["ema"] = _original(*args, **kwargs)
            return kept["ema"]

        monkeypatch.setattr(composer, name, remember)
    ema = EmaSpec(implementation, HALF_LIFE_BATCHES)
    composer.fit(make_parts(ema=ema), make_config(), watch_with())
    if implementation == "composer":
        average = kept["ema"].ema_model.named_parameters_dict["model.unet.weight"]
    else:
        average = kept["ema"].average.module.weight
    _, weights = reference_loop()
    torch.testing.assert_close(average.detach()[0], closed_form_average(weights))
    assert not torch.allclose(average.detach()[0], weights[-1], atol=1e-3)
