"""Products of linear layers in fp8, by torchao."""

from __future__ import annotations

from torch import nn

from sdbench.base.errors import ConfigError


def use_fp8(module: nn.Module, *, blocks: tuple[type[nn.Module], ...]) -> None:
    """Let the linear layers of `blocks` multiply in fp8, in place; their weights stay as they are.

    Each product rounds both sides to fp8 with one scale a tensor: e4m3, gradients e5m2. A CPU only
    rounds: it multiplies in the type of the input.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    emulate = next(module.parameters()).device.type == "cpu"
    # torch._scaled_mm takes matrices whose sides are multiples of 16; tokens are filled up.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    for block in [one for one in module.modules() if isinstance(one, blocks)]:
        convert_to_float8_training(
            block,
            config=config,
            module_filter_fn=lambda one, _: one.in_features % 16 == one.out_features % 16 == 0,
        )
    if not any(isinstance(one, Float8Linear) for one in module.modules()):
        raise ConfigError(
            "no linear layer of this model has sides that are multiples of 16",
            value="fp8",
            allowed="same, or a larger --model_name",
            flag="--linear_dtype",
        )
