"""The smallest training job, with a training loop written out by hand to compare engines with.

A linear model on fixed data, so that nothing but the engine is under test.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from sdbench.engines.job import TrainedModule, TrainJob
from sdbench.measure.watch import make_watch
from sdbench.ranks.distributed import Ranks, gather

BATCH_SIZE, MICROBATCH, NUM_STEPS, NUM_FEATURES = 8, 2, 5, 6
LEARNING_RATE = 0.05
# The rate halves behind the third step.
SCHEDULE = (1.0, 1.0, 1.0, 0.5, 0.5)


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
    """Counts images and resumes as the sources' loader does, and draws nothing of torch's."""

    num_images_delivered = num_resumed = 0

    def __init__(self, dataset, **options):
        super().__init__(dataset, generator=torch.Generator(), **options)

    def __iter__(self):
        num_to_skip, self.num_resumed = self.num_resumed, 0
        for batch in itertools.islice(super().__iter__(), num_to_skip // self.batch_size, None):
            self.num_images_delivered += len(batch["input"])
            yield batch

    def state_dict(self):
        """Where it is."""
        return {"num_images": self.num_images_delivered}

    def load_state_dict(self, state):
        """Go on there."""
        self.num_images_delivered = self.num_resumed = state["num_images"]


class LinearModel(torch.nn.Module):
    """The smallest model with a trained part."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = torch.nn.Linear(NUM_FEATURES, 1)
        with torch.no_grad():
            self.unet.weight.copy_(torch.linspace(-1, 1, NUM_FEATURES)[None])
            self.unet.bias.fill_(0.5)

    def forward(self, batch):
        """The prediction and what it should have been."""
        return self.unet(batch["input"]), batch["target"]


def mean_squared_error(output):
    """The loss."""
    prediction, target = output
    return (prediction - target).square().mean()


def make_parts(*, num_ranks=1, rank=0, **changes) -> TrainJob:
    """A job whose global batch is the same on any number of ranks; `changes` are fields of it."""
    model = changes.pop("model", None) or LinearModel()
    sampler = DistributedSampler(Pairs(), num_replicas=num_ranks, rank=rank, shuffle=False)
    device_batch = BATCH_SIZE // num_ranks
    fields = {
        "model": model,
        "trained": {"unet": TrainedModule(model.unet, lr=LEARNING_RATE, weight_decay=0.0)},
        "loss": mean_squared_error,
        "loader": CountingLoader(Pairs(), batch_size=device_batch, sampler=sampler),
        "make_optimizer": torch.optim.SGD,
        "schedule": lambda step: SCHEDULE[min(step, NUM_STEPS - 1)],
        "ema": None,
        "images_per_step": BATCH_SIZE,
        "num_steps": NUM_STEPS,
        "flops_per_image": 1.0,
        "num_parameters": NUM_FEATURES + 1,
        "num_trainable_parameters": NUM_FEATURES + 1,
    }
    return TrainJob(**fields | changes)


def make_config(**changes) -> SimpleNamespace:
    """The settings that an engine reads, the plainest of each."""
    plain = {
        "buckets": None,
        "precision": "fp32",
        "device_train_microbatch_size": MICROBATCH,
        "seed": 17,
        "optimizer_params": "trainable",
        "copy_stream": "compute",
        "encode_ahead": False,
        "cuda_graph": False,
        "sharding": "none",
        "gather_ahead": False,
        "grad_sync": "last",
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "ddp_bucket_mib": 25,
        "grad_compression": "none",
        "master_weights": "none",
        "optimizer": "adamw",
        "update_in_backward": False,
    }
    return SimpleNamespace(**plain | changes)


def watch_of(warmup, measured, profiled=0, *, observers=(), **of_watch):
    """A watch on a CPU of so many steps."""
    timing = {
        "num_warmup_steps": warmup,
        "num_measured_steps": measured,
        "num_profiled_steps": profiled,
    }
    return make_watch(cuda_device=None, observers=observers, timing=timing, **of_watch)


def watch_with(*observers):
    """Two steps of warm-up, three measured."""
    return watch_of(2, 3, observers=observers)


class Hooks:
    """Keep the state of a run and what would be saved of it; may skip the update of a step."""

    def __init__(self, *, skipped_step=None):
        self.skipped_step = skipped_step
        self.saved = []  # facts and tensors after each step

    def begins(self, state):
        """Keep the state."""
        self.state = state

    def gradients_ready(self, loss, norm):
        """Skip the update."""
        if self.state.num_steps + 1 == self.skipped_step:
            self.state.skip_update()

    def step_ended(self, state):
        """Keep copies."""
        tensors = {name: whole(tensor) for name, tensor in state.tensors().items()}
        self.saved.append((state.facts(), tensors))


class ResumingHooks(Hooks):
    """Begin with what others have saved."""

    def __init__(self, facts, tensors):
        super().__init__()
        self._facts, self._tensors = facts, tensors

    def begins(self, state):
        """Load it, as train.py loads a checkpoint."""
        super().begins(state)
        targets = state.prepare_to_load(self._facts, saved=self._tensors)
        for name, target in targets.items():
            target.copy_(self._tensors[name])
        state.loaded(targets, self._facts)


def losses_of(measurements) -> list[float]:
    """Of each step."""
    return [step.loss for step in measurements.timings.steps]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, put together from its parts if the ranks have sharded it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def gather_average(averages: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole averages of all ranks by name, on every rank; each of them calls it."""
    own = {name: whole(average).cpu() for name, average in averages.items()}
    of_ranks = gather(own, Ranks.from_environment())
    return {name: average for of_rank in of_ranks for name, average in of_rank.items()}


def train_by_hand() -> tuple[list[float], list[torch.Tensor]]:
    """Whole-batch gradient descent by the derivative of the squared error: losses and weights."""
    pairs = Pairs()
    weight, bias = LinearModel().unet.weight.detach()[0].clone(), torch.tensor(0.5)
    losses, weights = [], [weight.clone()]
    for step in range(NUM_STEPS):
        rows = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        inputs, targets = pairs.inputs[rows], pairs.targets[rows, 0]
        error = inputs @ weight + bias - targets
        losses.append(float((error**2).mean()))
        rate = LEARNING_RATE * SCHEDULE[step]
        weight = weight - rate * 2 * (error[:, None] * inputs).mean(0)
        bias = bias - rate * 2 * error.mean()
        weights.append(weight.clone())
    return losses, weights


def average_by_hand(weights: list[torch.Tensor], *, half_life: int, interval: int) -> torch.Tensor:
    """d^m w_1 + (1 - d) sum_{j=1..m} d^(m-j) w_jk, for weights w_0 .. w_n and m = n // k.

    k is the interval, d is 0.5 ** (k / half_life).
    """
    decay, num_updates = 0.5 ** (interval / half_life), (len(weights) - 1) // interval
    terms = [
        (1 - decay) * decay ** (num_updates - j) * weights[j * interval]
        for j in range(1, num_updates + 1)
    ]
    return decay**num_updates * weights[1] + sum(terms)
