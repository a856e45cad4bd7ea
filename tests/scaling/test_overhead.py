"""What changes of a step's overhead are predicted to give, against sums by hand."""

from __future__ import annotations

import json

import pytest

from tests.refusals import refusal_of
from tests.runs import follow_rate

# 36 ms of micro-batch, 12 of optimizer and average, 12 of the rest, and 4 GB of gradients.
PHASES = (
    *("--phases", "vae_encode=10", "text_encode=2", "unet_forward=8", "backward=16"),
    *("optimizer=8", "ema=4", "other=11", "host_to_device=1"),
    *("--micro_batch", "4", "--num_parameters", "1000000000"),
)
LINKS = ("--gpus_per_node", "8", "--node_gb_per_s", "400", "--network_gb_per_s", "50")
# A ring takes 2 x 7/8 x 4 GB / 400 GB/s within a node, and 2 x 63/64 x 0.5 GB / 50 GB/s for the
# eighth of it that a GPU sends to 63 others.
IN_NODE_S, IN_NETWORK_S = 0.0175, 0.0196875
RECORD = "20261121T184241Z_2-core-intel-xeon-processor_sd2-base-256px-fast"
NOT_PROFILED = "20261121T213542Z_2-core-intel-xeon-processor_sd2-base-256px-fast"
AS_IT_IS = "as it is, nothing hidden"


def step_s(rows, change, *, num_gpus=512, together=False):
    """The step of one of the rows that the command writes."""
    wanted = (change, num_gpus, together)
    names = ("change", "num_gpus", "with_those_above")
    (found,) = (row for row in rows if tuple(row[name] for name in names) == wanted)
    return found["step_time_s"]


@pytest.fixture
def overhead(rows_of):
    return lambda *arguments: rows_of("overhead", *arguments)


@pytest.fixture
def record(repository):
    """A profiled record."""
    return json.loads((repository / "results" / "runs" / RECORD / "record.json").read_text())


@pytest.fixture
def overhead_of(overhead, tmp_path):
    """A function from a record and flags to the forecasts."""

    def run(record, *arguments):
        (tmp_path / "record.json").write_text(json.dumps(follow_rate(record)))
        return overhead("--record", tmp_path / "record.json", *arguments)

    return run


def measured_s(record, *names):
    """Seconds of phases in a measured step, or of the whole step."""
    step_s = record["config"]["batch_size"] / record["summary"]["images_per_second"]
    breakdown = record["summary"]["breakdown"]
    shares = [breakdown["seconds"][name] / breakdown["step_time_s"] for name in names]
    return step_s * (sum(shares) if names else 1)


def test_each_change_alone_and_with_those_above(overhead, capsys):
    found = overhead("--num_gpus", "8,512", "--global_batch", 2048, *PHASES, *LINKS)
    whole_s = IN_NODE_S + IN_NETWORK_S
    piece = 200 * 2**20 / 4e9
    in_node_s = 64 * 0.036 + 0.024 + IN_NODE_S
    assert step_s(found, AS_IT_IS, num_gpus=8) == pytest.approx(in_node_s)
    hidden_s = 0.016 * (1 - piece)
    # Half of the gradients is 18.6 ms: behind 16 ms but for the first piece, and with 12 more gone.
    left_s = whole_s / 2 - 0.016 * (1 - 2 * piece)
    for change, alone_s, together_s in (
        (AS_IT_IS, 0.060 + whole_s, 0.060 + whole_s),
        ("shared", 0.048 + 0.012 / 8 + whole_s, 0.0495 + whole_s),
        ("16_bit", 0.060 + whole_s / 2, 0.0495 + whole_s / 2),
        ("behind_backward", 0.060 + whole_s - hidden_s, 0.0495 + left_s),
        ("behind_encoders", 0.060 + whole_s - 0.012, 0.0495),
        ("no_rest", 0.048 + whole_s, 0.0375),
    ):
        assert step_s(found, change) == pytest.approx(alone_s)
        assert step_s(found, change, together=True) == pytest.approx(together_s)
    # 64 micro-batches on 8 GPUs, and one on each of 512.
    assert found[-1]["efficiency_percent"] == pytest.approx(
        100 * (64 * 0.036 + 0.0015) / (64 * 0.0375)
    )
    assert capsys.readouterr().out.startswith("modelled, from the phases that were given")


def test_only_the_changes_that_are_asked_for_are_made_in_their_order(overhead):
    changes = ("--changes", "behind_encoders", "16_bit")
    found = overhead("--num_gpus", "512", "--device_batch", 4, *PHASES, *LINKS, *changes)
    assert list(dict.fromkeys(row["change"] for row in found)) == [AS_IT_IS, *changes[1:]]
    half_s = (IN_NODE_S + IN_NETWORK_S) / 2
    assert step_s(found, "16_bit", together=True) == pytest.approx(0.060 + half_s - 0.012)
    assert step_s(found, "16_bit") == pytest.approx(0.060 + half_s)


def test_the_last_piece_is_sent_when_the_backward_pass_has_ended(overhead):
    slow = ("--phases", "backward=1000", "--micro_batch", 4, "--num_parameters", 10**9)
    found = overhead("--num_gpus", "8", "--device_batch", 4, *slow, *LINKS)
    piece = 25 * 2**20 / 4e9
    assert step_s(found, "behind_backward", num_gpus=8) == pytest.approx(1 + piece * IN_NODE_S)


def test_a_smaller_micro_batch_takes_as_long(overhead, capsys):
    found = overhead("--num_gpus", "512", "--device_batch", 2, *PHASES, *LINKS)
    assert step_s(found, AS_IT_IS) == pytest.approx(0.060 + IN_NODE_S + IN_NETWORK_S)
    assert "fewer images than 4" in capsys.readouterr().out


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_pieces_are_small_within_a_node_and_large_between_unless_the_record_knows(
    num_nodes, overhead_of, record
):
    assert record["config"]["ddp_bucket_mib"] == 25
    record["ranks"]["num_nodes"] = num_nodes
    # Links so slow that the backward pass hides nothing but for what it covers.
    slow = ("--node_gb_per_s", 0.01, "--network_gb_per_s", 0.01, "--gpus_per_node", 2)
    run = ("--device_batch", record["config"]["batch_size"], *slow, "--num_gpus", "2,4")
    found = overhead_of(record, *run)
    num_bytes = 4 * record["workload"]["num_trainable_parameters"]
    for num_gpus, size_mib in ((2, 25), (4, 200 if num_nodes == 1 else 25)):
        hidden_s = step_s(found, AS_IT_IS, num_gpus=num_gpus) - step_s(
            found, "behind_backward", num_gpus=num_gpus
        )
        covered_s = measured_s(record, "backward") * (1 - size_mib * 2**20 / num_bytes)
        assert hidden_s == pytest.approx(covered_s)
    # An older record had the pieces of torch, of the same size.
    if num_nodes == 1:
        del record["config"]["ddp_bucket_mib"]
        assert overhead_of(record, *run) == found


def test_on_its_own_gpus_a_record_takes_the_time_that_was_measured(overhead_of, record):
    size = record["config"]["batch_size"]
    found = overhead_of(record, "--num_gpus", "1,8", "--device_batch", size)
    assert step_s(found, AS_IT_IS, num_gpus=1) == pytest.approx(measured_s(record))
    # The gradients of the trained weights in fp32, over the links of a p5 node.
    whole_s = 2 * 7 / 8 * 4 * record["workload"]["num_trainable_parameters"] / 450e9
    as_it_is_s = step_s(found, AS_IT_IS, num_gpus=8)
    assert as_it_is_s - measured_s(record) == pytest.approx(whole_s)
    gain_s = as_it_is_s - step_s(found, "shared", num_gpus=8)
    assert gain_s == pytest.approx(7 / 8 * measured_s(record, "optimizer", "ema"))


def test_what_a_record_does_already_is_not_done_twice(overhead_of, record):
    # As if four ranks of two nodes had made it, whose optimizers were shared out within the nodes.
    record["config"] |= {"sharding": "hybrid_zero1", "precision": "bf16", "batch_size": 8}
    record["ranks"] |= {"world_size": 4, "num_nodes": 2, "ranks_per_node": 2}
    nodes = ("--device_batch", 2, "--gpus_per_node")
    found = overhead_of(record, "--num_gpus", "4", *nodes, 2)
    for change in (AS_IT_IS, "shared", "16_bit", "behind_backward"):
        assert step_s(found, change, num_gpus=4) == pytest.approx(measured_s(record))
    # Of one more GPU in each node, each would do two thirds of it.
    found = overhead_of(record, "--num_gpus", "6", *nodes, 3)
    gain_s = step_s(found, AS_IT_IS, num_gpus=6) - step_s(found, "shared", num_gpus=6)
    assert gain_s == pytest.approx(measured_s(record, "optimizer", "ema") / 3)
    # More GPUs than those of a node share already.
    record["config"]["sharding"] = "zero1"
    found = overhead_of(record, "--num_gpus", "4", *nodes, 2)
    assert step_s(found, "shared", num_gpus=4) == pytest.approx(step_s(found, AS_IT_IS, num_gpus=4))


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("", "--record or --phases"),
        ("--record . --phases backward=1", "--record or --phases"),
        ("--phases backwards=1 --micro_batch 4", "--phases"),
        ("--phases backward=1 backward=2 --micro_batch 4", "--phases and --micro_batch"),
        ("--phases backward=1", "--phases and --micro_batch"),
        ("--phases ema=1 --micro_batch 4", "--phases and --micro_batch"),
        (
            "--phases backward=1 --micro_batch 4 --global_batch 8",
            "--global_batch or --device_batch",
        ),
        (f"--record results/runs/{NOT_PROFILED}", "--record"),
    ],
)
def test_what_is_missing_is_refused(repository, monkeypatch, arguments, flag):
    monkeypatch.chdir(repository)
    flags = ("--num_gpus", 8, "--device_batch", 4, *arguments.split())
    assert refusal_of("scaling", "overhead", *flags).flag == flag
