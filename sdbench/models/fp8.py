"""Products of linear layers in fp8, by torchao."""

from __future__ import annotations

from torch import nn

from sdbench.base.errors import ConfigError

# torch._scaled_mm takes matrices whose sides are multiples of it.
FP8_SIDE = 16


def use_fp8(module: nn.Module, *, blocks: tuple[type[nn.Module], ...]) -> None:
    """Let the linear layers of `blocks` multiply in fp8, in place; their weights stay as they are.

    Each product rounds both sides to fp8 with one scale a tensor: e4m3, gradients e5m2. A CPU only
    rounds: it multiplies in the type of the input.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    emulate = next(module.parameters()).device.type == "cpu"
    # Tokens of a batch need not be a multiple of FP8_SIDE.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    for block in [one for one in module.modules() if isinstance(one, blocks)]:
        convert_to_float8_training(
            block,
            config=config,
            module_filter_fn=lambda layer, _: (
                layer.in_features % FP8_SIDE == layer.out_features % FP8_SIDE == 0
            ),
        )
    if not any(isinstance(one, Float8Linear) for one in module.modules()):
        raise ConfigError(
            f"no linear layer of this model has sides that are multiples of {FP8_SIDE}",
            value="fp8",
            allowed="same, or a larger --model_name",
            flag="--linear_dtype",
        )
