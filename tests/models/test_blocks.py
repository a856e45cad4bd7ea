"""Blocks of the U-Net: those for a CPU compute diffusers' numbers; compiled ones share code."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from sdbench.models import blocks


@pytest.mark.parametrize(("num_queries", "num_keys"), [(6, None), (9, 77), (8, 8), (7, 9), (10, 7)])
def test_attention_is_eager_up_to_so_many_scores(num_queries, num_keys, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_EAGER_SCORES", 64)
    torch.manual_seed(0)
    attention = Attention(
        query_dim=8, cross_attention_dim=None if num_keys is None else 5, heads=2, dim_head=4
    )
    x = torch.randn(3, num_queries, 8)
    states = None if num_keys is None else torch.randn(3, num_keys, 5)
    attention.set_processor(AttnProcessor2_0())
    expected = attention(x, encoder_hidden_states=states)
    kernel, calls = nn.functional.scaled_dot_product_attention, []
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs),
    )
    attention.set_processor(blocks.ByShapeAttnProcessor())
    found = attention(x, encoder_hidden_states=states)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    num_scores = num_queries * (num_queries if num_keys is None else num_keys)
    assert len(calls) == (num_scores > 64)


@pytest.mark.parametrize("use_linear_projection", [False, True])
def test_a_transformer_hands_on_the_layout_that_it_gets(use_linear_projection):
    torch.manual_seed(0)
    plain = nn.Sequential(
        Transformer2DModel(
            num_attention_heads=2,
            attention_head_dim=4,
            in_channels=8,
            norm_num_groups=2,
            use_linear_projection=use_linear_projection,
        )
    ).to(memory_format=torch.channels_last)
    keeping = copy.deepcopy(plain)
    blocks.keep_layout(keeping)
    assert list(keeping.state_dict()) == list(plain.state_dict())
    x = torch.randn(2, 8, 5, 3).to(memory_format=torch.channels_last)
    expected, found = plain(x).sample, keeping(x).sample
    # Without linear layers a convolution is the last, which goes by its weights.
    is_kept = not use_linear_projection
    assert expected.is_contiguous(memory_format=torch.channels_last) == is_kept
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "size", "beside"),
    [
        # In training, and with a convolution as its shortcut.
        (
            lambda: ResnetBlock2D(in_channels=8, out_channels=12, temb_channels=5, groups=2),
            (2, 8, 5, 3),
            torch.ones(2, 5),
        ),
        (lambda: Upsample2D(8, use_conv=True, out_channels=12), (64, 8, 2, 3), None),
        (lambda: Upsample2D(8, use_conv=True), (64, 8, 2, 3), (5, 7)),
    ],
    ids=["residual block", "upsampling of 64 images", "upsampling to a size"],
)
def test_convolutions_of_a_block_get_the_layout_that_the_block_gets(make, size, beside):
    torch.manual_seed(0)
    plain = nn.Sequential(make()).to(memory_format=torch.channels_last)
    keeping = copy.deepcopy(plain)
    blocks.keep_layout(keeping)
    assert list(keeping.state_dict()) == list(plain.state_dict())
    content = torch.randn(size)

    def look(block: nn.Module) -> tuple[tuple[Tensor, Tensor], bool]:
        image = content.to(memory_format=torch.channels_last).requires_grad_()
        is_kept = []

        def see(_: nn.Module, given: tuple[Tensor]) -> None:
            is_kept.append(given[0].is_contiguous(memory_format=torch.channels_last))

        for part in block.modules():
            if isinstance(part, nn.Conv2d):
                part.register_forward_pre_hook(see)
        result = block(image, beside)
        result.square().mean().backward()
        return (result, image.grad), all(is_kept)

    (expected, plain_keeps), (found, keeps) = look(plain[0]), look(keeping[0])
    assert (plain_keeps, keeps) == (False, True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_fused_norm_is_in_the_graph_of_its_model_though_torch_compile_was_replaced(monkeypatch):
    compile_any = torch.compile
    torch._dynamo.reset()
    compile_any(lambda x: x.sin(), backend="eager")(torch.ones(3))
    # As Lightning does when it is imported.
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compile_any(*args, **kwargs))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8))
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    blocks.fuse_group_norms(model)
    compiled = compile_any(model, backend="eager", fullgraph=True)  # raises where a graph breaks
    torch.testing.assert_close(compiled(x), expected)


def test_a_fused_norm_gives_the_numbers_and_gradients_of_torchs_norm():
    torch.manual_seed(0)
    plain = ResnetBlock2D(in_channels=12, out_channels=8, temb_channels=5, groups=2)
    for norm in (plain.norm1, plain.norm2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    fused = copy.deepcopy(plain)
    blocks.fuse_group_norms(fused)
    torch._dynamo.reset()
    fused.compile(backend="eager", fullgraph=True)
    # Channels of one group differ in mean and spread.
    pictures = torch.randn(3, 12, 7, 5) * torch.rand(12, 1, 1) + 3 * torch.randn(12, 1, 1)
    found, expected = [], []
    for block, results in ((plain, expected), (fused, found)):
        x = pictures.to(memory_format=torch.channels_last).requires_grad_()
        times = torch.linspace(-1, 1, 15).view(3, 5).requires_grad_()
        output = block(x, times)
        output.square().sum().backward()
        results += [output, x.grad, times.grad, *(one.grad for one in block.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


NUM_SHAPES = 25  # of a step of SD2


class SmallBlock(ResnetBlock2D):
    """A block without weights, which is compiled at once."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x):
        return 2 * x


@pytest.fixture
def counted(monkeypatch):
    """What torch.compile is given is traced, and not compiled; the sizes of each are kept."""
    sizes = []

    def compile_fx(graph, inputs, **options):
        sizes.append(len(inputs[-1]))
        return graph.forward

    # Not torch.compile: dynamo looks it up once in a process, and would not know the real one.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield sizes
    torch._dynamo.reset()


@pytest.mark.slow
def test_training_and_validation_with_a_smaller_last_batch_each_keep_their_codes(counted):
    model = nn.Sequential(SmallBlock())
    blocks.allow_compiled(1)
    blocks.compile_blocks(model, kinds=(SmallBlock,), mode="default")
    last = [*range(1, NUM_SHAPES + 1)]
    whole = [size + NUM_SHAPES for size in last]
    for _ in range(2):
        for sizes, is_training in ((whole, True), (last, True), (whole, False), (last, False)):
            model.train(is_training)
            for size in sizes:
                with torch.set_grad_enabled(is_training):
                    model(torch.ones(size, requires_grad=True))
    assert counted == [*whole, *last] * 2
