"""The command and task `profile`: work, time and ceiling of each operator of a training step.

The flags of benchmark.py give the same plan, job and engine as there. A watch between job and
engine counts one step and profiles the next ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError
from sdbench.base.files import check_folder, refused_unless_written, replace_file
from sdbench.measure.attention_kernels import MAX_MICROBATCHES
from sdbench.measure.hardware import Machine
from sdbench.plan.resolve import Plan
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import PROFILE
from sdbench.run.outcome import warn_if_not_written
from sdbench.run.progress import StepProgress
from sdbench.run.runner import run
from sdbench.run.task import Run
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.kinds import POSITIVE, TEXT
from sdbench.settings.request import Request, parse
from sdbench.settings.setting import setting
from sdbench.tasks import TASKS
from sdbench.tasks.training import TrainingTask

if TYPE_CHECKING:
    from sdbench.profile.roofline import Ceilings, Profile
    from sdbench.profile.steps import ProfiledSteps

OPERATORS_NAME = "operators.csv"
TRACE_NAME = "trace.json.gz"

DESCRIPTION = """\
Count the arithmetic and the bytes of every operator of a training step, time it, and compare it
with the best that this machine reaches.

Takes --top, --folder and the flags of benchmark.py that say what a step does. Of its other flags it
takes --warmup_batches (before anything is timed), --measure_batches (timed without the profiler, 3
by default), --profile_batches (under torch's profiler) and --profile_trace (writes torch's trace of
the last of them). Without --batch_size a step is one micro-batch.
One process, on one GPU or the CPU.
"""
EPILOG = """\
examples:
  python -m sdbench profile --model_name tiny --use_synth_data
      a miniature in seconds
  python -m sdbench profile --preset seed --device_train_microbatch_size 4 --use_ema
      where the time of the reference recipe goes
  python -m sdbench profile --latents precomputed --remote my-latents --engine torch --top 40
      on precomputed latents, without a trainer, in longer tables
  python -m sdbench profile --batch_size 64 --device_train_microbatch_size 16 --folder before
      with four micro-batches to an optimizer step, into a folder of this name

It prints three tables (by phase, by operator, by operator and shapes) and the floors of a step, and
writes profile.json (figures, settings, versions), operators.csv (every operator) and stdout.log.
With --compile the step is counted uncompiled, which may need more memory.

exit codes: 0 ok, 1 the run failed, 2 bad input, 130 stopped
"""
# Step times serve for comparison only; benchmark.py measures a rate with an interval.
MEASURE_BATCHES = 3
# Flags of benchmark.py that say how long to measure and where to log it.
NOT_HERE = (
    "max_duration",
    "max_warmup_batches",
    "max_measure_batches",
    "target_precision",
    "measure_peak",
    "wandb_name",
    "wandb_project",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSettings(BenchmarkConfig):
    """Settings of profile: its own, and the settings of the run that it profiles."""

    top: int = setting(
        POSITIVE, 20, "rows of the tables of operators; the files have all", is_everyday=True
    )
    folder: str | None = setting(
        TEXT,
        None,
        "new folder for the files (default: a new one in --results_dir)",
        is_everyday=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Profile a training step as the command line says; return the exit code."""
    return run(TASKS["profile"], _parse, argv)


def _parse(argv: Sequence[str]) -> Request[ProfileSettings]:
    request = parse(
        ProfileSettings,
        argv,
        prog="python -m sdbench profile",
        description=DESCRIPTION,
        epilog=EPILOG,
        takes_file=True,
    )
    config = request.config
    for name in NOT_HERE:
        if request.is_users(name):
            raise ConfigError(
                "a profile has no use for this setting of benchmark.py",
                value=getattr(config, name),
                allowed="settings that say what a step does, and --warmup_batches, "
                "--measure_batches, --profile_batches and --profile_trace",
                flag=f"--{name}",
            )
    if config.measure_batches is None:
        config = dataclasses.replace(config, measure_batches=MEASURE_BATCHES)
    microbatch = config.device_train_microbatch_size
    if config.batch_size is None and microbatch != "auto":
        config = dataclasses.replace(config, batch_size=microbatch)
    return dataclasses.replace(request, config=config)


class ProfileStep(TrainingTask):
    """Profiles a training step; its request is one of `ProfileSettings`."""

    kind = PROFILE
    program = "python -m sdbench profile"
    record_name = "profile.json"
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


def _check(plan: Plan) -> None:
    config = plan.config
    if config.profile_batches == 0:
        raise ConfigError(
            "there is nothing to profile", value=0, allowed="1 or more", flag="--profile_batches"
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


def _profile(plan: Plan, *, trace_file: Path) -> Profile:
    """Train, count and time, and measure the ceilings."""
    import torch

    from sdbench.engines import load_engine
    from sdbench.measure.timer import CudaDevice, StepTimer
    from sdbench.measure.watch import StepWatch
    from sdbench.profile.roofline import Profile, join
    from sdbench.profile.steps import PhaseMarks, ProfiledSteps
    from sdbench.tasks import dreambooth, pretrain, tuning

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
    job = dreambooth.encode_once(pretrain.build(plan, phase=phases.phase), plan)
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
