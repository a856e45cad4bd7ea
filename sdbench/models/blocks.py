"""Faster implementations of blocks of denoiser and VAE."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from sdbench.models.weights import change_class

# A step of SD2 has 25 different kinds and shapes, all compiled for `Module._call_impl`. A smaller
# last micro-batch, a validation (evaluation mode, no gradients) and its smaller last batch add as
# many each: 100. torch keeps 8 by default and at most 256 (accumulated_recompile_limit), and runs
# further ones without compiling.
MAX_COMPILED_BLOCKS = 256

# Scores of a head (queries x keys): those of all pixels of SD2's largest level at 256 px.
MAX_EAGER_SCORES = 1024 * 1024

# Operations that take most of the time of a block. Their results are some of its activations.
PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


class KernelAttnProcessor(AttnProcessor2_0):
    """torch's scaled dot product attention, restricted to one kernel."""

    def __init__(self, kernel: SDPBackend) -> None:
        super().__init__()
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention; a RuntimeError if the kernel does not support these inputs."""
        with sdpa_kernel(self._kernel):
            return super().__call__(*args, **kwargs)


class ByShapeAttnProcessor(AttnProcessor2_0):
    """Eager matrices for few queries and keys, torch's choice of kernel for many.

    torch's kernel for a CPU saves memory, and takes up to three times as long in the backward pass:
    the attention to 77 tokens, and of up to 1024 pixels to one another, is faster as products.
    """

    def __init__(self) -> None:
        super().__init__()
        self._eager = AttnProcessor()

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Compute attention of (B, queries, C) to itself or to (B, keys, D)."""
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        is_small = hidden_states.shape[1] * keys.shape[1] <= MAX_EAGER_SCORES
        attend = self._eager if is_small else super().__call__
        return attend(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


class _Unit:
    """A divisor of 1: ``tensor / unit`` returns the tensor and runs no kernel."""

    def __rtruediv__(self, tensor: Tensor) -> Tensor:
        return tensor


def drop_unit_divisions(model: nn.Module) -> None:
    """Remove the divisions by 1.0 after each attention and residual block of a model, in place.

    diffusers divides by a scale that is 1.0 in every Stable Diffusion: 110 kernels and 0.28 GB of
    traffic an image in a forward and backward pass of SD2's U-Net at 512 px without compilation.
    """
    for module in model.modules():
        if isinstance(module, ResnetBlock2D) and module.output_scale_factor == 1.0:
            module.output_scale_factor = _Unit()
        elif isinstance(module, Attention) and module.rescale_output_factor == 1.0:
            module.rescale_output_factor = _Unit()


class _LayoutKeepingTransformer(Transformer2DModel):
    """A transformer on images (B, C, H, W) whose output has the layout of its input."""

    def _get_output_for_continuous_inputs(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        batch_size: int,
        height: int,
        width: int,
        inner_dim: int,
    ) -> Tensor:
        """The method of diffusers without its `contiguous()`: the view is channels_last."""
        sizes = (batch_size, height, width, inner_dim)
        if self.use_linear_projection:
            return self.proj_out(hidden_states).reshape(sizes).permute(0, 3, 1, 2) + residual
        return self.proj_out(hidden_states.reshape(sizes).permute(0, 3, 1, 2)) + residual


class _LayoutKeepingBlock(ResnetBlock2D):
    """A residual block without scaling of images, whose shortcut has the layout of its input."""

    def forward(self, input_tensor: Tensor, temb: Tensor | None, *_: Any, **__: Any) -> Tensor:
        """The sum of the block's images (B, C, H, W), with time embedding (B, D), and shortcut."""
        x = self.conv1(self.nonlinearity(self.norm1(input_tensor)))
        if temb is not None and self.time_emb_proj is not None:
            times = temb if self.skip_time_act else self.nonlinearity(temb)
            x = x + self.time_emb_proj(times)[:, :, None, None]
        x = self.conv2(self.dropout(self.nonlinearity(self.norm2(x))))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        return (input_tensor + x) / self.output_scale_factor


class _LayoutKeepingUpsample(Upsample2D):
    """Twice the height and width, or a given size, by nearest pixels, then a convolution."""

    def forward(
        self, hidden_states: Tensor, output_size: tuple[int, int] | None = None, *_: Any, **__: Any
    ) -> Tensor:
        """Enlarge images (B, C, H, W)."""
        if output_size is not None:
            x = nn.functional.interpolate(hidden_states, size=output_size, mode="nearest")
            return self.conv(x)
        # Each pixel four times. The gradient is a sum of four; compiled, that of `interpolate` adds
        # each pixel to zeros in fp32 by atomic operations.
        x = hidden_states.permute(0, 2, 3, 1)[:, :, None, :, None]
        x = x.expand(-1, -1, 2, -1, 2, -1).flatten(3, 4).flatten(1, 2)
        return self.conv(x.permute(0, 3, 1, 2))


def keep_layout(unet: nn.Module) -> None:
    """Keep channels_last images in a U-Net, in place.

    diffusers makes three things contiguous: the output of transformers, in training the input of
    the shortcuts of residual blocks, and from 64 images on the input of upsampling. Sums,
    concatenations and activations after them then have operands of two layouts. torch's CPU kernels
    take those one by one: its gradient of SiLU ran at a sixth of the speed. Compiled kernels turn
    images (results/limits.md).
    """
    for module in unet.modules():
        if type(module) is Transformer2DModel:
            change_class(module, _LayoutKeepingTransformer)
        elif type(module) is ResnetBlock2D and not (module.up or module.down):
            if module.time_embedding_norm == "default":
                change_class(module, _LayoutKeepingBlock)
        elif type(module) is Upsample2D and module.use_conv and module.norm is None:
            change_class(module, _LayoutKeepingUpsample)


def _normalize(
    x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, silu: bool
) -> Tensor:
    """GroupNorm, and SiLU if `silu`, computed in fp32, in the input's type and layout.

    torch's CUDA kernel turns channels_last into contiguous. The statistics are taken of each
    channel, then of its group: in channels_last a group is a few neighbouring channels, 20 bytes of
    640 in SD2's first level, and a sum over a group would read only these of each line.
    """
    numbers = x.float()
    of_pixels = tuple(range(2, x.ndim))
    variances, means = (
        one.unflatten(1, (num_groups, -1))
        for one in torch.var_mean(numbers, dim=of_pixels, correction=0, keepdim=True)
    )
    mean = means.mean(2, keepdim=True)
    variance = (variances + (means - mean).square()).mean(2, keepdim=True)
    scale, offset = (
        one.expand_as(means).flatten(1, 2) for one in (torch.rsqrt(variance + eps), mean)
    )
    scale = scale * weight.float()
    result = numbers * scale + (bias.float() - offset * scale)
    if silu:
        result = nn.functional.silu(result)
    return result.to(x.dtype)


@functools.cache
def _compiled_normalize() -> Callable[..., Tensor]:
    """`_normalize` compiled for all sizes; on first use, since the compiler takes seconds."""
    return torch.compile(_normalize, dynamic=True)


class FusedGroupNorm(nn.GroupNorm):
    """GroupNorm in compiled code, with the SiLU that follows it."""

    silu = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, C, ...) over groups of channels."""
        # As views: torch compiles anew for each size of a parameter.
        shape = (1, -1, *(1,) * (x.ndim - 2))
        weight, bias = self.weight.view(shape), self.bias.view(shape)
        # Within a compiled model it is part of that graph. torch.compile there would break the
        # graph if Lightning, which puts its own in its place, was imported after the first use.
        normalize = _normalize if torch.compiler.is_compiling() else _compiled_normalize()
        return normalize(x, weight, bias, self.num_groups, self.eps, self.silu)


class _SiluOfVectors(nn.SiLU):
    """SiLU for time embeddings (B, C); images (B, C, H, W) got theirs in the norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.ndim == 4 else super().forward(x)


def fuse_group_norms(model: nn.Module) -> None:
    """Fuse each GroupNorm and the SiLU after it, in a U-Net or VAE of diffusers, in place."""
    for module in model.modules():
        if type(module) is nn.GroupNorm:
            change_class(module, FusedGroupNorm)
    for module in model.modules():
        if isinstance(module, ResnetBlock2D) and isinstance(module.nonlinearity, nn.SiLU):
            module.norm1.silu = module.norm2.silu = True
            module.nonlinearity = _SiluOfVectors()
        norm, activation = getattr(module, "conv_norm_out", None), getattr(module, "conv_act", None)
        if isinstance(norm, FusedGroupNorm) and isinstance(activation, nn.SiLU):
            norm.silu = True
            module.conv_act = nn.Identity()


def checkpoint_activations(
    denoiser: Any,
    *,
    which: str,
    transformers: tuple[type[nn.Module], ...],
    recompute: Callable[[], AbstractContextManager[Any]] | None = None,
) -> None:
    """Recompute activations of a denoiser in the backward pass instead of keeping them.

    `which` is ``none``, ``transformer`` (the blocks in `transformers`, with most of the
    activations), ``full`` (all blocks) or ``cheap`` (all blocks, whose `PRODUCTS` are kept).
    `recompute` makes the context around each recomputed block; not with torch.compile.
    """
    if which == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if which == "cheap":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
    if recompute is not None:
        contexts = settings.get("context_fn", lambda: (contextlib.nullcontext(),) * 2)
        settings["context_fn"] = lambda: _add_context(*contexts(), recompute())
    denoiser.enable_gradient_checkpointing(
        gradient_checkpointing_func=functools.partial(torch.utils.checkpoint.checkpoint, **settings)
    )
    if which == "transformer":
        for module in denoiser.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = isinstance(module, transformers)


def _add_context(forward: Any, again: Any, other: Any) -> tuple[Any, Any]:
    """Contexts of a block and of its recomputation, the latter within another one."""

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with other, again:
            yield

    return forward, both()


def allow_compiled(num_shapes: int) -> None:
    """Let torch compile blocks for each shape of pictures; beyond the bound it fails."""
    limits = torch._dynamo.config
    limits.recompile_limit = MAX_COMPILED_BLOCKS * num_shapes
    limits.accumulated_recompile_limit = max(
        limits.accumulated_recompile_limit, limits.recompile_limit
    )
    limits.fail_on_recompile_limit_hit = True


def compute_again() -> None:
    """Let Inductor compute a small intermediate in each kernel that uses it, and not store it.

    By default it stores one that takes more than 4 tensors or 30 operations. In the backward pass
    of GroupNorm and SiLU two kernels use such a one, of 7 tensors: in bf16 it was stored in fp32,
    twice the size of the tensors that it is made of. tools/compiled_step.py counts the bytes.
    """
    import torch._inductor.config

    torch._inductor.config.realize_reads_threshold = 8
    torch._inductor.config.realize_opcount_threshold = 60


def compile_blocks(model: nn.Module, *, kinds: tuple[type[nn.Module], ...], mode: str) -> None:
    """Compile each block of a sub-model in place; blocks of one kind and shape share their code."""
    for module in model.modules():
        if isinstance(module, kinds):
            module.compile(mode=mode, dynamic=False)
