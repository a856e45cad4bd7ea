"""The speed-ups of a config, applied to the process and to a built model."""

from __future__ import annotations

import os

import torch

from sdbench.base.cache import private_folder
from sdbench.base.host_memory import keep_freed_memory, return_large_blocks
from sdbench.models import blocks
from sdbench.models.convolution import use_matrix_products
from sdbench.models.diffusion import DiffusionModel
from sdbench.models.fp8 import use_fp8
from sdbench.settings.recipe import EngineConfig

KERNELS_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def set_up_process(config: EngineConfig) -> None:
    """Set threads, allocator and number formats of the process, before any work on the device."""
    if config.compile != "none" or config.group_norm == "fused":
        _keep_compiled_code_private()
    torch.set_num_threads(config.num_threads)
    # Threads inherit it, so it comes before torch starts any for a first computation.
    torch.set_flush_denormal(config.flush_denormals)
    if config.cpu_allocator == "keep":
        keep_freed_memory()
    elif config.cpu_allocator == "return":
        return_large_blocks()
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    # Who has Inductor search for its fastest kernels wants those of cuDNN, too: 0 is all its plans.
    torch.backends.cudnn.benchmark_limit = 0 if "max-autotune" in config.compile_mode else 10
    # fp32 means fp32: torch allows TF32 in convolutions unless told otherwise.
    if config.precision in ("fp32", "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = config.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = config.precision == "tf32"


def _keep_compiled_code_private() -> None:
    """Have torch keep compiled kernels in a folder of the user's own.

    By default it loads them from a folder in /tmp, which anybody can make, and torch 2.11 writes
    the name of that folder into the environment when it is imported.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Each machine has its own: their processors may differ.
    kernels = private_folder(f"kernels-{os.uname().nodename}")
    if os.environ.get(KERNELS_VARIABLE, default_cache_dir()) == default_cache_dir():
        os.environ[KERNELS_VARIABLE] = str(kernels)


def tune_model(model: DiffusionModel, config: EngineConfig, *, num_shapes: int = 1) -> None:
    """Change the blocks of a model in place, and compile its sub-models, as the config says.

    Code is compiled for each of `num_shapes` shapes of pictures.
    """
    denoiser, encoders = model.denoiser, [model.vae, *model.text_encoders]
    compiled = {
        "none": [],
        "unet": [denoiser],
        "encoders": encoders,
        "all": [denoiser, *encoders],
    }[config.compile]
    for module in (denoiser, model.vae):
        if module is not None:
            tune_blocks(module, config, is_compiled=module in compiled)
    if config.keep_layout:
        blocks.keep_layout(denoiser)
    if config.convolution != "torch":
        use_matrix_products(denoiser)
    if config.linear_dtype == "fp8":
        use_fp8(denoiser, blocks=model.network.transformers)
    blocks.checkpoint_activations(
        denoiser,
        which=config.activation_checkpointing,
        transformers=model.network.transformers,
    )
    if compiled:
        blocks.allow_compiled(num_shapes)
        # A CPU computes longer than it reads. On GPUs it is a part of the fused norm, so that one
        # run with it and one without can be compared.
        if config.group_norm == "fused" and next(denoiser.parameters()).is_cuda:
            blocks.compute_again()
    for module in compiled:
        if module is None:
            continue
        # Only the encoder of the VAE is used, through a method of the VAE.
        target = module.encoder if module is model.vae else module
        if config.compile_unit == "block":
            kinds = model.network.compiled_blocks
            blocks.compile_blocks(target, kinds=kinds, mode=config.compile_mode)
        else:
            # In place, so that the names of the weights stay as they are.
            target.compile(mode=config.compile_mode, dynamic=False)


def tune_blocks(module: torch.nn.Module, config: EngineConfig, *, is_compiled: bool) -> None:
    """Change the blocks of a denoiser or VAE in place, as the config says."""
    # What stands for the divisor cannot be traced: it would break the graph at each block. The
    # compiler puts a division into the kernel before or after it.
    if config.unit_divisions == "drop" and not is_compiled:
        blocks.drop_unit_divisions(module)
    if config.group_norm == "fused":
        blocks.fuse_group_norms(module)
