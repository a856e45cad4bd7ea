"""Weights are drawn once, from the distributions of their modules, and without a second model."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sdbench.models.architecture import resolve_architecture
from sdbench.models.components import class_of_part, make_part
from sdbench.models.diffusion import build_model, make_encoder
from sdbench.models.weights import Weights, draw_weights

TINY = resolve_architecture("tiny")


def make_by_constructor(part: str) -> nn.Module:
    """The sub-model as diffusers and transformers make it when nobody interferes."""
    torch.manual_seed(5)
    if part == "text_encoder":
        kind = class_of_part(part, TINY.family)
        return kind(kind.config_class(**TINY.parts["text_encoder"]))
    return class_of_part(part, TINY.family).from_config(TINY.parts[part])


def is_uniform(weight: torch.Tensor) -> bool:
    return (weight.abs().max() / weight.std()).item() < 2.2


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """While the test runs, memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("part", TINY.modules)
def test_weights_have_the_distributions_of_the_constructor(part, nan_in_fresh_memory) -> None:
    drawn = make_part(part, TINY, weights=Weights(seed=3))
    expected = make_by_constructor(part)
    others = dict(expected.named_parameters())
    assert dict(drawn.named_parameters()).keys() == others.keys()
    num_compared = 0
    for name, weight in drawn.named_parameters():
        other = others[name]
        assert weight.shape == other.shape and weight.isfinite().all(), name
        if other.min() == other.max():  # norms and biases that begin at 0 or 1
            assert torch.equal(weight, other), name
        elif weight.numel() >= 512:
            # The deviation of 512 draws is known to 3 %; the largest of them is 1.7 deviations of
            # a uniform distribution, and 3 or more of a normal one.
            assert weight.std().item() == pytest.approx(other.std().item(), rel=0.2), name
            assert is_uniform(weight) == is_uniform(other), name
            num_compared += 1
    assert num_compared > 10
    buffers = dict(expected.named_buffers())
    for name, buffer in drawn.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def make_wide_layer(num_threads: int, *, seed: int = 3) -> nn.Linear:
    """A layer of two and a half blocks, and its bias, drawn by so many threads."""
    with torch.device("meta"):
        layer = nn.Linear(1024, 640)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        draw_weights(layer, Weights(seed=seed))
    finally:
        torch.set_num_threads(before)
    return layer


def test_the_numbers_depend_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    one, three = make_wide_layer(1), make_wide_layer(3)
    assert torch.equal(one.weight, three.weight) and torch.equal(one.bias, three.bias)
    assert not torch.equal(one.weight, make_wide_layer(1, seed=4).weight)
    assert torch.equal(torch.get_rng_state(), state)
    # What DRAWING 3 is: a generator for each block, with seeds one after the other, by the names of
    # the weights.
    first = random.Random(3).getrandbits(32)
    blocks = one.weight.flatten().split(2**18)
    assert [len(block) for block in blocks] == [2**18, 2**18, 2**17]
    bound = 1 / 1024**0.5
    for number, block in enumerate((one.bias, *blocks)):
        generator = torch.Generator().manual_seed((first + number) % 2**32)
        expected = torch.empty(len(block)).uniform_(-bound, bound, generator=generator)
        assert torch.equal(block, expected)


def test_a_library_that_draws_weights_twice_or_in_another_order_draws_the_same() -> None:
    def draw(initialize) -> nn.Sequential:
        with torch.device("meta"):
            layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        draw_weights(layers, Weights(seed=3), initialize=initialize)
        return layers

    def once(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=0.5)
            module.bias.normal_()

    def twice(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.normal_()
        else:
            for layer in reversed(module):
                layer.bias.normal_()
                layer.weight.normal_(std=0.5)

    one, other = draw(once), draw(twice)
    for name, weight in one.named_parameters():
        assert torch.equal(weight, other.get_parameter(name)), name
    assert len({weight.std().item() for weight in one.parameters()}) == 4


def test_half_precision_rounds_the_same_numbers() -> None:
    build = functools.partial(build_model, TINY, seed=3, memory_format="channels_last")
    exact = dict(build().named_parameters())
    for name, weight in build(precision="bf16", encoder_dtype="fp16").named_parameters():
        half = torch.bfloat16 if name.startswith("unet.") else torch.float16
        assert weight.dtype == half and torch.equal(weight, exact[name].to(half)), name
        assert weight.stride() == exact[name].stride(), name


class DevicesOfDraws(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.normal_, torch.ops.aten.uniform_):
            self.found.add(args[0].device.type)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_encoders_are_the_same_wherever_they_are(device, part) -> None:
    """They are in no checkpoint, so that an export on another machine has to draw the same."""
    with DevicesOfDraws() as draws:
        encoder = make_encoder(part, TINY, seed=3, dtype=torch.bfloat16, device=device)
    # Modules that are made on the meta device draw nothing there.
    assert draws.found - {"meta"} == {"cpu"}
    assert all(weight.device.type == device for weight in encoder.parameters())


def test_drawing_in_half_precision_takes_no_second_model(monkeypatch) -> None:
    in_fp32, place = [], Weights.place

    def note(weights: Weights, part: nn.Module) -> None:
        in_fp32.append(sum(weight.nbytes for weight in part.parameters()))
        place(weights, part)

    monkeypatch.setattr(Weights, "place", note)
    unet = make_part("unet", TINY, weights=Weights(seed=3, dtype=torch.bfloat16))
    own_bytes = sum(weight.nbytes for weight in unet.parameters())
    assert own_bytes == 933_508 * 2 and sum(in_fp32) == 2 * own_bytes
    # The largest part is a tenth of the miniature, and the only one in fp32 at its time.
    assert max(in_fp32) < 0.5 * own_bytes
