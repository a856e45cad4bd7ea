"""Ranks that share a miniature of each family train it as one process does.

The whole grid of ways to share a model is in test_sharding.py. Noise and times are data here: ranks
would draw others than one process does.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DistributedSampler, StackDataset

from sdbench.base.conditions import NUM_SIZES, SIZES
from sdbench.engines import load_engine
from sdbench.engines.job import TrainedModule, TrainJob
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.ranks.distributed import Ranks
from tests.engines.linear import CountingLoader, make_config, watch_of, whole
from tests.forked import run_in_group

pytestmark = pytest.mark.slow

FAMILIES = ("sdxl", "sd3", "flux")
BATCH_SIZE, NUM_STEPS = 4, 2
# tests/launch/test_sharding.py has the others, with one family.
ON_ONE_NODE = ("none", "full")
ON_TWO_NODES = ("hybrid",)


BF16 = "full, weights in bf16"


class GivenNoise(DiffusionModel):
    """A model whose batches have the noise and the times."""

    def forward(self, batch):
        """Predict from noised latents."""
        return self.predict(batch["latent"], batch, times=batch["times"], noise=batch["noise"])


class Loader(CountingLoader):
    """Counts images of these batches."""

    def __iter__(self):
        for batch in torch.utils.data.DataLoader.__iter__(self):
            self.num_images_delivered += len(batch["latent"])
            yield batch


def make_model(family: str, *, precision: str) -> DiffusionModel:
    architecture = resolve_architecture(f"tiny-{family}")
    model = build_model(architecture, seed=3, precision=precision, encoders=False)
    model.__class__ = GivenNoise
    return model


def make_data(family: str, model: DiffusionModel) -> StackDataset:
    """Encoded samples of all steps."""
    architecture, num_samples = resolve_architecture(f"tiny-{family}"), BATCH_SIZE * NUM_STEPS
    with torch.random.fork_rng():
        torch.manual_seed(7)
        latents = torch.randn(num_samples, architecture.latents.num_channels, 8, 8)
        times, noise = model.objective.draw(latents)
        conditions = {
            one.name: torch.randn(num_samples, *one.shape) for one in architecture.conditions
        }
        sizes = torch.randint(0, 2000, (num_samples, NUM_SIZES))  # bf16 would round them
    return StackDataset(latent=latents, times=times, noise=noise, **conditions, **{SIZES: sizes})


def train(family: str, sharding: str, *, precision: str = "fp32") -> dict:
    """Losses, and the whole gradients and weights of the last step."""
    ranks, model = Ranks.from_environment(), make_model(family, precision=precision)
    name, denoiser, gradients = model.family.denoiser, model.denoiser, {}
    data = make_data(family, model)
    sampler = DistributedSampler(
        data, num_replicas=ranks.world_size, rank=ranks.rank, shuffle=False
    )

    def make_optimizer(groups):
        optimizer = torch.optim.SGD(groups)
        optimizer.register_step_post_hook(
            lambda *_: gradients.update(
                (name, None if weight.grad is None else whole(weight.grad))
                for name, weight in denoiser.named_parameters()
            )
        )
        return optimizer

    job = TrainJob(
        model=model,
        trained={name: TrainedModule(denoiser, lr=0.01, weight_decay=0.0)},
        loss=lambda output: model.loss(*output),
        loader=Loader(data, batch_size=BATCH_SIZE // ranks.world_size, sampler=sampler),
        make_optimizer=make_optimizer,
        schedule=lambda step: 1.0,
        ema=None,
        images_per_step=BATCH_SIZE,
        num_steps=NUM_STEPS,
        flops_per_image=1.0,
        num_parameters=1,
        num_trainable_parameters=1,
        sharded_blocks=model.network.sharded_blocks,
        casts_inputs=model.network.casts_inputs,
    )
    config = make_config(
        sharding=sharding,
        device_train_microbatch_size=1,
        precision=precision,
        master_weights="fp32" if precision == "bf16" and sharding != "none" else "none",
    )
    measurements = load_engine("torch")(job, config, watch_of(0, NUM_STEPS))
    return {
        "losses": [step.loss for step in measurements.timings.steps],
        "gradients": gradients,
        "weights": {name: whole(weight) for name, weight in denoiser.named_parameters()},
    }


def train_all(folder, shardings, **ranks_and_nodes):
    def program(rank):
        cases = [(family, sharding) for family in FAMILIES for sharding in shardings]
        results = {case: train(*case) for case in cases}
        for family in FAMILIES if "full" in shardings else ():
            results[family, BF16] = train(family, "full", precision="bf16")
        if rank == 0:
            torch.save(results, folder / "results.pt")

    run_in_group(program, folder, **ranks_and_nodes)
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def alone():
    """The same of one process."""
    return {family: train(family, "none") for family in FAMILIES}


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    return train_all(tmp_path_factory.mktemp("ranks"), ON_ONE_NODE, num_ranks=2)


@pytest.fixture(scope="module")
def of_two_nodes(tmp_path_factory):
    return train_all(tmp_path_factory.mktemp("nodes"), ON_TWO_NODES, num_ranks=4, num_nodes=2)


def check(found: dict, expected: dict) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert len(set(found["losses"])) == NUM_STEPS
    for what in ("gradients", "weights"):
        torch.testing.assert_close(found[what], expected[what], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sharding", ON_ONE_NODE)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_what_one_process_trains(family, sharding, of_two_ranks, alone):
    check(of_two_ranks[family, sharding], alone[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_of_bf16_weights_are_told_what_whole_ones_are(family, of_two_ranks):
    # Times, sizes and positions are not rounded: the first loss is that of unsharded weights.
    expected = train(family, "none", precision="bf16")["losses"][0]
    assert of_two_ranks[family, BF16]["losses"][0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sharding", ON_TWO_NODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_nodes_train_what_one_process_trains(family, sharding, of_two_nodes, alone):
    check(of_two_nodes[family, sharding], alone[family])
