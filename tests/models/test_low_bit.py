"""Frozen linear layers of 8 or 4 bits: products, gradients, and what is stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import benchmark
from sdbench.models.low_bit import LowBitLinear, reduce_bits
from tests.refusals import printed_refusal

SHAPE = OUT, IN = 192, 256  # three times the numbers that NF4's blocks of blocks take


def make_layer(kind: str, *, bias: bool = True) -> tuple[nn.Linear, torch.Tensor]:
    """A layer of few bits, and the weight that it had."""
    torch.manual_seed(3)
    layer = nn.Linear(IN, OUT, bias=bias).requires_grad_(False)
    weight = layer.weight.clone()
    reduce_bits(nn.Sequential(layer), kind)
    assert isinstance(layer, LowBitLinear)
    return layer, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_product_and_gradient_are_those_of_the_weight_that_the_bits_stand_for(kind, dtype):
    layer, _ = make_layer(kind)
    restored, bias = layer.restored().to(dtype), layer.bias.to(dtype)
    layer.bias.data = bias
    x = torch.randn(2, 5, IN, dtype=dtype, requires_grad=True)
    gradient = torch.randn(2, 5, OUT, dtype=dtype)
    output = layer(x)
    output.backward(gradient)
    assert torch.equal(output, nn.functional.linear(x, restored, bias))
    assert torch.equal(x.grad, gradient @ restored)


def test_eight_bits_are_wrong_by_at_most_half_a_step_of_their_row():
    layer, weight = make_layer("int8")
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert (layer.restored() - weight).abs().le(steps * 0.5001).all()


def test_four_bits_are_the_nearest_of_sixteen_numbers_times_the_largest_of_each_block():
    layer, weight = make_layer("nf4")
    blocks, restored = weight.view(-1, 64), layer.restored().view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    # Its own scale is rounded to 8 bits, and the widest gap between two numbers is 0.3038.
    assert (restored.abs().amax(1, keepdim=True) / largest - 1).abs().max() < 0.01
    assert ((restored - blocks) / largest).abs().max() < 0.3038 / 2 + 0.01
    assert len({round(float(one), 3) for one in (restored / largest)[0]}) <= 16


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [
        ("int8", OUT * IN + 4 * OUT),  # a scale for each row
        # Half a byte each, a byte for the scale of 64, four for that of 256 scales; a mean, 16
        # numbers.
        ("nf4", OUT * IN // 2 + OUT * IN // 64 + 4 * (OUT * IN // 64 // 256) + 4 + 16 * 4),
    ],
)
def test_bytes_that_are_stored(kind, num_bytes):
    layer, _ = make_layer(kind, bias=False)
    assert sum(one.nbytes for one in [*layer.parameters(), *layer.buffers()]) == num_bytes


def test_a_layer_that_does_not_fill_the_blocks_stays_as_it_is():
    layer = nn.Linear(IN, OUT // 2)  # 24,576 numbers, of 16,384
    reduce_bits(nn.Sequential(layer), "nf4")
    assert type(layer) is nn.Linear


LORA = "--lora_rank 4"


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ("--frozen_bits int8", "--frozen_bits or --lora_rank"),  # nothing is frozen
        (f"{LORA} --frozen_bits nf4", "--frozen_bits"),  # no layer of `tiny` is large enough
        (f"{LORA} --frozen_bits int4", "--frozen_bits"),
    ],
)
def test_bits_that_nothing_would_have_are_refused(argv, flag, tmp_path, capsys):
    run = ("--model_name", "tiny", "--use_synth_data", "--results_dir", str(tmp_path))
    assert benchmark.main([*run, *argv.split()]) == 2
    assert printed_refusal(capsys.readouterr().err).flag == flag


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_torch_compile_takes_a_block_whole(kind):
    layer, _ = make_layer(kind)
    block = nn.Sequential(nn.Linear(IN, IN), layer)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, IN)
    gradients = []
    for one in (block, compiled):
        one.zero_grad()
        output = one(x)
        output.sum().backward()
        gradients.append(block[0].weight.grad.clone())
    torch.testing.assert_close(output, block(x))
    torch.testing.assert_close(*gradients)
