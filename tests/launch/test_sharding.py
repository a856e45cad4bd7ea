"""Do all ways to share the work of two ranks train one and the same model?

Two ranks train every case with every engine, all in one process group: that is what keeps it short.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule

from sdbench.engines import ENGINES, load_engine, loop
from sdbench.engines.job import EmaSpec, TrainedModule
from sdbench.engines.optimizers import make_optimizer
from sdbench.ranks.distributed import Ranks
from tests.engines.linear import (
    BATCH_SIZE,
    NUM_FEATURES,
    NUM_STEPS,
    SCHEDULE,
    Pairs,
    average_by_hand,
    gather_average,
    make_config,
    make_parts,
    mean_squared_error,
    watch_with,
    whole,
)
from tests.forked import NUM_RANKS, run_in_group

pytestmark = pytest.mark.slow

MASTERS = {"precision": "bf16", "master_weights": "fp32"}
# Name of a case to the settings in which it differs from plain DDP.
CASES: dict[str, dict[str, object]] = {
    "none": {},
    "zero1": {"sharding": "zero1"},
    "grad_op": {"sharding": "grad_op"},
    "grad_op-every": {"sharding": "grad_op", "grad_sync": "every"},
    "grad_op-ahead": {"sharding": "grad_op", "gather_ahead": True},
    "full": {"sharding": "full"},
    "full-every": {"sharding": "full", "grad_sync": "every"},
    "full-unfused": {"sharding": "full", "optimizer": "adamw"},
    "every": {"grad_sync": "every"},
    "bf16": {"grad_compression": "bf16"},
    "all_of_ddp": {
        "sharding": "zero1",
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "ddp_bucket_mib": 1,
    },
    "masters": MASTERS,
    "zero1-masters": {"sharding": "zero1", **MASTERS},
    "grad_op-masters": {"sharding": "grad_op", **MASTERS},
    "full-masters": {"sharding": "full", **MASTERS},
}
# Those of four ranks, two on each of two nodes; a rank has two images, each its own micro-batch.
CASES_OF_NODES: dict[str, dict[str, object]] = {
    name + suffix: {"sharding": name, "device_train_microbatch_size": 1, **precision}
    for name in ("hybrid", "hybrid_grad_op", "hybrid_zero1")
    for suffix, precision in (("", {}), ("-masters", MASTERS))
}
CASES_OF_NODES["hybrid_grad_op-ahead"] = CASES_OF_NODES["hybrid_grad_op"] | {"gather_ahead": True}


def make_model():
    """A trained part with a convolution in channels_last and two blocks, and a frozen part."""

    class Block(torch.nn.Sequential):
        """What FSDP gathers on its own."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.was_gathering = []
            self.encoder = torch.nn.Linear(NUM_FEATURES, NUM_FEATURES).requires_grad_(False)
            self.unet = torch.nn.Sequential(
                torch.nn.Conv2d(2, 8, (1, 3)).to(memory_format=torch.channels_last),
                torch.nn.Flatten(),
                Block(torch.nn.Linear(8, 7), torch.nn.Tanh()),  # 7 rows: uneven parts
                Block(torch.nn.Linear(7, 8), torch.nn.Tanh()),
                torch.nn.Linear(8, 1),
            )

        def forward(self, batch):
            self.was_gathering.append(is_gathering(self.unet))
            images = self.encoder(batch["input"]).view(-1, 2, 1, NUM_FEATURES // 2)
            dtype = next(self.unet.parameters()).dtype
            return self.unet(images.to(dtype)), batch["target"]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(), (Block,)


def make_case(settings):
    """TrainJob and settings of a case, and the list that will get the gradients of each step."""
    # 3 of the 4 or 8 images of a rank: also a smaller one at the end.
    config = make_config(
        device_train_microbatch_size=3, optimizer="adamw_fused", master_weights="none"
    )
    vars(config).update(settings)
    model, blocks = make_model()
    if config.precision == "bf16":
        model.unet.bfloat16()
    gradients, ranks = [], Ranks.from_environment()

    def make_optimizer_that_tells(groups):
        optimizer = make_optimizer(groups, config=config)
        # AdamW would do the same with gradients that are twice as large.
        optimizer.register_step_post_hook(
            lambda *_: gradients.append(
                {name: whole(weight.grad) for name, weight in model.unet.named_parameters()}
            )
        )
        return optimizer

    parts = make_parts(
        num_ranks=ranks.world_size,
        rank=ranks.rank,
        model=model,
        trained={"unet": TrainedModule(model.unet, lr=0.01, weight_decay=0.1)},
        make_optimizer=make_optimizer_that_tells,
        ema=EmaSpec("foreach", half_life_batches=2, interval_batches=2),
        sharded_blocks=blocks,
    )
    return parts, config, gradients


def is_gathering(module):
    """Whether weights are on their way to this rank, by FSDP's own account."""
    return any(
        isinstance(one, FSDPModule)
        and one._get_fsdp_state()._fsdp_param_group._all_gather_result is not None
        for one in module.modules()
    )


class WeightRecorder:
    """Keeps the whole weights before and after each step, and the shapes of this rank's parts."""

    def __init__(self, module):
        self.module = module
        self.weights = []
        self.held = []  # the weights that this rank updates and averages, or their copies in fp32
        self.shapes, self.updated = {}, {}

    def loop_begins(self):
        """Put together what the ranks hold; under DDP each holds all."""
        weights = dict(self.module.named_parameters())
        self.weights.append({name: whole(weight) for name, weight in weights.items()})
        self.held.append({name: whole(weight) for name, weight in self.updated.items()})
        for name, weight in weights.items():
            here = weight.to_local() if hasattr(weight, "to_local") else weight
            self.shapes[name] = tuple(here.shape)

    def step_ends(self, **_):
        self.loop_begins()


def train(engine, settings, *, checkpoint_id):
    """Train a case, and save the state of the average; returns what the rank has seen."""
    kept = []

    class Kept(loop.ForeachEma):
        def __init__(self, weights, spec):
            super().__init__(weights, spec)
            kept.append(self)
            recorder.updated = {n.removeprefix("unet."): one for n, one in weights.items()}

    original, loop.ForeachEma = loop.ForeachEma, Kept
    parts, config, gradients = make_case(settings)
    recorder = WeightRecorder(parts.model.unet)
    try:
        measurements = load_engine(engine)(parts, config, watch_with(recorder))
    finally:
        loop.ForeachEma = original
    (ema,) = kept
    checkpoint.save(ema.averages, checkpoint_id=checkpoint_id)
    return {
        "losses": [step.loss for step in measurements.timings.steps],
        "gradients": gradients,
        "weights": recorder.weights,
        "average": {
            n.removeprefix("unet."): average for n, average in gather_average(ema.averages).items()
        },
        "held": recorder.held,
        "was_gathering": parts.model.was_gathering,
        "shapes": recorder.shapes,
    }


def train_all(folder, *, engines, cases, num_ranks, num_nodes):
    """What each rank has seen, by engine and case."""

    def program(rank):
        results = {
            (engine, case): train(engine, cases[case], checkpoint_id=folder / f"{engine}-{case}")
            for engine in engines
            for case in cases
        }
        torch.save(results, folder / f"rank{rank}.pt")

    run_in_group(program, folder, num_ranks=num_ranks, num_nodes=num_nodes)
    of_ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(num_ranks)]
    return {key: [one[key] for one in of_ranks] for key in of_ranks[0]}


# The order of additions differs, and AdamW divides by small numbers in its first steps.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
# bf16 keeps 8 bits of a gradient, and AdamW makes steps of about the learning rate, 0.01, of it.
IN_BF16 = {"rtol": 0.02, "atol": 0.005}

# Two ranks of one node with each engine, and two nodes of two ranks each.
NODES = "nodes"
ON_ONE_NODE = [(engine, case) for engine in ENGINES for case in CASES]
ON_NODES = [(NODES, case) for case in CASES_OF_NODES]
each_engine = pytest.mark.parametrize("engine", ENGINES)
each_run = pytest.mark.parametrize(("where", "case"), [*ON_ONE_NODE, *ON_NODES])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    """What each rank has seen, by (engine, case) or (NODES, case)."""
    found = train_all(folder, engines=ENGINES, cases=CASES, num_ranks=NUM_RANKS, num_nodes=1)
    of_nodes = train_all(
        tmp_path_factory.mktemp("nodes"),
        engines=("torch",),
        cases=CASES_OF_NODES,
        num_ranks=4,
        num_nodes=2,
    )
    return found | {(NODES, case): of_ranks for (_, case), of_ranks in of_nodes.items()}


@pytest.fixture(scope="module")
def reference():
    """The same of one process that trains on whole batches, without any engine."""
    model, _ = make_model()
    trained = model.unet
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, weight_decay=0.1)
    pairs, losses, gradients = Pairs(), [], []
    weights = [copy_of(trained)]
    for step in range(NUM_STEPS):
        # Rank r of n gets samples r, r + n, ...: with 2 ranks of 4 images, these 8 in all.
        rows = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        batch = {"input": pairs.inputs[rows], "target": pairs.targets[rows]}
        optimizer.param_groups[0]["lr"] = 0.01 * SCHEDULE[step]
        loss = mean_squared_error(model(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        gradients.append({name: weight.grad.clone() for name, weight in trained.named_parameters()})
        weights.append(copy_of(trained))
    return losses, gradients, weights


def copy_of(module):
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


@each_run
def test_losses_gradients_and_weights_are_those_of_one_process(where, case, results, reference):
    tolerance = IN_BF16 if case == "bf16" or case.endswith("masters") else TOLERANCE
    for result in results[where, case]:
        for name, expected in zip(("losses", "gradients", "weights"), reference, strict=True):
            torch.testing.assert_close(result[name], expected, **tolerance, check_dtype=False)


@each_run
def test_the_average_is_that_of_the_closed_form(where, case, results):
    of_ranks = results[where, case]
    first = of_ranks[0]
    assert set(first["average"]) == set(first["weights"][0])
    for name, average in first["average"].items():
        owner = next(one for one in of_ranks if name in one["held"][0])
        of_steps = [weights[name] for weights in owner["held"]]
        assert of_steps[0].dtype == torch.float32
        expected = average_by_hand(of_steps, half_life=2, interval=2)
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("engine", "case"), ON_ONE_NODE)
def test_an_average_that_two_ranks_have_saved_is_loaded_by_one(engine, case, results, folder):
    own = dict(make_model()[0].unet.named_parameters())
    weights = {f"unet.{name}": weight for name, weight in own.items()}
    ema = loop.ForeachEma(weights, EmaSpec("foreach", half_life_batches=2, interval_batches=2))
    checkpoint.load(ema.averages, checkpoint_id=folder / f"{engine}-{case}", no_dist=True)
    averages = {name.removeprefix("unet."): average for name, average in ema.averages.items()}
    for name, average in results[engine, case][0]["average"].items():
        assert torch.equal(averages[name], average)


@each_engine
def test_bf16_compression_does_something(engine, results):
    compressed, plain = (results[engine, case][0]["losses"] for case in ("bf16", "none"))
    assert compressed[1:] != plain[1:]


ALL, PARTS = [(7, 8)] * 2, [(4, 8), (3, 8)]


@pytest.mark.parametrize(
    ("where", "case", "rows"),
    [
        *((engine, case, ALL) for engine in ENGINES for case in ("none", "zero1")),
        *((engine, case, PARTS) for engine in ENGINES for case in ("grad_op", "full")),
        *((NODES, case, PARTS * 2) for case in ("hybrid", "hybrid_grad_op")),
    ],
)
def test_a_rank_holds_its_part_of_the_weights(where, case, rows, results):
    assert [of_rank["shapes"]["2.0.weight"] for of_rank in results[where, case]] == rows


@pytest.mark.parametrize(
    ("where", "case"), [*((engine, "grad_op") for engine in ENGINES), (NODES, "hybrid_grad_op")]
)
def test_weights_that_are_gathered_ahead_are_the_same(where, case, results):
    plain, ahead = (results[where, name][0] for name in (case, f"{case}-ahead"))
    # Two micro-batches a step: for the second one they are there already.
    assert ahead["was_gathering"] == [True, False] * NUM_STEPS
    assert not any(plain["was_gathering"])
    for name in ("losses", "weights", "gradients", "average"):
        torch.testing.assert_close(ahead[name], plain[name], rtol=0, atol=0)


@pytest.mark.parametrize(("case", "type_held"), [("masters", "bf16"), ("grad_op-masters", "fp32")])
@each_engine
def test_what_is_updated_is_the_copy_in_fp32(engine, case, type_held, results):
    result = results[engine, case][0]
    weights, held = result["weights"][-1], result["held"][-1]
    for name, weight in weights.items():
        assert weight.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[type_held]
        # The weight is its copy, rounded; the copy is no number that bf16 has.
        assert torch.equal(weight.bfloat16(), held[name].bfloat16())
        assert not torch.equal(held[name], held[name].bfloat16().float())


def held_by(of_ranks):
    return [set(of_rank["held"][0]) for of_rank in of_ranks]


@each_engine
def test_under_zero1_a_weight_is_updated_and_averaged_by_one_rank_alone(engine, results):
    first, second = held_by(results[engine, "zero1"])
    assert first and second and not first & second
    assert first | second == held_by(results[engine, "none"])[0]
    # DDP has the same weights; here one rank updates a weight and sends it to the other.
    for suffix, plain in (("", "none"), ("-masters", "masters")):
        for one in results[engine, f"zero1{suffix}"]:
            other = results[engine, plain][0]
            torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)


def test_under_hybrid_zero1_each_node_has_all_averages(results):
    first, second, *other_node = held_by(results[NODES, "hybrid_zero1"])
    assert first and second and not first & second
    assert other_node == [first, second]
