"""Linear layers that multiply in fp8: products, gradients, and where they are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdbench.base.errors import ConfigError
from sdbench.models.fp8 import use_fp8
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import parse_request
from sdbench.settings.rules import settle
from tests.machines import make_cpu_machine, make_machine

# Two tokens of a batch of five: no multiple of 16.
NUM_TOKENS, IN, OUT = 10, 32, 48


def rounded(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The numbers of fp8 that are nearest when the largest is the largest of the format."""
    scale = torch.finfo(kind).max / x.detach().abs().max().double()
    return ((x.detach().double() * scale).float().to(kind).double() / scale).float()


def test_both_sides_of_each_product_are_rounded_with_a_scale_of_the_tensor():
    torch.manual_seed(5)
    block = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    weight = block[0].weight
    use_fp8(block, blocks=(nn.Sequential,))
    assert block[0].weight is weight and weight.dtype is torch.float32
    x = torch.randn(NUM_TOKENS, IN, requires_grad=True)
    gradient = torch.randn(NUM_TOKENS, OUT)
    output = block(x)
    output.backward(gradient)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    of_x, of_weight, of_output = rounded(x, e4m3), rounded(weight, e4m3), rounded(gradient, e5m2)
    # The type of the input has 24 bits.
    torch.testing.assert_close(output, of_x @ of_weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, of_output @ of_weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad, of_output.T @ of_x, rtol=1e-5, atol=1e-5)
    # 3 bits of a fraction: a product of two roundings is wrong by more than that of fp32 is.
    assert not torch.allclose(output, x @ weight.T, rtol=1e-3)


def test_only_layers_in_blocks_whose_sides_are_multiples_of_16():
    inside = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 24))
    model = nn.ModuleList([inside, nn.Linear(32, 32)])
    use_fp8(model, blocks=(nn.Sequential,))
    kinds = [type(layer) is nn.Linear for layer in (*inside, model[1])]
    assert kinds == [False, True, True]
    with pytest.raises(ConfigError, match="--linear_dtype"):
        use_fp8(nn.Sequential(nn.Linear(24, 24)), blocks=(nn.Sequential,))


@pytest.mark.parametrize(
    ("machine", "others", "is_taken"),
    [
        (make_machine(compute_capability="9.0"), "--precision bf16", True),
        (make_machine(compute_capability="8.9"), "--precision amp_bf16", True),
        (make_machine(compute_capability="8.0"), "--precision bf16", False),  # an A100
        (make_cpu_machine(), "--precision bf16", True),
        (make_cpu_machine(), "--precision fp32", False),
        (make_cpu_machine(), "--precision bf16 --lora_rank 4", False),
    ],
)
def test_what_cannot_multiply_so_is_refused_by_name(machine, others, is_taken):
    request = parse_request(["--linear_dtype", "fp8", *others.split()], description="", epilog="")
    if is_taken:
        config, _ = settle(request, machine=machine, ranks=Ranks(0, 1, 0, 1))
        assert config.linear_dtype == "fp8"
    else:
        with pytest.raises(ConfigError, match="--linear_dtype"):
            settle(request, machine=machine, ranks=Ranks(0, 1, 0, 1))
