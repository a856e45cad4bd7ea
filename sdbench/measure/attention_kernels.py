"""`AttentionLog` records which kernels of attention torch runs in a step.

`sdpa` leaves the choice to torch, which depends on the GPU and on the versions of torch and cuDNN.
"""

from __future__ import annotations

import collections
import os
import re
from typing import Any

# The U-Net alone makes some 20,000 events a micro-batch, of 1 to 2 KB each until they are counted.
MAX_MICROBATCHES = 32
# libkineto logs errors at level 3.
ABOVE_ERRORS = "5"
# Operators of aten that run one kernel; those of a CPU end in _for_cpu.
_OPERATOR = re.compile(
    r"aten::_scaled_dot_product_(?:(\w+)_attention(?:_for_cpu)?|attention_(math))"
)


class AttentionLog:
    """Runs torch's profiler over a step and keeps the kernels of attention."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self.kernels: list[dict[str, Any]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a step is being profiled."""
        return self._profiler is not None

    def start(self) -> None:
        """The step is about to begin."""
        import torch

        # Without it the first use prints an error if torch is built for GPUs and there is no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", ABOVE_ERRORS)
        # Operators only: reading a GPU's kernels would take seconds.
        self._profiler = torch.autograd.profiler.profile(use_kineto=True, record_shapes=True)
        self._profiler.__enter__()

    def stop(self) -> None:
        """The step has ended: sets `kernels`, the record's `attention_kernels`.

        Eager attention, kernels of other libraries, CUDA graphs and images that were encoded in
        the step before are not included.
        """
        self._profiler.__exit__(None, None, None)
        # Not `function_events`, which makes a tree of Python objects of all events: 32,000 in a
        # step of the miniature.
        num_calls: collections.Counter[tuple[Any, ...]] = collections.Counter()
        for event in self._profiler.kineto_results.events():
            if match := _OPERATOR.fullmatch(event.name()):
                # Shapes of queries and keys: (B, heads, length, width).
                (_, num_heads, num_queries, width), (_, _, num_keys, _), *_ = event.shapes()
                num_calls[match[1] or match[2], num_heads, width, num_queries, num_keys] += 1
        self._profiler = None
        names = ("kernel", "num_heads", "head_width", "num_queries", "num_keys")
        self.kernels = [
            dict(zip(names, found, strict=True)) | {"num_calls": calls}
            for found, calls in sorted(num_calls.items())
        ]
