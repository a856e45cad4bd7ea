"""A rank that is slow, wherever it is, is named: really slow, on two ranks, with every engine."""

from __future__ import annotations

import functools
import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from sdbench.engines import load_engine
from sdbench.engines.optimizers import make_optimizer
from sdbench.measure.summary import merge_measurements, summarize
from sdbench.ranks.distributed import Ranks, gather
from tests.engines.linear import (
    BATCH_SIZE,
    SCHEDULE,
    LinearModel,
    Pairs,
    make_config,
    make_parts,
    watch_of,
)
from tests.forked import NUM_RANKS, run_in_group

# A profiled step of the linear model takes some milliseconds.
SLEEP_S = 0.5
# What the advice looks at where no rank is slow.
FAST = {"preset": "fast", "optimizer": "adamw_fused", "profile_trace": False}
# The phase in which a rank is slow, by where it sleeps.
PLACES = {
    "loader": "data_wait",
    "forward": "unet_forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "schedule": "other",  # of the host, in Composer behind the average of the losses
    "observer": "other",  # of the host, when the step has ended
}
# Each place once, each engine and each rank.
CASES = [
    ("torch", "none", "loader", 1),
    ("composer", "none", "forward", 0),
    ("torch", "none", "backward", 0),
    ("composer", "none", "optimizer", 1),
    ("composer", "none", "schedule", 0),
    ("ray", "none", "observer", 1),
    ("torch", "zero1", "optimizer", 0),
    ("ray", "full", "loader", 0),
    ("composer", "full", "optimizer", 1),
]


class WithBuffer(LinearModel):
    """Has a constant, as the text encoder does: nobody is to wait for one to be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position_ids", torch.arange(77))


def train(engine, sharding, place):
    """Train four steps, the last one profiled and with a sleep in a place of this rank, if any."""
    ranks, naps = Ranks.from_environment(), iter([SLEEP_S])

    def nap(where):
        if where == place and watch.phases.is_running:
            time.sleep(next(naps, 0))

    def slow(where, function):
        def slowed(*args, **kwargs):
            nap(where)
            return function(*args, **kwargs)

        return slowed

    observer = SimpleNamespace(loop_begins=lambda: None, step_ends=lambda **_: nap("observer"))
    watch = watch_of(2, 1, 1, num_steps=4, observers=[observer])
    config = make_config(sharding=sharding, optimizer="adamw")
    job = make_parts(
        model=WithBuffer(),
        num_ranks=ranks.world_size,
        rank=ranks.rank,
        schedule=slow("schedule", SCHEDULE.__getitem__),
        make_optimizer=functools.partial(make_optimizer, config=config),
    )
    forward = watch.phases.phase("unet_forward")(slow("forward", job.model.unet.forward))
    job.model.unet.forward = forward
    with pytest.MonkeyPatch.context() as patch:
        adam = sys.modules["torch.optim.adam"]
        patch.setattr(adam, "adam", slow("optimizer", adam.adam))
        patch.setattr(torch.Tensor, "backward", slow("backward", torch.Tensor.backward))
        patch.setattr(Pairs, "__getitem__", slow("loader", Pairs.__getitem__))
        return load_engine(engine)(job, config, watch)


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
    """The figures of each case, and the phases of both ranks."""
    folder = tmp_path_factory.mktemp("slow")

    def run(rank):
        found = []
        for engine, sharding, place, slow_rank in CASES:
            own = train(engine, sharding, place if rank == slow_rank else None)
            merged = merge_measurements(gather(own, Ranks.from_environment()))
            summary = summarize(
                merged,
                config={"batch_size": BATCH_SIZE, **FAST},
                num_devices=NUM_RANKS,
                ranks_per_node=NUM_RANKS,
                flops_per_image=1.0,
                peak_tflops=None,
            )
            found.append((summary, merged.rank_phases))
        if rank == 0:
            (folder / "found.json").write_text(json.dumps(found))

    run_in_group(run, folder)
    return dict(zip(CASES, json.loads((folder / "found.json").read_text()), strict=True))


@pytest.mark.parametrize(("engine", "sharding", "place", "rank"), CASES)
def test_a_slow_rank_is_named_and_not_the_one_that_waits_for_it(
    engine, sharding, place, rank, summaries
):
    summary, phases = summaries[engine, sharding, place, rank]
    named = [(one["rank"], one["slow_phase"]) for one in summary["stragglers"]]
    assert named == [(rank, PLACES[place])]
    assert "straggler" in summary["flags"]
    assert summary["stragglers"][0]["own_step_time_s"] >= SLEEP_S
    assert f"rank {rank} on node 0" in summary["bottleneck"]
    assert "batch" not in summary["bottleneck"]
    # What one sleeps the other waits, which is no communication of gradients.
    other = phases[1 - rank]
    assert other["gradient_communication"] + other["rank_wait"] > 0.5 * SLEEP_S
    seconds = summary["breakdown"]["seconds"]
    assert seconds["rank_wait"] > 0.5 * SLEEP_S / NUM_RANKS
    assert seconds["gradient_communication"] < 0.5 * SLEEP_S
