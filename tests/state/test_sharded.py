"""Checkpoints of two ranks with FSDP2: read by one rank, and with the fault of one."""

from __future__ import annotations

import datetime
import errno
import itertools
import json
import os
import resource
import signal
import sys
import threading
import time

import pytest
import torch

from sdbench import state
from sdbench.base.errors import RunError
from sdbench.ranks.distributed import Ranks, maximum_on_hosts
from tests.forked import NUM_RANKS, exit_codes, forked_ranks
from tests.state.states import flip_byte, make_checkpoints

NUM_BYTES = 2**22


def make_tensors(value):
    """Those of a model of which two ranks get parts of different sizes."""
    sizes = {"0.weight": (5, 3), "0.bias": (5,), "1.weight": (1, 5), "1.bias": (1,)}
    return {
        name: torch.arange(torch.Size(size).numel(), dtype=torch.float32).reshape(size) + value
        for name, size in sizes.items()
    }


def shared_out(value):
    """The tensors as two ranks hold them with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    model.load_state_dict(make_tensors(value))
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    return dict(model.named_parameters())


def in_ranks(work, folder, value, *, num_nodes=1):
    """Call `work(rank, checkpoints, value)` on two ranks, and return the largest exit code."""

    def program():
        ranks = Ranks.from_environment()
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        work(ranks.rank, make_checkpoints(folder / "run", ranks=ranks), value)
        torch.distributed.barrier()
        return 0

    with forked_ranks(program, folder, num_nodes=num_nodes) as ranks:
        return max(map(abs, exit_codes(ranks)))


def save_shared_out(rank, checkpoints, value):
    own = {f"rng.{rank}": torch.full((4,), float(rank))}
    alike = {"alike": torch.full((3,), float(value))}
    for _ in range(2):  # the second save uses the memory of the first one's copies
        checkpoints.begin_save(value, {**shared_out(value), **own, **alike}, {"rank": rank})
        checkpoints.wait_until_read()
        checkpoints.finish()
    assert [report.error for report in checkpoints.poll()] == [None, None]


def load_shared_out(rank, checkpoints, value):
    newest = checkpoints.newest()
    assert newest.step == value
    tensors = shared_out(-1)
    own = torch.zeros(4)
    newest.load_into({**tensors, f"rng.{rank}": own})
    assert torch.equal(own, torch.full((4,), float(rank)))
    for name, expected in make_tensors(value).items():
        assert torch.equal(tensors[name].full_tensor(), expected)


def test_two_ranks_save_and_one_loads_and_the_other_way_round(tmp_path):
    assert in_ranks(save_shared_out, tmp_path, 10) == 0
    alone = make_checkpoints(tmp_path / "run")
    newest = alone.newest()
    assert (newest.step, newest.facts) == (10, {"rank": 0})
    assert set(newest.tensors()) == {*make_tensors(0), "rng.0", "rng.1", "alike"}
    saved = {name: torch.empty_like(one, device="cpu") for name, one in newest.tensors().items()}
    newest.load_into(saved)
    for name, expected in make_tensors(10).items():
        assert torch.equal(saved[name], expected)
    assert [saved[f"rng.{rank}"].max() for rank in range(NUM_RANKS)] == [0, 1]
    assert torch.equal(saved["alike"], torch.full((3,), 10.0))

    alone.begin_save(20, {**saved, **make_tensors(20)}, {})
    alone.finish()
    assert in_ranks(load_shared_out, tmp_path, 20) == 0


def learn_late_on_rank_0(rank, checkpoints, value):
    may_end = threading.Event()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES // 2, resource.RLIM_INFINITY))
    else:
        remove = state.checkpoints.remove_remains
        state.checkpoints.remove_remains = lambda folder: (may_end.wait(60), remove(folder))
    tensors = {f"part.{rank}": torch.zeros(NUM_BYTES, dtype=torch.uint8)}
    checkpoints.begin_save(value, tensors, {})
    told = []
    for step in itertools.count():
        if step == 30:
            may_end.set()
        time.sleep(0.01)
        told = [(report.step, report.error) for report in checkpoints.poll()]
        if maximum_on_hosts(len(told), Ranks.from_environment()):
            break
    (checkpoints.folder.parent / f"told{rank}").write_text(json.dumps(told))


def test_all_ranks_learn_of_the_error_behind_the_same_step(tmp_path):
    assert in_ranks(learn_late_on_rank_0, tmp_path, 10) == 0
    told = [json.loads((tmp_path / "run" / f"told{rank}").read_text()) for rank in range(NUM_RANKS)]
    ((step, error),) = told[0]
    assert step == 10 and "rank 1: " in error
    assert told[1] == told[0]


def die_on_rank_1(rank, checkpoints, value):
    checkpoints.begin_save(value, {f"part.{rank}": torch.zeros(3)}, {})
    checkpoints.finish()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.begin_save(value + 10, {f"part.{rank}": torch.zeros(3)}, {})
    with pytest.raises(RunError) as caught:
        checkpoints.finish()
    (checkpoints.folder.parent / "told").write_text(str(caught.value))
    os._exit(0)  # there is nobody to say goodbye to


def test_the_death_of_a_rank_ends_the_save_and_not_the_checkpoint_before(tmp_path):
    assert in_ranks(die_on_rank_1, tmp_path, 10) == signal.SIGKILL
    assert "step 20" in (tmp_path / "run" / "told").read_text()
    assert make_checkpoints(tmp_path / "run").newest().step == 10


def save_twice(rank, checkpoints, value):
    for step in (value, value + 10):
        checkpoints.begin_save(step, {f"part.{rank}": torch.full((64,), step)}, {})
        checkpoints.finish()


def fall_back(rank, checkpoints, value):
    newest = checkpoints.newest()
    own = torch.zeros(64, dtype=torch.int64)
    newest.load_into({f"part.{rank}": own})
    assert torch.equal(own, torch.full((64,), value))
    (checkpoints.folder.parent / f"told.{rank}").write_text("\n".join(newest.passed_over))


@pytest.mark.parametrize("owner", range(NUM_RANKS))
@pytest.mark.parametrize(
    ("is_damaged", "reason"), [(True, "its checksum"), (False, "Input/output error")]
)
def test_a_file_that_one_node_cannot_read_counts_for_all(tmp_path, owner, is_damaged, reason):
    """Whichever file it is, also one that another rank has written."""
    name = f"step_00000020/__{owner}_0.distcp"

    def hook(event, arguments):
        if event == "open" and str(arguments[0]).endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), arguments[0])

    def fall_back_on_a_bad_disk(rank, checkpoints, value):
        if rank == 1 and not is_damaged:
            sys.addaudithook(hook)
        fall_back(rank, checkpoints, value)

    assert in_ranks(save_twice, tmp_path, 10, num_nodes=2) == 0
    if is_damaged:
        flip_byte(tmp_path / "run" / "checkpoints" / name)
    assert in_ranks(fall_back_on_a_bad_disk, tmp_path, 10, num_nodes=2) == 0
    told = [(tmp_path / "run" / f"told.{rank}").read_text() for rank in range(NUM_RANKS)]
    assert told[0] == told[1] and name in told[0] and reason in told[0]
