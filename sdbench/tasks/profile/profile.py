"""Which operators does a training step consist of, and what could each reach on this machine?

    python -m sdbench profile --use_synth_data --device_train_microbatch_size 16

The flags of benchmark.py become the same plan, parts and engine as there. Between them and the
engine stands a watch that counts one step and profiles the next ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdbench.base.errors import ConfigError
from sdbench.base.stop import stop_signals_raise
from sdbench.ranks.distributed import Ranks
from sdbench.record import provenance, store
from sdbench.record.store import OutputLog, RunFolder, replace_file, write_json
from sdbench.settings.config import POSITIVE, Request, parse_request, parse_value

if TYPE_CHECKING:
    from sdbench.plan.resolve import Plan
    from sdbench.tasks.profile.result import Profile
    from sdbench.tasks.profile.roofline import Ceilings
    from sdbench.tasks.profile.steps import ProfiledSteps

DESCRIPTION = """\
Count the arithmetic and the bytes of every operator of a training step, time it, and set both
against what this machine reaches at its best.

Besides the flags below it takes those of benchmark.py that say what a step does, with the same
meaning and defaults, and these: --warmup_batches (before anything is timed), --measure_batches
(timed as they are, 3 by default), --profile_batches (under torch's profiler) and --profile_trace
(writes torch's trace of the last of them). Without --batch_size a step is one micro-batch.
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
  python -m sdbench profile --batch_size 64 --device_train_microbatch_size 16 --out before
      with four micro-batches to an optimizer step, into a folder of this name

It prints three tables (by phase, by operator, by operator and shapes) and the floor of a step, and
writes profile.json (figures, settings, versions), operators.csv (every operator) and stdout.log.
With --compile the step is counted uncompiled, which may need more memory.

exit codes: 0 ok, 1 the run failed, 2 bad input, 130 Ctrl-C
"""
DEFAULT_TOP = 20
# Step times serve for comparison only: a rate with an interval is benchmark.py's.
MEASURE_BATCHES = 3
# The U-Net alone makes some 20,000 events a micro-batch, of 1 to 2 KB each while they are added up.
MAX_MICROBATCHES = 32
# Flags of benchmark.py that say how long to measure and where to tell of it.
NOT_HERE = (
    "max_duration",
    "max_warmup_batches",
    "max_measure_batches",
    "target_precision",
    "measure_peak",
    "wandb_name",
    "wandb_project",
)
PROFILE_NAME = "profile.json"
OPERATORS_NAME = "operators.csv"
TRACE_NAME = "trace.json.gz"


def main(argv: Sequence[str] | None = None) -> int:
    """Profile a training step.

    Args:
        argv: Command-line arguments; None takes those of the process.

    Returns:
        The exit code.

    Raises:
        ConfigError: The command line cannot be run here.
    """
    command = list(sys.argv[1:] if argv is None else argv)
    own, rest = _make_parser().parse_known_args(command)
    top = parse_value("top", own.top, kind=POSITIVE)
    request = _with_defaults(parse_request(rest, description="", epilog=""))
    try:
        return _run(request, top=top, out=own.out, command=command)
    except KeyboardInterrupt:
        return 130


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sdbench profile",
        usage="%(prog)s [--top N] [--out FOLDER] [FLAGS OF benchmark.py]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--top",
        default=DEFAULT_TOP,
        metavar="N",
        help=f"rows of the tables of operators (default: {DEFAULT_TOP}); the files have all",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="new folder of the files (default: one of its own in --results_dir)",
    )
    return parser


def _with_defaults(request: Request) -> Request:
    """The request with this command's own defaults where the user said nothing."""
    for name in NOT_HERE:
        if request.is_users(name):
            raise ConfigError(
                "a profile has no use for this setting of benchmark.py",
                value=getattr(request.config, name),
                allowed="those that say what a step does, and --warmup_batches, "
                "--measure_batches, --profile_batches and --profile_trace",
                flag=f"--{name}",
            )
    config = request.config
    if config.measure_batches is None:
        config = dataclasses.replace(config, measure_batches=MEASURE_BATCHES)
    microbatch = config.device_train_microbatch_size
    if config.batch_size is None and microbatch != "auto":
        config = dataclasses.replace(config, batch_size=microbatch)
    return dataclasses.replace(request, config=config)


def _run(request: Request, *, top: int, out: str | None, command: list[str]) -> int:
    from sdbench.measure.hardware import inspect_machine
    from sdbench.plan import describe
    from sdbench.plan.resolve import resolve

    ranks = Ranks.from_environment()
    if ranks.world_size > 1:
        raise ConfigError(
            "a profile is that of one process",
            value=f"{ranks.world_size} ranks",
            allowed="python -m sdbench profile without a launcher",
            flag="WORLD_SIZE (in the environment)",
        )
    log = OutputLog()
    with log.capture(), stop_signals_raise():
        plan = resolve(request, machine=inspect_machine(), ranks=ranks)
        _check(plan)
        if request.print_config:
            print(describe.as_yaml(plan, request))
            return 0
        folder = _make_folder(plan, out)
        log.move_to(folder)
        config = plan.config
        print(
            f"{describe.for_person(plan)}\n{config.warmup_batches} steps of warm-up, "
            f"{config.measure_batches} as they are, 1 counted, {config.profile_batches} profiled, "
            "each after one to settle",
            flush=True,
        )
        return _run_in_folder(plan, request, folder, top=top, command=command)


def _check(plan: Plan) -> None:
    config = plan.config
    if config.profile_batches == 0:
        raise ConfigError(
            "there is nothing to profile", value=0, allowed="1 or more", flag="--profile_batches"
        )
    if config.cuda_graph:
        raise ConfigError(
            "the step of a CUDA graph is not made of operators any more",
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


def _make_folder(plan: Plan, out: str | None) -> Path:
    if out is None:
        results_dir, machine = plan.config.results_dir, plan.machine.slug
        return RunFolder.create(results_dir, machine=machine, name=f"profile-{plan.name}")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be made ({error.strerror})",
            value=out,
            allowed="a folder that this user may write",
            flag="--out",
        ) from None
    if not is_empty:
        raise ConfigError(
            "the folder holds something already",
            value=out,
            allowed="a new or an empty folder",
            flag="--out",
        )
    return folder


def _run_in_folder(
    plan: Plan, request: Request, folder: Path, *, top: int, command: list[str]
) -> int:
    """Profile, print and write."""
    from sdbench.plan import describe
    from sdbench.run.outcome import explain
    from sdbench.tasks.profile import printout

    started_utc, started_s = store.utc_now(), time.perf_counter()
    try:
        profile = _profile(plan, trace_file=folder / TRACE_NAME)
    except BaseException as error:  # also Ctrl-C: the log has to say why
        failure = explain(error)
        print(f"{failure.status}: {failure.reason}", file=sys.stderr)
        return failure.exit_code
    on_gpu = plan.machine.device_type == "cuda"
    warnings = printout.warnings_of(profile, is_compiled=plan.config.compile != "none")
    content = {
        "kind": "profile",
        "run_id": folder.name,
        "started_utc": started_utc,
        "duration_s": time.perf_counter() - started_s,
        "command": ["python", "-m", "sdbench", "profile", *command],
        **describe.for_record(plan, request, num_restarts=0),
        "versions": provenance.package_versions(),
        "git": provenance.git_state(),
        "environment": provenance.speed_environment(),
        "warnings": warnings,
        **printout.to_json(profile),
    }
    sentences = [*printout.describe_coverage(profile, on_gpu=on_gpu), *warnings]
    print(
        f"\n{printout.format_profile(profile, top=top)}\n\n" + "\n".join(sentences) + "\n\n"
        f"{printout.describe_floors(profile)}\n"
    )
    # Printed before, as the disk may be full.
    write_json(folder / PROFILE_NAME, content)
    replace_file(folder / OPERATORS_NAME, printout.to_csv(profile))
    print(f"profile: {folder}")
    return 0


def _profile(plan: Plan, *, trace_file: Path) -> Profile:
    """Train, count and time, and measure the ceilings."""
    import torch

    from sdbench.engines import load_engine
    from sdbench.run.progress import Progress
    from sdbench.tasks import pretrain, tuning
    from sdbench.tasks.profile.result import Profile
    from sdbench.tasks.profile.roofline import join
    from sdbench.tasks.profile.steps import PhaseMarks, ProfiledSteps, make_watch

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
    progress = Progress(images_per_step=config.batch_size, enabled=True)
    watch = make_watch(
        steps,
        phases=phases,
        num_warmup_steps=config.warmup_batches,
        num_measured_steps=config.measure_batches,
        device_type=device_type,
        observers=[progress],
    )
    job = pretrain.build(plan, phase=phases.phase)
    job = dataclasses.replace(job, num_steps=steps.num_steps)
    try:
        with steps:
            measurements = load_engine(config.engine)(job, config, watch)
    finally:
        progress.close()
    model_flop = config.batch_size * job.flops_per_image
    del job, watch
    gc.collect()  # the ceilings need memory
    if device_type == "cuda":
        torch.cuda.empty_cache()
    assert steps.events is not None
    ceilings = _measure_ceilings(steps, device_type=device_type)
    return Profile(
        rows=join(
            steps.counter.work,
            steps.events.matched | steps.events.unmatched,
            ceilings=ceilings,
        ),
        kernels=steps.events.kernels,
        ceilings=ceilings,
        step_s=measurements.timings.window_s / config.measure_batches,
        profiled_step_s=steps.events.step_s,
        num_images=config.batch_size,
        model_flop=model_flop,
    )


def _measure_ceilings(steps: ProfiledSteps, *, device_type: str) -> Ceilings:
    """Matrix products in every type that the step multiplies in, and the memory."""
    from sdbench.measure.bandwidth import measure_bandwidth_gb_per_s
    from sdbench.measure.matmul import measure_matmul_tflops
    from sdbench.tasks.profile.roofline import Ceilings

    precisions = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    dtypes = sorted({dtype for (_, dtype), work in steps.counter.work.items() if work.flop})
    return Ceilings(
        tflops={
            dtype: measure_matmul_tflops(precisions[dtype], device_type=device_type)
            for dtype in dtypes
        },
        gb_per_s=measure_bandwidth_gb_per_s(device_type=device_type),
    )
