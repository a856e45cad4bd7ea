"""Which speed-ups can this machine and this combination of settings use?

Each rule is about one setting and some of its values. A value that a rule forbids is an error when
the user gave it; one that a preset brought is replaced, with the reason printed and recorded.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.host_memory import can_keep_freed_memory
from sdbench.measure.hardware import Machine
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.presets import PerDevice

FSDP = ("grad_op", "full", "hybrid")
# Two steps before the capture let libraries choose kernels and make room.
NUM_GRAPH_STEPS = 3
GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a rule looks at: the settings so far, the machine, the place of this process."""

    config: BenchmarkConfig
    machine: Machine
    ranks: Ranks

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.machine.device_type == "cuda"

    @property
    def is_fsdp(self) -> bool:
        """Whether the weights themselves are shared out."""
        return self.config.sharding in FSDP


@dataclasses.dataclass(frozen=True)
class Rule:
    """One setting, the values that need something, and what they need.

    Attributes:
        setting: Name of a field of the config.
        values: Its values that the rule is about.
        is_met: Whether they can be used here.
        problem: What is wrong where they cannot, as the first half of a sentence.
        allowed: What can be used instead, for the error.
        instead: What replaces a preset's value; None where no preset has one of the values.
    """

    setting: str
    values: tuple[Any, ...]
    is_met: Callable[[Situation], bool]
    problem: str
    allowed: str
    instead: Any = None


def _has_cpp_compiler(situation: Situation) -> bool:
    """Inductor writes C++ for a CPU and, around its Triton kernels, for a GPU too."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def _is_half(situation: Situation) -> bool:
    return situation.config.precision in ("amp_fp16", "amp_bf16", "bf16")


def _is_ddp(situation: Situation) -> bool:
    return not situation.is_fsdp


# In the order in which they are applied: a rule sees what those before it have settled.
RULES: tuple[Rule, ...] = (
    Rule(
        "encoder_dtype",
        ("fp16",),
        lambda s: s.on_gpu,
        "a CPU cannot run the encoders in this type",
        "fp32 | bf16",
    ),
    Rule(
        "master_weights",
        ("fp32",),
        lambda s: s.config.precision == "bf16",
        "only bf16 weights need a copy in fp32, and the precision is another",
        "none, or fp32 with --precision bf16",
        "none",
    ),
    Rule(
        "attention",
        ("cudnn", "efficient", "xformers"),
        lambda s: s.on_gpu,
        "a CPU has no such attention kernel",
        "sdpa | flash | eager",
        "sdpa",
    ),
    Rule(
        "attention",
        ("flash", "cudnn"),
        lambda s: not s.on_gpu or _is_half(s),
        "this attention kernel of a GPU takes 16-bit numbers only",
        "sdpa | efficient | eager, or --precision amp_bf16",
        "sdpa",
    ),
    Rule(
        "attention",
        ("xformers",),
        lambda s: importlib.util.find_spec("xformers") is not None,
        "xformers is not installed",
        "sdpa | flash | cudnn | efficient | eager, or pip install xformers",
    ),
    Rule(
        "compile",
        ("unet", "encoders", "all"),
        _has_cpp_compiler,
        "torch.compile needs a C++ compiler on the PATH, and there is none",
        "none, or an installed g++ or clang++",
        "none",
    ),
    Rule(
        "compile",
        ("encoders",),
        lambda s: s.config.latents == "online",
        "precomputed latents need no encoders",
        "none | unet",
    ),
    Rule(
        "compile_mode",
        ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        lambda s: s.config.compile != "none",
        "nothing is compiled",
        "default, or --compile unet | encoders | all",
        "default",
    ),
    Rule(
        "compile_mode",
        GRAPH_MODES,
        lambda s: s.on_gpu,
        "a CPU has no CUDA graphs",
        "default | max-autotune-no-cudagraphs",
        "default",
    ),
    Rule(
        "group_norm",
        ("fused",),
        _has_cpp_compiler,
        "the fused GroupNorm is compiled, and there is no C++ compiler on the PATH",
        "torch, or an installed g++ or clang++",
        "torch",
    ),
    Rule(
        "cudnn_benchmark",
        (True,),
        lambda s: s.on_gpu,
        "a CPU does not use cuDNN",
        "--no_cudnn_benchmark",
        False,
    ),
    Rule(
        "copy_stream",
        ("side",),
        lambda s: s.on_gpu,
        "a CPU trains where the batch already is",
        "compute",
        "compute",
    ),
    Rule(
        "sharding",
        ("zero1", *FSDP),
        lambda s: s.ranks.world_size > 1,
        "one rank has nobody to share with",
        "none, or more ranks: composer -n 2, torchrun --nproc_per_node 2",
        "none",
    ),
    Rule(
        "sharding",
        ("hybrid",),
        lambda s: s.ranks.num_nodes > 1,
        "hybrid shares within each machine, and there is only one",
        "none | zero1 | grad_op | full",
        "full",
    ),
    Rule(
        "sharding",
        ("hybrid",),
        lambda s: s.on_gpu,
        "torch cannot average between machines on CPUs when each of them shares its weights",
        "none | zero1 | grad_op | full",
        "full",
    ),
    Rule(
        "sharding",
        FSDP,
        lambda s: s.config.precision != "amp_fp16",
        "weights that are shared out are not trained with a loss scale here",
        "none | zero1, or another --precision",
        "none",
    ),
    Rule(
        "sharding",
        ("zero1", *FSDP),
        lambda s: s.config.optimizer_params == "trainable",
        "an optimizer that is shared out takes trained parameters only",
        "none, or --optimizer_params trainable",
        "none",
    ),
    Rule(
        "sharding",
        ("zero1", *FSDP),
        lambda s: s.config.master_weights == "none",
        "the copies of the weights in fp32 cannot be shared out",
        "none, or --master_weights none",
        "none",
    ),
    Rule(
        "convolution",
        ("matmul",),
        lambda s: s.config.memory_format == "channels_last",
        "products of matrices read the weights with the channels last",
        "torch, or --memory_format channels_last",
        "torch",
    ),
    Rule(
        "convolution",
        ("matmul",),
        _is_ddp,
        "weights that are shared out are contiguous, and each product would copy them",
        "torch, or --sharding none | zero1",
        "torch",
    ),
    Rule(
        "ema_impl",
        ("composer",),
        lambda s: s.config.engine == "composer",
        "only Composer can run its own moving average",
        "foreach, or --engine composer",
        "foreach",
    ),
    Rule(
        "ema_impl",
        ("composer",),
        lambda s: not s.config.use_ema or s.config.master_weights == "none",
        "Composer's moving average would be that of the bf16 weights, not of their fp32 copies",
        "foreach, or --master_weights none",
        "foreach",
    ),
    Rule(
        "ema_impl",
        ("composer",),
        lambda s: s.config.sharding in ("none", "zero1"),
        "Composer's moving average keeps whole weights on each rank",
        "foreach, or --sharding none | zero1",
        "foreach",
    ),
    Rule(
        "gradient_as_bucket_view",
        (True,),
        _is_ddp,
        "there are no buckets of DDP when the weights are shared out",
        "--no_gradient_as_bucket_view, or --sharding none | zero1",
        False,
    ),
    Rule(
        "static_graph",
        (True,),
        _is_ddp,
        "there is no DDP to tell when the weights are shared out",
        "--no_static_graph, or --sharding none | zero1",
        False,
    ),
    Rule(
        "grad_compression",
        ("bf16",),
        _is_ddp,
        "gradients travel in the type of the weights when these are shared out",
        "none, or --sharding none | zero1",
        "none",
    ),
    Rule(
        "cuda_graph",
        (True,),
        lambda s: s.on_gpu,
        "a CPU has no CUDA graphs",
        "--no_cuda_graph",
        False,
    ),
    Rule(
        "cuda_graph",
        (True,),
        lambda s: s.config.engine == "torch",
        "Composer's loop asks the host for a decision in each step, which a graph cannot hold",
        "--no_cuda_graph, or --engine torch",
        False,
    ),
    Rule(
        "cuda_graph",
        (True,),
        lambda s: s.config.precision != "amp_fp16",
        "the loss scale of fp16 is decided on the host in each step",
        "--no_cuda_graph, or --precision amp_bf16 | bf16",
        False,
    ),
    Rule(
        "cuda_graph",
        (True,),
        lambda s: s.config.optimizer == "adamw_fused" and s.config.optimizer_params == "trainable",
        "only the fused AdamW over the trained parameters can be captured",
        "--no_cuda_graph, or --optimizer adamw_fused --optimizer_params trainable",
        False,
    ),
    Rule(
        "cuda_graph",
        (True,),
        lambda s: s.ranks.world_size == 1,
        "a graph holds no communication between ranks here",
        "--no_cuda_graph, or one rank",
        False,
    ),
    Rule(
        "cuda_graph",
        (True,),
        lambda s: s.config.compile_mode not in GRAPH_MODES,
        "a graph cannot hold those that this mode of torch.compile replays",
        "--no_cuda_graph, or --compile_mode default | max-autotune-no-cudagraphs",
        False,
    ),
    Rule(
        "cuda_graph",
        (True,),
        lambda s: s.config.warmup_batches is None or s.config.warmup_batches >= NUM_GRAPH_STEPS,
        f"a graph is captured in step {NUM_GRAPH_STEPS}, which would be a measured one",
        f"--no_cuda_graph, or --warmup_batches {NUM_GRAPH_STEPS} and more",
        False,
    ),
    Rule(
        "cpu_allocator",
        ("keep",),
        lambda s: can_keep_freed_memory(),
        "this C library is not glibc and cannot be told to keep freed memory",
        "default",
        "default",
    ),
    Rule(
        "flush_denormals",
        (True,),
        lambda s: not s.on_gpu,
        "a GPU does not get faster by it",
        "--no_flush_denormals",
        False,
    ),
)


def settle(
    config: BenchmarkConfig,
    *,
    machine: Machine,
    ranks: Ranks,
    is_users: Callable[[str], bool],
) -> tuple[BenchmarkConfig, dict[str, str]]:
    """Take the preset's values for this device, and check every speed-up.

    Args:
        config: As the user asked; a preset's values may still differ by device.
        machine: The machine at hand.
        ranks: The place of this process.
        is_users: Whether the user gave the field of this name a value.

    Returns:
        The config, and the reason for each value that replaced a preset's.

    Raises:
        ConfigError: For a value of the user's that cannot be used here.
    """
    on_gpu = machine.device_type == "cuda"
    by_device = {
        field.name: value.gpu if on_gpu else value.cpu
        for field in dataclasses.fields(config)
        if isinstance(value := getattr(config, field.name), PerDevice)
    }
    config = dataclasses.replace(config, **by_device)
    reasons: dict[str, str] = {}
    config = _settle_number_formats(config, machine, is_users, reasons)
    for rule in RULES:
        situation = Situation(config, machine, ranks)
        value = getattr(config, rule.setting)
        if value not in rule.values or rule.is_met(situation):
            continue
        if is_users(rule.setting):
            shown = f"--{rule.setting}" if value is True else value
            raise ConfigError(
                rule.problem, value=shown, allowed=rule.allowed, flag=f"--{rule.setting}"
            )
        assert rule.instead is not None, f"no preset has {rule.setting}={value}"
        config = dataclasses.replace(config, **{rule.setting: rule.instead})
        reasons[rule.setting] = rule.problem
    return config, reasons


def _settle_number_formats(
    config: BenchmarkConfig,
    machine: Machine,
    is_users: Callable[[str], bool],
    reasons: dict[str, str],
) -> BenchmarkConfig:
    """What a device without bf16 instructions trains in depends on what else it has."""
    if is_users("precision"):
        supported = machine.supported_precisions()
        if config.precision not in supported:
            raise ConfigError(
                f"{machine.device_name} cannot train in this precision",
                value=config.precision,
                allowed=" | ".join(supported),
                flag="--precision",
            )
    if machine.has_fast_bf16:
        return config
    on_gpu, reason = machine.device_type == "cuda", "the device has no bf16 instructions"
    if not is_users("precision") and "bf16" in config.precision:
        config = dataclasses.replace(config, precision="amp_fp16" if on_gpu else "fp32")
        reasons["precision"] = reason
    if not is_users("encoder_dtype") and config.encoder_dtype == "bf16":
        config = dataclasses.replace(config, encoder_dtype="fp16" if on_gpu else "fp32")
        reasons["encoder_dtype"] = reason
    return config
