"""Blocks that are compiled one by one."""

from __future__ import annotations

import torch
from torch import nn

from sdbench.models.architecture import resolve_architecture
from sdbench.models.blocks import COMPILED_BLOCKS, compile_blocks
from sdbench.models.components import make_unet
from sdbench.models.weights import Weights


def test_blocks_with_the_same_shapes_share_their_code(monkeypatch) -> None:
    compile_module = nn.Module.compile
    unet = make_unet(resolve_architecture("tiny")[0], weights=Weights(seed=0))
    blocks = [module for module in unet.modules() if isinstance(module, COMPILED_BLOCKS)]
    shapes = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        weights = [weight.shape for weight in module.parameters()]
        shapes.append((type(module), tuple(weights), tuple(inputs[0].shape)))

    @torch.no_grad()
    def predict() -> torch.Tensor:
        return unet(latents, torch.zeros(2), states).sample

    latents, states = torch.randn(2, 4, 16, 16), torch.randn(2, 77, 32)
    hooks = [block.register_forward_pre_hook(note) for block in blocks]
    expected = predict()
    for hook in hooks:
        hook.remove()
    assert len(shapes) == len(blocks) == 24

    # Without the code generator, which takes minutes and has no part in what is shared.
    def compile_eagerly(module: nn.Module, *, mode: str, dynamic: bool) -> None:
        compile_module(module, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(unet, mode="default")
    torch.testing.assert_close(predict(), expected)
    # Those of the same shapes whose inputs lie differently in memory may have codes of their own.
    num_codes = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert len(set(shapes)) == 15 and 15 <= num_codes <= 18
    torch._dynamo.reset()
