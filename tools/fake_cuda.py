"""`pretend`: has torch take fake tensors on "cuda", and Inductor compile for an H200, without one.

Nothing can be computed on such a device. What Inductor decides from (sm_90, its multiprocessors and
their memory) is that of an H200. For torch 2.11; it replaces private parts of torch, and cannot be
undone in the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.utils._triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._subclasses import fake_tensor

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
    total_memory=141 * 10**9,
)
# Of cuDNN's attention. Larger heads, and masks, are for the memory-efficient kernel.
MAX_FLASH_HEAD_SIZE = 256


def pretend() -> None:
    """Make this process believe in one H200. Call it before any tensor is made on "cuda"."""
    _load_hooks()
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: H200,
        "get_device_capability": lambda device=None: (H200.major, H200.minor),
        "get_device_name": lambda device=None: H200.name,
        "device": lambda *_: contextlib.nullcontext(),
        "initial_seed": lambda: 0,
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_lazy_init": lambda: None,
    }
    for name, answer in answers.items():
        for place in (torch.cuda, torch.cuda.random, CudaInterface, CudaInterface.Worker):
            if hasattr(place, name):
                setattr(place, name, staticmethod(answer) if isinstance(place, type) else answer)
    fake_tensor.init_gpu_context = lambda device: None
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
    torch.nn.functional.scaled_dot_product_attention = _attend
    for cached in vars(torch.utils._triton).values():
        if hasattr(cached, "cache_clear"):  # they have found no GPU
            cached.cache_clear()
    torch._inductor.config.force_disable_caches = True
    # It would compute constants on the device.
    torch._inductor.config.joint_graph_constant_folding = False


def _load_hooks() -> None:
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/fake_cuda.so"
        command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{home}/include", str(SOURCE)]
        command += ["-o", library, f"-L{home}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        ctypes.CDLL(library).pretend()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention by the kernel that torch 2.11 prefers on sm_90.

    torch itself asks the driver before it chooses.
    """
    keeps_sums = torch.is_grad_enabled()
    if attn_mask is None and query.shape[-1] <= MAX_FLASH_HEAD_SIZE:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, keeps_sums, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keeps_sums, dropout_p, is_causal, scale=scale
    )[0]
