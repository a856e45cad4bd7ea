"""`AdamWInOnePass`: AdamW on fp32 copies of bf16 weights, each number read and written once.

torch's kernels make separate passes for the gradients in fp32 and for the weights in bf16. Here a
kernel in C++ does all in one pass: 28 bytes a weight. It is compiled for this processor, in about a
second, when the first such optimizer is made.
"""

from __future__ import annotations

import ctypes
import functools
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdbench.base.errors import ConfigError
from sdbench.engines.adamw import AdamWOfMasterWeights

SOURCE = Path(__file__).with_suffix(".cpp")
# sqrt may leave errno alone, so that it is an instruction. Sums keep their order: no -ffast-math.
COMPILE = ("g++", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-c")

# An operator of torch, which its profiler and `sdbench profile` see.
_OPERATORS = torch.library.Library("sdbench", "DEF")
_OPERATORS.define(
    "adamw_one_pass(Tensor gradient, Tensor(a!) master, Tensor(b!) mean, Tensor(c!) square, "
    "float[] factors, *, Tensor(d!) weight) -> ()"
)


class AdamWInOnePass(AdamWOfMasterWeights):
    """AdamW on fp32 copies of bf16 weights on a CPU, in one pass over memory.

    State and checkpoints are those of `AdamWOfMasterWeights` with the fused AdamW.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        """Copy the weights, in bf16 on the CPU, and compile the kernel, or raise a ConfigError."""
        super().__init__(groups, **options)
        for weight in self._weights:
            assert weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        _compile()

    @torch.no_grad()
    def _update(self) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                weight = self.weights_of_masters[id(master)]
                if weight.grad is not None:
                    self._update_weight(weight, master, group)

    def _update_weight(self, weight: Tensor, master: Tensor, group: dict[str, Any]) -> None:
        state = self.state[master]
        state["step"] += 1
        num_steps = state["step"].item()
        beta1, beta2 = group["betas"]
        gradient = weight.grad
        if not _has_same_order(gradient, master):
            gradient = torch.empty_like(weight).copy_(gradient)
        state_tensors = (master, state["exp_avg"], state["exp_avg_sq"])
        # A copy is dense, so tensors with its order of elements are dense too.
        assert all(_has_same_order(one, master) for one in (weight, gradient, *state_tensors))
        factors = (
            1 - group["lr"] * group["weight_decay"],
            1 - beta1,
            beta2,
            1 - beta2,
            group["lr"] / (1 - beta1**num_steps),
            math.sqrt(1 - beta2**num_steps),
            group["eps"],
        )
        torch.ops.sdbench.adamw_one_pass(gradient, *state_tensors, factors, weight=weight)
        # autograd refuses a backward pass that needs the weight as it was.
        torch.autograd.graph.increment_version(weight)


def _has_same_order(tensor: Tensor, other: Tensor) -> bool:
    """Return True if the elements of two tensors of one shape have the same order in memory."""
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(size == 1 or one == two for size, one, two in strides)


def _run_kernel(
    gradient: Tensor,
    master: Tensor,
    mean: Tensor,
    square: Tensor,
    factors: Sequence[float],
    *,
    weight: Tensor,
) -> None:
    tensors = (weight, gradient, master, mean, square)
    _compile()(weight.numel(), *(tensor.data_ptr() for tensor in tensors), *factors)


_OPERATORS.impl("adamw_one_pass", _run_kernel, "CPU")


@functools.cache
def _compile() -> Callable[..., None]:
    with tempfile.TemporaryDirectory() as folder:
        compiled, library = f"{folder}/update.o", f"{folder}/update.so"
        # Linked without OpenMP, whose functions are found in the library that torch has loaded:
        # the threads are torch's, and as many.
        link = ["g++", "-shared", compiled, "-o", library]
        for command in ([*COMPILE, str(SOURCE), "-o", compiled], link):
            end = subprocess.run(command, capture_output=True)
            if end.returncode != 0:
                said = end.stderr.decode(errors="replace").strip().splitlines()
                of_error = [line for line in said if "error" in line] or said
                raise _refusal(of_error[0] if said else f"exit code {end.returncode} of g++")
        try:
            update = ctypes.CDLL(library).update
        except OSError as error:  # e.g. a temporary folder from which nothing may be run
            raise _refusal(str(error)) from error
    pointers, numbers = [ctypes.c_void_p] * 5, [ctypes.c_float] * 7
    update.argtypes, update.restype = [ctypes.c_int64, *pointers, *numbers], None
    return update


def _refusal(value: str) -> ConfigError:
    return ConfigError(
        "the optimizer's kernel cannot be compiled and loaded",
        value=value,
        allowed="a g++ that compiles for this processor, and a TMPDIR that allows programs; or "
        "another optimizer",
        flag="--optimizer",
    )
