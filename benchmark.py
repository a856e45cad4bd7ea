"""How many images a second does this machine train Stable Diffusion with?

    composer benchmark.py --use_synth_data --device_train_microbatch_size 8
    torchrun --nproc_per_node 8 benchmark.py --use_synth_data --use_ema
    python benchmark.py --model_name tiny --use_synth_data

This is the one place where a workload meets an engine: flags become a plan, the plan becomes job,
the engine trains them under a watch, and what the watch saw becomes a record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.output import protected_output
from sdbench.base.refusal import report_refusal
from sdbench.ranks.distributed import Ranks, let_first_rank_end
from sdbench.settings.config import Request, parse_request

if TYPE_CHECKING:
    from sdbench.engines.job import TrainJob
    from sdbench.measure.hardware import Machine
    from sdbench.measure.startup import StartupClock
    from sdbench.measure.summary import Measurements
    from sdbench.measure.watch import Observer, StepWatch
    from sdbench.plan.resolve import Plan
    from sdbench.ranks.heartbeat import Heartbeat
    from sdbench.ranks.nccl_log import NcclLog
    from sdbench.record.store import RunFolder

DESCRIPTION = "Measure how fast this machine trains Stable Diffusion, and write a record of it."
EPILOG = """\
examples:
  composer benchmark.py --use_synth_data --device_train_microbatch_size 8
      the U-Net of Stable Diffusion 2 base on synthetic images, on every GPU here or on the CPU
  composer benchmark.py --use_ema --use_synth_data --device_train_microbatch_size 4
      the same with a moving average of the weights
  composer benchmark.py --remote my-mds-folder
      on real images; `python -m sdbench convert` makes the folder
  composer -n 2 benchmark.py --model_name tiny --use_synth_data
      a miniature in seconds, on two processes
  python benchmark.py --preset seed --print_config
      what a run would use, and who chose it

exit codes: 0 ok, 1 the run failed (its record says why), 2 bad input, 130 Ctrl-C
"""


@protected_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Args:
        argv: Command-line arguments; None takes those of the process.

    Returns:
        The exit code.
    """
    try:
        request = parse_request(argv, description=DESCRIPTION, epilog=EPILOG)
        return _run(request, command=list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        ranks = Ranks.from_environment()
        if ranks.rank == 0:  # every rank has found the same
            print(f"error: {error}", file=sys.stderr)
            report_refusal(error)
        let_first_rank_end(ranks)
        return 2
    except RunError as error:  # before there was a run
        print(f"error: {error}", file=sys.stderr)
        report_refusal(error)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(request: Request, *, command: list[str]) -> int:
    from sdbench.base.stop import stop_signals_raise
    from sdbench.measure import startup
    from sdbench.record.store import OutputLog, RunFolder

    clock = startup.StartupClock(before_main_s=startup.seconds_before_now())
    ranks = Ranks.from_environment()
    log = OutputLog()
    with log.capture(), stop_signals_raise():
        with _no_garbage_expected():
            from sdbench.measure.hardware import inspect_machine
            from sdbench.plan import describe
            from sdbench.ranks import distributed
            from sdbench.ranks.heartbeat import Heartbeat
            from sdbench.ranks.nccl_log import NcclLog

            clock.ends(startup.IMPORTS)
            machine = inspect_machine(local_rank=ranks.local_rank)
            nccl_log = NcclLog(ranks, device_type=machine.device_type)
            plan = _agree_on_plan(request, machine=machine, ranks=ranks, command=command)
            heartbeat = Heartbeat(ranks, timeout_s=plan.config.dist_timeout)
        if request.print_config:
            if ranks.rank == 0:
                print(describe.as_yaml(plan, request))
            return 0
        path = None
        if ranks.rank == 0:
            path = _make_folder(plan).path
            log.move_to(path)
            print(describe.for_person(plan), flush=True)
        folder = RunFolder(distributed.broadcast(path, ranks))
        clock.ends(startup.PLAN)
        return _run_in_folder(
            plan,
            request,
            folder,
            command=command,
            clock=clock,
            heartbeat=heartbeat,
            nccl_log=nccl_log,
        )


def _make_folder(plan: Plan) -> RunFolder:
    from sdbench.record.store import RunFolder

    machine = plan.machine.slug
    return RunFolder(RunFolder.create(plan.config.results_dir, machine=machine, name=plan.name))


@contextlib.contextmanager
def _no_garbage_expected() -> Iterator[None]:
    """Imports make a million objects to stay: looking for garbage in them takes 0.7 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # also later no collection looks at them, in a measured step least of all
        gc.enable()


def _agree_on_plan(request: Request, *, machine: Machine, ranks: Ranks, command: list[str]) -> Plan:
    """Resolve on every rank; an error on one of them is an error, the same one, on all."""
    from sdbench.plan import describe
    from sdbench.plan.resolve import resolve
    from sdbench.ranks import distributed
    from sdbench.run.outcome import RunRecord, explain

    plan, error = None, None
    try:
        plan = resolve(request, machine=machine, ranks=ranks)
    except ConfigError as config_error:
        error = config_error
    try:
        distributed.connect(
            ranks, device_type=machine.device_type, timeout_s=request.config.dist_timeout
        )
    except RunError as absence:
        if plan is not None and ranks.rank == 0:
            described = describe.for_record(plan, request, num_restarts=distributed.num_restarts())
            record = RunRecord(_make_folder(plan), command=command, described=described)
            record.end_badly(explain(absence, rank=0))
        raise
    errors = [error for error in distributed.gather(error, ranks) if error is not None]
    if errors:
        raise errors[0]
    assert plan is not None
    configs = distributed.gather(plan.config, ranks)
    assert configs == [plan.config] * ranks.world_size, "ranks resolved the same flags differently"
    return plan


def _run_in_folder(
    plan: Plan,
    request: Request,
    folder: RunFolder,
    *,
    command: list[str],
    clock: StartupClock,
    heartbeat: Heartbeat,
    nccl_log: NcclLog,
) -> int:
    """Train, and leave a record whatever happens."""
    from sdbench.plan import describe
    from sdbench.ranks import distributed
    from sdbench.record.row import append_row
    from sdbench.record.store import STEPS_NAME
    from sdbench.report.terminal import format_summary
    from sdbench.run.outcome import Failure, RunRecord, explain_among_ranks, warn_if_not_written

    num_restarts = max(distributed.gather(distributed.num_restarts(), plan.ranks))
    described = describe.for_record(plan, request, num_restarts=num_restarts)
    record = RunRecord(folder, command=command, described=described)
    is_first_rank = plan.ranks.rank == 0
    if is_first_rank:
        record.write_unfinished()

    def end_badly(failure: Failure) -> int:
        record.end_badly(failure)
        print(f"{failure.status}: {failure.reason}\nrecord: {folder.path}", file=sys.stderr)
        return failure.exit_code

    def end_as_one_is_lost(lost: str) -> None:
        """In another thread, while the main one waits for ever: NCCL knows no dead neighbour."""
        os._exit(end_badly(Failure("timeout", f"{lost} (--dist_timeout)", exit_code=1)))

    heartbeat.watch(end_as_one_is_lost)
    try:
        job, measurements, summary = _train(
            plan, folder, clock=clock, heartbeat=heartbeat, nccl_log=nccl_log
        )
        delivered = distributed.gather(job.loader.stats, plan.ranks)
        heartbeat.end("ok")
    except BaseException as error:  # also Ctrl-C: the record has to say why
        failure = explain_among_ranks(error, heartbeat=heartbeat, rank=plan.ranks.rank)
        exit_code = end_badly(failure)
        heartbeat.end(failure.status, failure.reason)
        return exit_code
    if is_first_rank:
        content = record.end_well(
            summary=summary,
            workload={
                "num_parameters": job.num_parameters,
                "num_trainable_parameters": job.num_trainable_parameters,
                "flops_per_image": job.flops_per_image,
                "num_steps": len(measurements.timings.steps),
                "num_images": measurements.num_images,
                "num_bad_samples": sum(stats.num_bad_samples for stats in delivered),
                "num_dropped_samples": job.loader.stats.num_dropped_samples,
            },
            network=nccl_log.read_network(),
        )
        with warn_if_not_written(STEPS_NAME):
            folder.write_steps(measurements.timings.steps)
        with warn_if_not_written("runs.csv"):
            append_row(folder.path.parent / "runs.csv", content)
        print(f"\n{format_summary(content)}\n\nrecord: {folder.path}")
    distributed.disconnect()
    return 0


def _train(
    plan: Plan,
    folder: RunFolder,
    *,
    clock: StartupClock,
    heartbeat: Heartbeat,
    nccl_log: NcclLog,
) -> tuple[TrainJob, Measurements, dict[str, Any]]:
    """Build the job, train them, and merge what all ranks measured.

    Returns:
        The job, the measurements of the run as a whole, and the record's summary.
    """
    from sdbench.base.secrets import redact_values
    from sdbench.engines import load_engine
    from sdbench.measure import startup
    from sdbench.measure.matmul import measure_matmul_tflops
    from sdbench.measure.summary import merge_measurements, summarize
    from sdbench.ranks import distributed
    from sdbench.ranks.nccl_log import SOCKETS
    from sdbench.run.progress import Progress
    from sdbench.run.wandb_log import WandbLog
    from sdbench.tasks import pretrain, tuning

    config, ranks, machine = plan.config, plan.ranks, plan.machine
    wandb_log = WandbLog(name=config.wandb_name, project=config.wandb_project, rank=ranks.rank)
    settings = dataclasses.asdict(config)
    wandb_log.start(config=redact_values(settings), folder=folder.path)
    tuning.set_up_process(config)
    clock.ends(startup.PLAN)
    with _no_garbage_expected():
        fit = load_engine(config.engine)
    clock.ends(startup.IMPORTS)
    matmul_tflops = None
    if config.measure_peak:
        distributed.gather(None, ranks)  # together, as in training: ranks may share their cores
        reached = measure_matmul_tflops(config.precision, device_type=machine.device_type)
        by_rank = distributed.gather(reached, ranks)
        matmul_tflops = sum(by_rank) / len(by_rank)
    clock.ends(startup.PEAK)
    progress = Progress(images_per_step=config.batch_size, enabled=ranks.rank == 0)
    watch = _make_watch(plan, folder, observers=[clock, heartbeat, progress, wandb_log])
    job = pretrain.build(plan, phase=watch.phases.phase)
    if ranks.rank == 0:
        print(
            f"Model has {job.num_parameters / 1e6} M parameters and "
            f"{job.num_trainable_parameters / 1e6} M trainable_params"
        )
    clock.ends(startup.BUILD)
    try:
        measurements = fit(job, config, watch)
    finally:
        progress.close()

    merged = merge_measurements(distributed.gather(measurements, ranks))
    num_steps = len(merged.timings.steps)
    num_expected = job.images_per_step * num_steps
    if merged.num_images != num_expected:
        raise RunError(
            f"the loaders delivered {merged.num_images} images; {num_steps} steps of "
            f"{job.images_per_step} are {num_expected}",
            status="invalid",
        )
    summary = summarize(
        merged,
        config=settings,
        num_devices=ranks.world_size,
        ranks_per_node=ranks.local_world_size,
        flops_per_image=job.flops_per_image,
        peak_tflops=machine.peak_tflops(config.precision),
        matmul_tflops=matmul_tflops,
        startup=clock,
        uses_sockets=nccl_log.read_network() == SOCKETS,
    )
    wandb_log.finish(summary)
    return job, merged, summary


def _make_watch(plan: Plan, folder: RunFolder, *, observers: Sequence[Observer]) -> StepWatch:
    """A watch that measures what the plan asks for, and comes to one decision on all ranks."""
    from sdbench.measure.watch import make_watch
    from sdbench.measure.window import WindowPolicy
    from sdbench.ranks import distributed

    config, ranks = plan.config, plan.ranks
    looks = WindowPolicy(
        max_warmup_steps=config.max_warmup_batches,
        max_measured_steps=config.max_measure_batches,
        target_precision=config.target_precision,
        gather=lambda value: distributed.gather(value, ranks),
    )
    return make_watch(
        num_warmup_steps=config.warmup_batches,
        num_measured_steps=config.measure_batches,
        num_profiled_steps=config.profile_batches,
        look=looks,
        num_steps=None if config.max_duration is None else plan.num_steps,
        cuda_device=ranks.local_rank if plan.machine.device_type == "cuda" else None,
        observers=observers,
        has_trace=config.profile_trace,
        trace_file=folder.path / "trace.json.gz" if ranks.rank == 0 else None,
    )


if __name__ == "__main__":
    exit_code = main()
    gc.freeze()  # or Python looks for garbage in all that was imported before it ends: 0.8 s
    sys.exit(exit_code)
