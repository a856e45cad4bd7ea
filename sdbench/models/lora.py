"""`Lora` (arXiv 2106.09685): trained matrices beside frozen linear layers, by peft."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from sdbench.base.errors import ConfigError
from sdbench.models.weights import (
    Weights,
    change_class,
    check_filled,
    fill_with_nan,
    seeded_generator,
)
from sdbench.settings.recipe import EngineConfig

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

    from sdbench.models.architecture import Architecture

TEXT_ENCODER = "text_encoder"
# Added to the seed of a model, for the denoiser and for the text encoder; see also `diffusion`.
SEED_OFFSET, TEXT_SEED_OFFSET = 3, 4
# peft has it in the names of its weights.
ADAPTER = "default"
# In the names of weights in layers with LoRA: the frozen weight, and the two matrices.
BASE, MATRICES = ".base_layer.", (f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}.")


@dataclass(frozen=True)
class Lora:
    """LoRA of a model: a layer with the weight W computes with W + alpha / rank B A.

    `layers` has sub-models and names of their linear layers, or ends of names after a dot.
    """

    rank: int
    alpha: float
    layers: tuple[tuple[str, tuple[str, ...]], ...]

    @staticmethod
    def of(config: EngineConfig, architecture: Architecture) -> Lora | None:
        """The LoRA of a training run; None if all weights are trained."""
        if config.lora_rank is None:
            return None
        layers = {architecture.family.denoiser: config.lora_layers}
        if config.train_text_encoder:
            layers[TEXT_ENCODER] = config.lora_text_encoder_layers
        return Lora(
            rank=config.lora_rank,
            alpha=config.lora_rank if config.lora_alpha is None else config.lora_alpha,
            layers=tuple((part, tuple(names.split(","))) for part, names in layers.items()),
        )

    def add_to(self, parts: Mapping[str, nn.Module], *, seed: int | None) -> None:
        """Add LoRA to sub-models on their device in place, and freeze all their other weights.

        The matrices A (rank, in) and B (out, rank) are in fp32, whatever the type of W. A is drawn
        on the CPU, as peft draws it, and B is 0: the output of the module stays as it is. The
        caller's random generators keep their state. Without a seed nothing is drawn, for fake
        tensors. A name without linear layers is a ConfigError.
        """
        for part, layers in self.layers:
            is_text = part == TEXT_ENCODER
            flag = "--lora_text_encoder_layers" if is_text else "--lora_layers"
            _check_layers(parts[part], layers, flag=flag)
            offset = TEXT_SEED_OFFSET if is_text else SEED_OFFSET
            self._add(parts[part], layers, seed=None if seed is None else seed + offset)

    def _add(self, module: nn.Module, layers: Sequence[str], *, seed: int | None) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=list(layers))
        # On the meta device: nothing is drawn, and nothing gets the type of the frozen weights.
        # peft's own way to it, low_cpu_mem_usage, fails for fake tensors.
        with torch.device("meta"):
            inject_adapter_in_model(config, module, ADAPTER)
        module.requires_grad_(False)
        with seeded_generator(seed, torch.device("cpu")):
            for layer in lora_layers(module).values():
                base = layer.get_base_layer()
                stored = next(itertools.chain(base.parameters(), base.buffers()))
                weights = Weights(seed=seed, device=stored.device)
                matrices = (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER])
                if seed is not None:
                    for matrix in matrices:
                        fill_with_nan(matrix, "cpu")
                    layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
                    for matrix in matrices:
                        check_filled(matrix)
                for matrix in matrices:
                    weights.place(matrix)
                    matrix.requires_grad_()
                    change_class(matrix, _LinearInTypeOfInput)
                layer.cast_input_dtype_enabled = False


class _LinearInTypeOfInput(nn.Linear):
    """A linear layer that computes in the type of its input, whatever the type of its weights.

    peft would bring the input to the type of the weights: the backward pass would keep each bf16
    input a second time, in fp32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return functional.linear(x, self.weight.to(x.dtype))


def _check_layers(module: nn.Module, layers: Sequence[str], *, flag: str) -> None:
    """Check that each name is the name of linear layers of a module, or the end of their names."""
    named = dict(module.named_modules())
    linear = sorted({_last(name) for name, inner in named.items() if isinstance(inner, nn.Linear)})
    for layer in layers:
        # The rule of peft.
        found = [
            inner for name, inner in named.items() if name == layer or name.endswith(f".{layer}")
        ]
        if not found or not all(isinstance(inner, nn.Linear) for inner in found):
            raise ConfigError(
                "LoRA goes beside linear layers, and this is the name of no such layer",
                value=layer,
                allowed=f"names that end in {', '.join(linear)}",
                flag=flag,
            )


def _last(name: str) -> str:
    """The end of a name that all layers of its kind share, such as to_q or to_out.0."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdecimal() else parts[-1]


def lora_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """The layers of a module that have LoRA, by their names without it."""
    from peft.tuners.lora import LoraLayer

    return {name: inner for name, inner in module.named_modules() if isinstance(inner, LoraLayer)}


def merge_lora(module: nn.Module) -> None:
    """Add LoRA to the weights of an fp32 module, and remove it, in place."""
    for name, layer in lora_layers(module).items():
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, layer.get_base_layer())
    vars(module).pop("peft_config", None)  # by which libraries look for LoRA


def is_lora(name: str) -> bool:
    """Return True for the name of a weight of LoRA."""
    return any(matrix in name for matrix in MATRICES)


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a model; those beside LoRA by their names without it."""
    return {name.replace(BASE, "."): weight for name, weight in model.named_parameters()}
