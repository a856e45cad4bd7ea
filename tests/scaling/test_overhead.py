"""What changes of a step's overhead are predicted to give, against sums by hand."""

from __future__ import annotations

import json

import pytest

from sdbench.cli import main
from sdbench.report.figures import read_figures
from tests.refusals import refusal_of

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


@pytest.fixture
def overhead(tmp_path):
    """The rows that the command writes, by change, whether those above are made, and GPUs."""

    def run(*arguments):
        out = tmp_path / "overhead.csv"
        assert main(["scaling", "overhead", *map(str, arguments), "--out", str(out)]) == 0
        return {
            (row["change"], row["with_those_above"], row["num_gpus"]): row
            for row in read_figures(out)
        }

    return run


def step_s(rows, change, *, num_gpus=512, together=False):
    (row,) = (
        row
        for (name, above, count), row in rows.items()
        if change == name and str(above).lower() == str(together).lower() and count == num_gpus
    )
    return row["step_time_s"]


def test_each_change_alone_and_with_those_above(overhead, capsys):
    rows = overhead("--num_gpus", "8,512", "--global_batch", 2048, *PHASES, *LINKS)
    whole_s = IN_NODE_S + IN_NETWORK_S
    piece = 200 * 2**20 / 4e9
    assert step_s(rows, "as it is, nothing hidden", num_gpus=8) == pytest.approx(
        64 * 0.036 + 0.024 + IN_NODE_S
    )
    assert step_s(rows, "as it is, nothing hidden") == pytest.approx(0.060 + whole_s)
    assert step_s(rows, "shared") == pytest.approx(0.048 + 0.012 / 8 + whole_s)
    assert step_s(rows, "16_bit") == pytest.approx(0.060 + whole_s / 2)
    hidden_s = 0.016 * (1 - piece)
    assert step_s(rows, "behind_backward") == pytest.approx(0.060 + whole_s - hidden_s)
    assert step_s(rows, "behind_encoders") == pytest.approx(0.060 + whole_s - 0.012)
    assert step_s(rows, "no_rest") == pytest.approx(0.048 + whole_s)
    # Half of the gradients is 18.6 ms: behind 16 ms but for the first piece, and with 12 more gone.
    left_s = whole_s / 2 - 0.016 * (1 - 2 * piece)
    assert step_s(rows, "behind_backward", together=True) == pytest.approx(0.0495 + left_s)
    assert step_s(rows, "behind_encoders", together=True) == pytest.approx(0.0495)
    assert step_s(rows, "no_rest", together=True) == pytest.approx(0.0375)
    (last,) = (
        row
        for key, row in rows.items()
        if key[0] == "no_rest" and key[2] == 512 and str(key[1]).lower() == "true"
    )
    # 64 micro-batches on 8 GPUs, and one on each of 512.
    assert last["efficiency_percent"] == pytest.approx(100 * (64 * 0.036 + 0.0015) / (64 * 0.0375))
    printed = capsys.readouterr().out
    assert printed.startswith("modelled, from the phases that were given")


def test_only_the_changes_that_are_asked_for_are_made_in_their_order(overhead):
    changes = ("--changes", "behind_encoders", "16_bit")
    rows = overhead("--num_gpus", "512", "--device_batch", 4, *PHASES, *LINKS, *changes)
    assert list(dict.fromkeys(name for name, *_ in rows)) == [
        "as it is, nothing hidden",
        *changes[1:],
    ]
    half_s = (IN_NODE_S + IN_NETWORK_S) / 2
    assert step_s(rows, "16_bit", together=True) == pytest.approx(0.060 + half_s - 0.012)
    assert step_s(rows, "16_bit") == pytest.approx(0.060 + half_s)


def test_the_last_piece_is_sent_when_the_backward_pass_has_ended(overhead):
    slow = ("--phases", "backward=1000", "--micro_batch", 4, "--num_parameters", 10**9)
    rows = overhead("--num_gpus", "8", "--device_batch", 4, *slow, *LINKS, "--bucket_mib", 500)
    piece = 500 * 2**20 / 4e9
    assert step_s(rows, "behind_backward", num_gpus=8) == pytest.approx(1 + piece * IN_NODE_S)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_pieces_are_small_within_a_node_and_large_between_unless_the_record_knows(
    num_nodes, overhead, repository, tmp_path
):
    record = json.loads((repository / "results" / "runs" / RECORD / "record.json").read_text())
    assert record["config"]["ddp_bucket_mib"] == 25
    record["ranks"]["num_nodes"] = num_nodes
    (tmp_path / "record.json").write_text(json.dumps(record))
    seconds = record["summary"]["breakdown"]["seconds"]
    # Links so slow that the backward pass hides nothing but for what it covers.
    slow = ("--node_gb_per_s", 0.01, "--network_gb_per_s", 0.01, "--gpus_per_node", 2)
    size = record["config"]["batch_size"]
    run = ("--record", tmp_path / "record.json", "--device_batch", size, *slow)
    rows = overhead(*run, "--num_gpus", "2,4", "--changes", "behind_backward")
    step_time_s = size / record["summary"]["images_per_second"]
    backward_s = seconds["backward"] * step_time_s / record["summary"]["breakdown"]["step_time_s"]
    num_bytes = 4 * record["workload"]["num_trainable_parameters"]
    for num_gpus, size_mib in ((2, 25), (4, 200 if num_nodes == 1 else 25)):
        first, second = (
            step_s(rows, name, num_gpus=num_gpus)
            for name in ("as it is, nothing hidden", "behind_backward")
        )
        covered_s = backward_s * (1 - size_mib * 2**20 / num_bytes)
        assert first - second == pytest.approx(covered_s)


def test_a_smaller_micro_batch_takes_as_long(overhead, capsys):
    rows = overhead("--num_gpus", "512,1024", "--global_batch", 2048, *PHASES, *LINKS)
    difference_s = IN_NETWORK_S * (127 / 128 - 63 / 64) / (63 / 64)
    first, second = (
        step_s(rows, "as it is, nothing hidden", num_gpus=count) for count in (512, 1024)
    )
    assert second - first == pytest.approx(difference_s)
    assert "fewer images than 4" in capsys.readouterr().out
    overhead("--num_gpus", "400", "--global_batch", 2048, *PHASES)  # 5 on each: 4 and 1
    assert "fewer images than 4" in capsys.readouterr().out
    overhead("--num_gpus", "512", "--global_batch", 2048, *PHASES)
    assert "fewer images" not in capsys.readouterr().out


def test_on_its_own_gpus_a_record_takes_the_time_that_was_measured(overhead, repository):
    folder = repository / "results" / "runs" / RECORD
    record = json.loads((folder / "record.json").read_text())
    size, rate = record["config"]["batch_size"], record["summary"]["images_per_second"]
    rows = overhead("--record", folder, "--num_gpus", "1,8", "--device_batch", size)
    assert step_s(rows, "as it is, nothing hidden", num_gpus=1) == pytest.approx(size / rate)
    # The gradients of the trained weights in fp32, over the links of a p5 node.
    whole_s = 2 * 7 / 8 * 4 * record["workload"]["num_trainable_parameters"] / 450e9
    added_s = step_s(rows, "as it is, nothing hidden", num_gpus=8) - size / rate
    assert added_s == pytest.approx(whole_s)
    seconds = record["summary"]["breakdown"]["seconds"]
    shared = (seconds["optimizer"] + seconds["ema"]) / record["summary"]["breakdown"]["step_time_s"]
    gain_s = step_s(rows, "as it is, nothing hidden", num_gpus=8) - step_s(
        rows, "shared", num_gpus=8
    )
    assert gain_s == pytest.approx(7 / 8 * shared * size / rate)


def test_what_a_record_does_already_is_not_done_twice(overhead, repository, tmp_path):
    record = json.loads((repository / "results" / "runs" / RECORD / "record.json").read_text())
    # As if four ranks of two nodes had made it, whose optimizers were shared out within the nodes.
    record["config"] |= {"sharding": "hybrid_zero1", "precision": "bf16", "batch_size": 8}
    record["ranks"] |= {"world_size": 4, "num_nodes": 2, "ranks_per_node": 2}
    (tmp_path / "record.json").write_text(json.dumps(record))
    nodes = ("--gpus_per_node", 2, "--device_batch", 2)
    rows = overhead("--record", tmp_path / "record.json", "--num_gpus", "4", *nodes)
    measured_s = 8 / record["summary"]["images_per_second"]
    for change in ("as it is, nothing hidden", "shared", "16_bit", "behind_backward"):
        assert step_s(rows, change, num_gpus=4) == pytest.approx(measured_s)
    # Of one more GPU in each node, each would do two thirds of it.
    nodes = ("--gpus_per_node", 3, "--device_batch", 2)
    rows = overhead("--record", tmp_path / "record.json", "--num_gpus", "6", *nodes)
    gain_s = step_s(rows, "as it is, nothing hidden", num_gpus=6) - step_s(
        rows, "shared", num_gpus=6
    )
    breakdown = record["summary"]["breakdown"]
    shared = breakdown["seconds"]["optimizer"] + breakdown["seconds"]["ema"]
    assert gain_s == pytest.approx(shared / 3 * measured_s / breakdown["step_time_s"])


def test_what_more_gpus_than_a_node_has_share_already_gains_nothing(overhead, repository, tmp_path):
    record = json.loads((repository / "results" / "runs" / RECORD / "record.json").read_text())
    record["config"] |= {"sharding": "zero1", "batch_size": 8}
    record["ranks"] |= {"world_size": 4, "num_nodes": 2, "ranks_per_node": 2}
    (tmp_path / "record.json").write_text(json.dumps(record))
    run = ("--record", tmp_path / "record.json", "--num_gpus", "4", "--device_batch", 2)
    rows = overhead(*run, "--gpus_per_node", 2)
    as_it_is_s = step_s(rows, "as it is, nothing hidden", num_gpus=4)
    assert step_s(rows, "shared", num_gpus=4) == pytest.approx(as_it_is_s)


def test_an_older_record_had_the_pieces_of_torch(overhead, repository, tmp_path):
    record = json.loads((repository / "results" / "runs" / RECORD / "record.json").read_text())
    links = ("--num_gpus", "1,2", "--device_batch", 2, "--node_gb_per_s", 0.01)
    of_each = []
    for size in ({"ddp_bucket_mib": 25}, {}):
        del record["config"]["ddp_bucket_mib"]
        record["config"] |= size
        (tmp_path / "record.json").write_text(json.dumps(record))
        of_each.append(overhead("--record", tmp_path / "record.json", *links))
    assert of_each[0] == of_each[1]


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ((), "--record or --phases"),
        (("--record", ".", *PHASES), "--record or --phases"),
        (("--phases", "backwards=1", "--micro_batch", "4"), "--phases"),
        (("--phases", "backward=-1", "--micro_batch", "4"), "--phases"),
        (("--phases", "backward=1", "backward=2", "--micro_batch", "4"), "--phases"),
        (("--phases", "backward=1"), "--phases and --micro_batch"),
        (("--phases", "ema=1", "--micro_batch", "4"), "--phases and --micro_batch"),
        ((*PHASES, "--global_batch", "8"), "--global_batch or --device_batch"),
    ],
)
def test_what_is_missing_is_refused(arguments, flag):
    refusal = refusal_of("scaling", "overhead", "--num_gpus", 8, "--device_batch", 4, *arguments)
    assert refusal.flag == flag


def test_a_record_without_phases_is_refused(repository):
    folder = (
        repository
        / "results"
        / "runs"
        / ("20261121T213542Z_2-core-intel-xeon-processor_sd2-base-256px-fast")
    )
    refusal = refusal_of(
        "scaling", "overhead", "--num_gpus", 8, "--device_batch", 4, "--record", folder
    )
    assert "--profile_batches" in refusal.allowed
