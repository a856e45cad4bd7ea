"""What engines do on a GPU alone: copies on a side stream, and a whole step as one CUDA graph."""

from __future__ import annotations

import pytest
import torch

from sdbench.engines import ENGINES, load_engine
from tests.engines.linear import (
    BATCH_SIZE,
    NUM_STEPS,
    CountingLoader,
    Pairs,
    losses_of,
    make_config,
    make_parts,
    train_by_hand,
    watch_with,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("encode_ahead", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_batches_that_travel_on_a_side_stream_are_the_same_and_none_too_many(engine, encode_ahead):
    loader = CountingLoader(Pairs(), batch_size=BATCH_SIZE, pin_memory=True)
    config = make_config(copy_stream="side", encode_ahead=encode_ahead)
    job = make_parts(loader=loader, prepare=lambda batch: {n: 1 * t for n, t in batch.items()})
    measurements = load_engine(engine)(job, config, watch_with())
    assert losses_of(measurements) == pytest.approx(train_by_hand()[0], rel=1e-4)
    assert measurements.num_images == BATCH_SIZE * NUM_STEPS


def test_a_replayed_step_does_what_the_step_does():
    # Two steps are run, the third is captured; from the fourth on the schedule halves the rate.
    weights, losses = [], []
    for cuda_graph in (False, True):

        def make_optimizer(groups, capturable=cuda_graph):
            return torch.optim.AdamW(groups, fused=True, capturable=capturable)

        job = make_parts(make_optimizer=make_optimizer)
        fit = load_engine("torch")
        losses.append(losses_of(fit(job, make_config(cuda_graph=cuda_graph), watch_with())))
        weights.append(job.model.unet.weight.detach())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(weights[1], weights[0])
