"""Blocks that are compiled one by one share their codes, of which torch keeps enough."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from sdbench.models.blocks import compile_blocks

NUM_SHAPES = 25  # of a step of SD2


class SmallBlock(ResnetBlock2D):
    """A block without weights, which is compiled at once."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x):
        """The double."""
        return 2 * x


@pytest.fixture
def counted(monkeypatch):
    """What torch.compile is given is traced, and not compiled; the sizes of each are kept."""
    sizes, compile_any = [], torch.compile

    def backend(graph, inputs):
        sizes.append(len(inputs[-1]))
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda *args, mode, **kw: compile_any(*args, backend=backend, **kw)
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield sizes
    torch._dynamo.reset()


def test_training_and_validation_with_a_smaller_last_batch_each_keep_their_codes(counted):
    model = nn.Sequential(SmallBlock())
    compile_blocks(model, mode="default")
    last = [*range(1, NUM_SHAPES + 1)]
    whole = [size + NUM_SHAPES for size in last]
    for _ in range(2):
        for sizes, is_training in ((whole, True), (last, True), (whole, False), (last, False)):
            model.train(is_training)
            for size in sizes:
                with torch.set_grad_enabled(is_training):
                    model(torch.ones(size, requires_grad=True))
    assert counted == [*whole, *last] * 2
