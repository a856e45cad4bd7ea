"""Do all ways to share the work of two ranks train one and the same model?

Two ranks train every case with every engine (train_sharded.py); here their results are compared.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed import checkpoint
from torch.torch_version import TorchVersion

from sdbench.engines import ENGINES
from sdbench.engines.ema import ForeachEma
from sdbench.engines.job import EmaSpec
from sdbench.engines.torch_compat import let_cpus_average_between_nodes
from tests.engines.linear import (
    BATCH_SIZE,
    NUM_STEPS,
    SCHEDULE,
    Pairs,
    average_by_hand,
    mean_squared_error,
)
from tests.forked import NUM_RANKS, run_in_group
from tests.launch.train_sharded import CASES, CASES_OF_NODES, make_model, run_rank

# The order of additions differs, and AdamW divides by small numbers in its first steps.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
# bf16 keeps 8 bits of a gradient, and AdamW makes steps of about the learning rate, 0.01, of it.
IN_BF16 = {"rtol": 0.02, "atol": 0.005}

each_case = pytest.mark.parametrize("case", CASES)
each_engine = pytest.mark.parametrize("engine", ENGINES)
each_case_of_nodes = pytest.mark.parametrize("case", CASES_OF_NODES)


def tolerance_of(case):
    """Of losses, gradients and weights."""
    return IN_BF16 if case == "bf16" or case.endswith("masters") else TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks write."""
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(folder):
    """What each rank has seen: a list by rank of (engine, case) to results."""
    run_in_group(lambda rank: run_rank(rank, folder), folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.fixture(scope="module")
def of_nodes(tmp_path_factory):
    """The same of two nodes of two ranks each, by case."""
    folder = tmp_path_factory.mktemp("nodes")

    def run(rank):
        run_rank(rank, folder, engines=("torch",), cases=CASES_OF_NODES)

    run_in_group(run, folder, num_ranks=4, num_nodes=2)
    of_ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]
    return {case: [one["torch", case] for one in of_ranks] for case in CASES_OF_NODES}


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


@each_case
@each_engine
def test_losses_gradients_and_weights_are_those_of_one_process(engine, case, results, reference):
    assert_alike([of_rank[engine, case] for of_rank in results], case, reference)


@each_case_of_nodes
def test_nodes_that_share_within_train_the_model_of_one_process(case, of_nodes, reference):
    assert_alike(of_nodes[case], case, reference)


def assert_alike(of_ranks, case, reference):
    for result in of_ranks:
        for name, expected in zip(("losses", "gradients", "weights"), reference, strict=True):
            torch.testing.assert_close(
                result[name], expected, **tolerance_of(case), check_dtype=False
            )


@each_case
@each_engine
def test_the_average_is_that_of_the_closed_form(engine, case, results):
    assert_averaged([of_rank[engine, case] for of_rank in results])


@each_case_of_nodes
def test_the_average_of_nodes_is_that_of_the_closed_form(case, of_nodes):
    assert_averaged(of_nodes[case])


def assert_averaged(of_ranks):
    first = of_ranks[0]
    assert set(first["average"]) == set(first["weights"][0])
    for name, average in first["average"].items():
        owner = next(one for one in of_ranks if name in one["held"][0])
        of_steps = [weights[name] for weights in owner["held"]]
        assert of_steps[0].dtype == torch.float32
        expected = average_by_hand(of_steps, half_life=2, interval=2)
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-6)


@each_case
@each_engine
def test_an_average_that_two_ranks_have_saved_is_loaded_by_one(engine, case, results, folder):
    own = dict(make_model()[0].unet.named_parameters())
    weights = {f"unet.{name}": weight for name, weight in own.items()}
    ema = ForeachEma(weights, EmaSpec("foreach", half_life_batches=2, interval_batches=2))
    checkpoint.load(ema.averages, checkpoint_id=folder / f"{engine}-{case}", no_dist=True)
    averages = {name.removeprefix("unet."): average for name, average in ema.averages.items()}
    for name, average in results[0][engine, case]["average"].items():
        assert torch.equal(averages[name], average)


@each_engine
def test_bf16_compression_does_something(engine, results):
    result = results[0][engine, "bf16"], results[0][engine, "none"]
    assert result[0]["losses"][1:] != result[1]["losses"][1:]


@each_engine
@pytest.mark.parametrize(
    ("case", "rows"),
    [
        ("none", [(7, 8), (7, 8)]),
        ("zero1", [(7, 8), (7, 8)]),
        ("grad_op", [(4, 8), (3, 8)]),
        ("full", [(4, 8), (3, 8)]),
    ],
)
def test_a_rank_holds_its_part_of_the_weights(engine, case, rows, results):
    assert [of_rank[engine, case]["shapes"]["2.0.weight"] for of_rank in results] == rows


@pytest.mark.parametrize("name", ["hybrid", "hybrid_grad_op"])
def test_a_node_holds_all_weights_and_its_ranks_a_part(name, of_nodes):
    shapes = [of_rank["shapes"]["2.0.weight"] for of_rank in of_nodes[name]]
    assert shapes == [(4, 8), (3, 8)] * 2


@each_engine
def test_weights_that_are_gathered_ahead_are_the_same(engine, results):
    # Two micro-batches a step: for the second one they are there already.
    assert_gathered_ahead(
        results[0][engine, "grad_op"], results[0][engine, "grad_op-ahead"], num_microbatches=2
    )


def test_nodes_gather_ahead_too(of_nodes):
    plain, ahead = (of_nodes[name][0] for name in ("hybrid_grad_op", "hybrid_grad_op-ahead"))
    assert_gathered_ahead(plain, ahead, num_microbatches=2)


def assert_gathered_ahead(plain, ahead, *, num_microbatches):
    assert ahead["was_gathering"] == ([True] + [False] * (num_microbatches - 1)) * NUM_STEPS
    assert not any(plain["was_gathering"])
    for name in ("losses", "weights", "gradients", "average"):
        torch.testing.assert_close(ahead[name], plain[name], rtol=0, atol=0)


@pytest.mark.parametrize(("case", "type_held"), [("masters", "bf16"), ("grad_op-masters", "fp32")])
@each_engine
def test_what_is_updated_is_the_copy_in_fp32(engine, case, type_held, results):
    result = results[0][engine, case]
    weights, held = result["weights"][-1], result["held"][-1]
    for name, weight in weights.items():
        assert weight.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[type_held]
        # The weight is its copy, rounded; the copy is no number that bf16 has.
        assert torch.equal(weight.bfloat16(), held[name].bfloat16())
        assert not torch.equal(held[name], held[name].bfloat16().float())


def held_by(of_ranks):
    """Names of the weights that each rank averages."""
    return [set(of_rank["held"][0]) for of_rank in of_ranks]


@each_engine
def test_under_zero1_a_weight_is_averaged_by_one_rank_alone(engine, results):
    first, second = held_by(of_rank[engine, "zero1"] for of_rank in results)
    assert first and second and not first & second
    assert first | second == set(results[0][engine, "none"]["held"][0])


@each_engine
def test_under_zero1_weights_are_those_of_ddp(engine, results):
    # Each is updated by one rank and sent to the other.
    for suffix, plain in (("", "none"), ("-masters", "masters")):
        one, other = results[0][engine, f"zero1{suffix}"], results[0][engine, plain]
        torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)
        torch.testing.assert_close(
            one["weights"], results[1][engine, f"zero1{suffix}"]["weights"], rtol=0, atol=0
        )


def test_under_hybrid_zero1_each_node_has_all_averages(of_nodes):
    first, second, *other_node = held_by(of_nodes["hybrid_zero1"])
    assert first and second and not first & second
    assert other_node == [first, second]


@pytest.mark.parametrize(("version", "is_changed"), [("2.7.0+cu126", True), ("2.11.0", False)])
def test_streams_of_a_cpu_record_events_where_torch_asks_for_some(version, is_changed, monkeypatch):
    monkeypatch.setattr(torch.cpu.Stream, "record_event", lambda self: None)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    let_cpus_average_between_nodes()
    assert (torch.cpu.Stream().record_event() is not None) == is_changed
