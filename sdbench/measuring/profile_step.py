"""`ProfileStep`: the task that profiles a training step.

The flags of benchmark.py give the same plan, job and engine as there. A watch between job and
engine counts one step and profiles the next ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError
from sdbench.base.files import check_folder, refused_unless_written, replace_file
from sdbench.measure.attention_kernels import MAX_MICROBATCHES
from sdbench.measure.hardware import Machine
from sdbench.measuring.profile import ProfileSettings
from sdbench.plan.draft import Plan
from sdbench.ranks.distributed import Ranks
from sdbench.record.record_kinds import PROFILE
from sdbench.run.outcome import warn_if_not_written
from sdbench.run.step_progress import StepProgress
from sdbench.run.task import Run
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.request import Request
from sdbench.training.training_task import TrainingTask

if TYPE_CHECKING:
    from sdbench.profile.roofline import Ceilings, Profile
    from sdbench.profile.steps import ProfiledSteps

OPERATORS_NAME = "operators.csv"
TRACE_NAME = "trace.json.gz"


class ProfileStep(TrainingTask):
    """Profiles a training step; its request is one of `ProfileSettings`."""

    kind = PROFILE
    program = "python -m sdbench profile"
    record_name = "profile.json"
    request: Request[ProfileSettings]
    plan: Plan[BenchmarkConfig]
    is_distributed = False
    _profile: Profile
    _warnings: list[str]

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Make the plan of benchmark.py, and check that it can be profiled."""
        super().resolve(machine, ranks)
        _check(self.plan)

    def make_folder(self) -> Path:
        """Make the folder of --folder, or a new one in --results_dir."""
        if self.request.config.folder is None:
            return self._new_folder(f"profile-{self.plan.name}")
        folder = Path(self.request.config.folder)
        with refused_unless_written(folder, what="the output folder", flag="--folder"):
            check_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def for_person(self) -> str:
        """The plan in words, with the steps that are counted and profiled."""
        config = self.plan.config
        return (
            f"{super().for_person()}\n{config.warmup_batches} steps of warm-up, "
            f"{config.measure_batches} as they are, 1 counted, {config.profile_batches} profiled, "
            "each after one to settle"
        )

    def work(self, run: Run) -> dict[str, Any]:
        """Count and time the operators of a step, and measure the ceilings."""
        from sdbench.profile import printout

        self._profile = _profile(self.plan, trace_file=run.folder / TRACE_NAME)
        is_compiled = self.plan.config.compile != "none"
        self._warnings = printout.warnings_of(self._profile, is_compiled=is_compiled)
        return {"warnings": self._warnings, **printout.to_json(self._profile)}

    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """Write operators.csv."""
        from sdbench.profile import printout

        with warn_if_not_written(OPERATORS_NAME):
            replace_file(folder / OPERATORS_NAME, printout.to_csv(self._profile))
        on_gpu = self.plan.machine.device_type == "cuda"
        sentences = [*printout.describe_coverage(self._profile, on_gpu=on_gpu), *self._warnings]
        return "\n\n".join(
            (
                printout.format_profile(self._profile, top=self.request.config.top),
                "\n".join(sentences),
                printout.describe_floors(self._profile),
            )
        )


def _check(plan: Plan[BenchmarkConfig]) -> None:
    config = plan.config
    if config.profile_batches == 0:
        raise ConfigError(
            "there is nothing to profile", value=0, allowed="1 or more", flag="--profile_batches"
        )
    if plan.mixture is not None and len(plan.mixture.shapes) > 1:
        raise ConfigError(
            "steps of several shapes are counted and timed as one",
            value=config.buckets,
            allowed="one shape, such as --buckets 640x384, or squares",
            flag="--buckets",
        )
    if config.cuda_graph:
        raise ConfigError(
            "a CUDA graph launches a step as a whole, without its operators",
            value=True,
            allowed="the same kernels launched one by one",
            flag="--no_cuda_graph",
        )
    microbatch = config.device_train_microbatch_size
    num_microbatches = -(-config.batch_size // microbatch)
    if num_microbatches > MAX_MICROBATCHES:
        raise ConfigError(
            f"a step of {num_microbatches} micro-batches makes more events than memory holds",
            value=config.batch_size,
            allowed=f"at most {MAX_MICROBATCHES * microbatch}, {MAX_MICROBATCHES} micro-batches "
            f"of {microbatch}",
            flag="--batch_size or --device_train_microbatch_size",
        )


def _profile(plan: Plan[BenchmarkConfig], *, trace_file: Path) -> Profile:
    import torch

    from sdbench.engines import load_engine
    from sdbench.measure.timer import CudaDevice, StepTimer
    from sdbench.measure.watch import StepWatch
    from sdbench.profile.roofline import Profile, join
    from sdbench.profile.steps import PhaseMarks, ProfiledSteps
    from sdbench.training import pretrain, tuning
    from sdbench.training.encode_once import encode_once

    config, device_type = plan.config, plan.machine.device_type
    tuning.set_up_process(config)
    if config.compile != "none":
        import torch._inductor.config

        # Inductor's C++ kernels are silent otherwise; its Triton kernels are always seen.
        torch._inductor.config.cpp.enable_kernel_profile = True
    phases = PhaseMarks()
    steps = ProfiledSteps(
        phases,
        num_plain_steps=config.warmup_batches + config.measure_batches,
        num_profiled_steps=config.profile_batches,
        device_type=device_type,
        trace_file=trace_file if config.profile_trace else None,
    )
    progress = StepProgress(images_per_step=config.batch_size, enabled=True)
    timer = StepTimer(
        num_warmup_steps=config.warmup_batches,
        num_measured_steps=config.measure_batches,
        device=CudaDevice() if device_type == "cuda" else None,
    )
    watch = StepWatch(timer, phases=phases, observers=[progress, steps], num_steps=steps.num_steps)
    job = encode_once(pretrain.build(plan, phase=phases.phase), plan)
    job = dataclasses.replace(job, num_steps=steps.num_steps)
    with contextlib.closing(progress), steps.step:
        measurements = load_engine(config.engine)(job, config, watch)
    model_flop = config.batch_size * job.flops_per_image
    num_trained = job.num_trainable_parameters
    del job, watch
    gc.collect()  # the ceilings need memory
    if device_type == "cuda":
        torch.cuda.empty_cache()
    assert steps.events is not None
    ceilings = _measure_ceilings(steps, device_type=device_type)
    return Profile(
        rows=join(steps.counter.work, steps.events.operators, ceilings=ceilings),
        kernels=steps.events.kernels,
        ceilings=ceilings,
        step_s=measurements.timings.window_s / config.measure_batches,
        profiled_step_s=steps.events.step_s,
        num_images=config.batch_size,
        model_flop=model_flop,
        num_trained=num_trained,
    )


def _measure_ceilings(steps: ProfiledSteps, *, device_type: str) -> Ceilings:
    """The ceilings of arithmetic in every type that the step multiplies in, and of the memory."""
    from sdbench.measure.ceilings import measure_arithmetic, measure_bandwidth
    from sdbench.profile.roofline import Ceilings

    precisions = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    dtypes = sorted({dtype for (_, dtype), work in steps.counter.work.items() if work.flop})
    return Ceilings(
        arithmetic={
            dtype: measure_arithmetic(precisions[dtype], device_type=device_type)
            for dtype in dtypes
        },
        memory=measure_bandwidth(device_type=device_type),
    )
