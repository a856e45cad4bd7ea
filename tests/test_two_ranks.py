"""What two ranks do together, seen by a spy on each and in their record.

How launchers start and stop ranks: tests/launch/test_processes.py.
"""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from torch._subclasses import FakeTensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import benchmark
from sdbench.engines import load_engine
from sdbench.measure import hardware
from sdbench.measure.phases import PHASES, PhaseClock
from sdbench.measuring.benchmark import Benchmark
from sdbench.models.diffusion import DiffusionModel
from tests.forked import exit_codes, forked_ranks, log_of, wait_for_step
from tests.runs import only_record

TINY = (
    *("--model_name", "nano", "--engine", "composer", "--use_synth_data", "--num_workers", "0"),
    *("--num_threads", "1", "--no_measure_peak"),
)
# The fourth step is profiled, and a fifth shows the kernels of attention.
FIVE_STEPS = ("--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "1")
LONG = ("--warmup_batches", "1", "--measure_batches", "100000")
# By the clock of the profiled step, which stands still but for the forward pass, that takes each
# rank its own time, and the communication of the last gradients.
FORWARD_S = (0.125, 0.375)
COMMUNICATION_S = 0.25
# "Within a minute" is the promise for a rank that dies.
END_WITHIN_S = 60
# Until a forked rank waits for the other.
STARTS_WITHIN_S = 10


@pytest.fixture(scope="module", autouse=True)
def composer_is_imported_once():
    load_engine("composer")


def run(results, *argv):
    return benchmark.main([*TINY, *argv, "--results_dir", str(results)])


def spy(folder):
    """Have this rank write what it drew and saw in each forward pass, and set its clock."""
    rank, now_s = int(os.environ["RANK"]), [0.0]
    forward, init = DiffusionModel.forward, DistributedDataParallel.__init__

    def spied_forward(self, batch):
        prediction, target = forward(self, batch)
        # Estimates replay a step without numbers.
        if not isinstance(target, FakeTensor) and not target.is_meta:
            now_s[0] += FORWARD_S[rank]
            sums = (target, batch["image"].double(), self.unet.conv_in.weight)
            with (folder / f"seen-by-{rank}.txt").open("a") as lines:
                print(*(f"{float(tensor.detach().sum()):.6f}" for tensor in sums), file=lines)
        return prediction, target

    def send_slowly(group, bucket):
        now_s[0] += COMMUNICATION_S * bucket.is_last()
        return allreduce_hook(group, bucket)

    def slow_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.register_comm_hook(None, send_slowly)

    DiffusionModel.forward = spied_forward
    DistributedDataParallel.__init__ = slow_init
    PhaseClock.__init__.__kwdefaults__["clock"] = lambda: now_s[0]


@pytest.fixture(scope="module")
def spied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spied")

    def program():
        spy(folder)
        return run(folder, *FIVE_STEPS)

    with forked_ranks(program, folder) as ranks:
        assert exit_codes(ranks) == [0, 0], log_of(folder, 0).read_text()
    return folder


def test_they_train_as_one_run(spied):
    record = only_record(spied)
    assert record["ranks"] == {
        "world_size": 2,
        "num_nodes": 1,
        "ranks_per_node": 2,
        "restarts": 0,
        "launcher": None,
        "network": None,
    }
    assert record["workload"]["num_images"] == 5 * record["config"]["batch_size"]
    printed = log_of(spied, 0).read_text()
    assert f": 2 ranks on {record['machine']['device_name']}, global batch" in printed
    assert printed.count("Model has") == 1
    assert "Model has" not in log_of(spied, 1).read_text()


def test_a_rank_that_is_slower_than_the_other_is_named(spied):
    summary = only_record(spied)["summary"]
    # Each clock stands still while its rank waits for the other.
    expected = {"other": sum(FORWARD_S) / 2, "gradient_communication": COMMUNICATION_S}
    assert summary["breakdown"]["seconds"] == {**dict.fromkeys(PHASES, 0), **expected}
    assert summary["stragglers"] == [
        {"rank": 1, "node": 0, "own_step_time_s": 0.375, "times_median": 3.0, "slow_phase": "other"}
    ]
    assert "straggler" in summary["flags"]
    # 0.25 s of 0.25 + 0.25, the mean forward pass and the communication.
    assert summary["bottleneck"].startswith("50 % of the step is lost to rank 1 on node 0")


def test_they_draw_different_noise_and_see_different_samples(spied):
    first, second = ((spied / f"seen-by-{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert len(first) == len(second) == 5
    for one, other in zip(first, second, strict=True):
        is_same = [a == b for a, b in zip(one.split(), other.split(), strict=True)]
        # Noise, sample, weights: gradients are averaged, so both ranks keep one model.
        assert is_same == [False, False, True]


@pytest.mark.slow
def test_nobody_on_the_network_can_join_them(tmp_path):
    with forked_ranks(lambda: run(tmp_path, *LONG), tmp_path) as ranks:
        wait_for_step(log_of(tmp_path, 0))
        sockets = [
            one for rank in ranks for one in psutil.Process(rank.pid).net_connections("inet")
        ]
    listening = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("method", "rank", "reason"),
    [
        ("resolve", 1, "rank 1 on node 1: TypeError: leaked"),
        ("make_folder", 0, "rank 0 on node 0: TypeError: leaked"),
    ],
)
def test_an_error_that_no_code_expects_ends_all_of_them(method, rank, reason, tmp_path):
    """Before a run has begun, without a launcher that would end the others."""

    def leak(*_):
        raise TypeError("leaked")

    def program():
        if os.environ["RANK"] == str(rank):
            setattr(Benchmark, method, leak)
        return run(tmp_path, *FIVE_STEPS)

    with forked_ranks(program, tmp_path, num_nodes=2) as ranks:
        assert exit_codes(ranks, timeout_s=END_WITHIN_S) == [1, 1]
    printed = [log_of(tmp_path, number).read_text() for number in range(2)]
    assert printed[0].endswith(f"error: {reason}\n")
    assert ["Traceback" in text for text in printed] == [number == rank for number in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [0, 1])
def test_one_that_waits_for_another_obeys_its_launcher(tmp_path, waiting):
    def program():
        if os.environ["RANK"] != str(waiting):
            time.sleep(END_WITHIN_S)
        return run(tmp_path, *FIVE_STEPS)

    with forked_ranks(program, tmp_path) as ranks:
        time.sleep(STARTS_WITHIN_S)
        ranks[waiting].terminate()
        ranks[waiting].join(STARTS_WITHIN_S)
        assert ranks[waiting].exitcode == 130, log_of(tmp_path, waiting).read_text()


@pytest.mark.slow
def test_nodes_that_choose_different_settings_end_with_a_record_that_names_them(tmp_path):
    def program():
        flags = ((), ("avx512_bf16",))[int(os.environ["RANK"])]
        hardware.read_cpu = lambda: ("CPU", flags)
        return run(tmp_path, *FIVE_STEPS)

    with forked_ranks(program, tmp_path, num_nodes=2) as ranks:
        assert exit_codes(ranks, timeout_s=END_WITHIN_S) == [1, 1]
    record = only_record(tmp_path)
    assert record["status"] == "failed"
    difference = "--precision: 'fp32' on rank 0 on node 0, 'amp_bf16' on rank 1 on node 1"
    assert difference in record["reason"]
    assert difference in log_of(tmp_path, 0).read_text()
    assert log_of(tmp_path, 1).read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_killed_ends_the_run_and_the_record_says_why(tmp_path, rank):
    with forked_ranks(lambda: run(tmp_path, *LONG), tmp_path) as ranks:
        wait_for_step(log_of(tmp_path, 0))
        ranks[rank].kill()
        codes = exit_codes(ranks, timeout_s=END_WITHIN_S)
    assert codes == ([-signal.SIGKILL, 1] if rank == 0 else [1, -signal.SIGKILL])
    record = only_record(tmp_path)
    assert (record["status"], record["summary"]) == ("failed", None)
    assert f"rank {rank} on node 0 has been silent" in record["reason"]
