"""`add_lora`: LoRA (arXiv 2106.09685), trained matrices beside frozen linear layers, by peft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sdbench.base.errors import ConfigError
from sdbench.models.compat import change_class
from sdbench.models.weights import Weights, drawing_by

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

# Sub-models that may have LoRA, each with what its layers are given by.
LAYERS_FLAGS = {"unet": "--lora_layers", "text_encoder": "--lora_text_encoder_layers"}
# Added to the seed of a model; those of U-Net, VAE and text encoder are the seed itself, 1 and 2.
SEED_OFFSETS = {"unet": 3, "text_encoder": 4}
# Of the only adapter; peft has it in the names of its weights.
ADAPTER = "default"
# In the names of the weights of layers that have LoRA: the frozen weight, and the two matrices.
BASE, MATRICES = ".base_layer.", (f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}.")


@dataclass(frozen=True)
class Lora:
    """LoRA of a model.

    Attributes:
        rank: Of its matrices.
        alpha: It is multiplied by alpha / rank.
        layers: Sub-model and layers, as `add_lora` takes them.
    """

    rank: int
    alpha: float
    layers: tuple[tuple[str, tuple[str, ...]], ...]

    @staticmethod
    def of(config: Any) -> Lora | None:
        """What the config of a training run asks for; None: all weights are trained."""
        if config.lora_rank is None:
            return None
        layers = {"unet": config.lora_layers}
        if "text_encoder" in config.trained_parts:
            layers["text_encoder"] = config.lora_text_encoder_layers
        return Lora(
            rank=config.lora_rank,
            alpha=config.lora_rank if config.lora_alpha is None else config.lora_alpha,
            layers=tuple((part, tuple(names.split(","))) for part, names in layers.items()),
        )

    def add_to(self, parts: Mapping[str, nn.Module], *, seed: int | None) -> None:
        """Add LoRA to sub-models in place, as `add_lora`.

        Args:
            parts: Among them those of `layers`.
            seed: Of the model.

        Raises:
            ConfigError: As `check_layers`.
        """
        for part, layers in self.layers:
            add_lora(
                parts[part],
                rank=self.rank,
                alpha=self.alpha,
                layers=layers,
                seed=None if seed is None else seed + SEED_OFFSETS[part],
                flag=LAYERS_FLAGS[part],
            )


class _LinearInTypeOfInput(nn.Linear):
    """A linear layer that computes in the type of its input, whatever the type of its weights.

    peft would bring the input to the type of the weights: the backward pass would keep each bf16
    input a second time, in fp32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return functional.linear(x, self.weight.to(x.dtype))


def add_lora(
    module: nn.Module,
    *,
    rank: int,
    alpha: float,
    layers: Sequence[str],
    seed: int | None,
    flag: str = LAYERS_FLAGS["unet"],
) -> None:
    """Add LoRA to a U-Net or text encoder in place, and freeze all its other weights.

    A layer with the weight W computes with W + alpha / rank B A. The matrices A (rank, in) and
    B (out, rank) are in fp32, of whatever type W is. A is drawn on the CPU, as peft draws it, and B
    is 0: the output of the module stays as it is. The caller's random generators keep their state.

    Args:
        module: A U-Net of diffusers or a CLIP text encoder of transformers, on its device.
        rank: Of B A.
        alpha: B A is multiplied by alpha / rank.
        layers: Names of linear layers; of names with dots the end is enough.
        seed: Of A, the same on every rank; None draws none, for fake tensors.
        flag: What `layers` were given by.

    Raises:
        ConfigError: As `check_layers`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    check_layers(module, layers, flag=flag)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(layers))
    # On the meta device: nothing is drawn, and nothing gets the type of the frozen weights. peft's
    # own way to it, low_cpu_mem_usage, fails for fake tensors.
    with torch.device("meta"):
        inject_adapter_in_model(config, module, ADAPTER)
    module.requires_grad_(False)
    with drawing_by(seed, torch.device("cpu")):
        for layer in lora_layers(module).values():
            weights = Weights(seed=seed, device=layer.get_base_layer().weight.device)
            matrices = (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER])
            if seed is not None:
                for matrix in matrices:
                    matrix.to_empty(device="cpu")
                layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
            for matrix in matrices:
                if seed is None:
                    weights.hold_places(matrix)
                else:
                    weights.place(matrix)
                matrix.requires_grad_()
                change_class(matrix, _LinearInTypeOfInput)
            layer.cast_input_dtype_enabled = False


def check_layers(module: nn.Module, layers: Sequence[str], *, flag: str) -> None:
    """Check that each of some names is the name, or its end, of linear layers of a module.

    Args:
        module: Without LoRA; it may be on the meta device.
        layers: As `add_lora` takes them.
        flag: What they were given by.

    Raises:
        ConfigError: One of them is the name of no layer, or of one that is not linear.
    """
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
    """What layers of this kind are called: the end of a name, such as to_q or to_out.0."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdecimal() else parts[-1]


def lora_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """The layers of a module that have LoRA, by the names that they had without it."""
    from peft.tuners.lora import LoraLayer

    return {name: inner for name, inner in module.named_modules() if isinstance(inner, LoraLayer)}


def merge_lora(module: nn.Module, *, weight: float = 1.0) -> None:
    """Add LoRA to the weights beside it, and take it out of a module; in place.

    Args:
        module: In fp32.
        weight: Factor of LoRA.
    """
    for name, layer in lora_layers(module).items():
        layer.set_scale(ADAPTER, weight)
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, layer.get_base_layer())
    for attribute in ("peft_config", "_hf_peft_config_loaded"):  # by which libraries look for LoRA
        vars(module).pop(attribute, None)


def is_lora(name: str) -> bool:
    """Whether a weight of this name is one of LoRA."""
    return any(matrix in name for matrix in MATRICES)


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a model; those beside LoRA by the names that they have without it."""
    return {name.replace(BASE, "."): weight for name, weight in model.named_parameters()}
