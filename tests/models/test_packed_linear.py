"""Linear layers with packed weights equal torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sdbench.models.packed_linear import PackedLinear, pack_linear_layers

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="a processor without bf16"
)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 77, 40), (3, 40), (200, 40)])
def test_the_numbers_are_torchs(shape, has_bias):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(40, 24, bias=has_bias), nn.GELU()).bfloat16()
    plain.requires_grad_(False)
    packed = copy.deepcopy(plain)
    pack_linear_layers(packed)
    assert type(packed[0]) is PackedLinear
    assert list(packed.state_dict()) == list(plain.state_dict())
    x = torch.randn(shape).bfloat16()
    found, expected = packed(x), plain(x)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)
