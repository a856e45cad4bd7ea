"""The task of benchmark.py: train for some steps under a watch, and sum up what it measured."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.base.output import fit
from sdbench.base.secrets import redact_values
from sdbench.measure import startup
from sdbench.measure.hardware import Machine
from sdbench.measure.neighbours import Neighbours
from sdbench.plan.draft import Plan
from sdbench.plan.window import looks_at_attention
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks
from sdbench.ranks.launcher import typed_command
from sdbench.ranks.nccl_log import NcclLog
from sdbench.record.row import append_row, make_row
from sdbench.record.store import BENCHMARK, STEPS_NAME, RunFolder
from sdbench.report.outlook import describe_outlook
from sdbench.report.terminal import format_summary
from sdbench.run.outcome import warn_if_not_written
from sdbench.run.step_progress import StepProgress
from sdbench.run.task import Run
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.ray import RAY
from sdbench.training.training_task import TrainingTask, end_loading

if TYPE_CHECKING:
    from sdbench.measure.summary import Measurements
    from sdbench.measure.watch import Observer, StepWatch


class Benchmark(TrainingTask):
    """Measures how fast this machine trains."""

    kind = BENCHMARK
    program = "benchmark.py"
    plan: Plan[BenchmarkConfig]
    _nccl_log: NcclLog
    _neighbours: Neighbours
    _measurements: Measurements
    _watch: StepWatch | None = None

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Make the plan."""
        self._nccl_log = NcclLog(ranks, device_type=machine.device_type)
        self._neighbours = Neighbours()
        super().resolve(machine, ranks)

    def work(self, run: Run) -> dict[str, Any]:
        """Build the job, train it, and merge what all ranks measured."""
        from sdbench.measure.summary import merge_measurements, summarize
        from sdbench.training import pretrain
        from sdbench.training.encode_once import encode_once

        plan, clock = self.plan, run.clock
        config, ranks, machine = plan.config, plan.ranks, plan.machine
        settings = dataclasses.asdict(config)
        wandb_log, fit = self._begin(run, redact_values(settings))
        matmul_tflops = _measure_peak(plan) if config.measure_peak else None
        clock.ends(startup.PEAK)
        progress = StepProgress(images_per_step=config.batch_size, enabled=ranks.rank == 0)
        watch = _make_watch(plan, run, observers=[clock, run.heartbeat, progress, wandb_log])
        self._watch = watch
        job = encode_once(pretrain.build(plan, phase=watch.phases.phase), plan)
        if ranks.rank == 0:
            print(
                f"Model has {job.num_parameters / 1e6} M parameters and "
                f"{job.num_trainable_parameters / 1e6} M trainable_params"
            )
        is_busy = self._tell_neighbours(watch)
        clock.ends(startup.BUILD)
        with contextlib.closing(progress):
            measurements = fit(job, config, watch)
        end_loading(job.loader, run.folder, ranks=ranks)
        wandb_log.close()

        merged = merge_measurements(distributed.gather(measurements, ranks))
        num_steps = len(merged.timings.steps)
        assert merged.num_images == job.images_per_step * num_steps, "the loaders are out of step"
        network = self._nccl_log.read_network()
        mixture = self.plan.mixture
        summary = summarize(
            merged,
            config=settings,
            num_devices=ranks.world_size,
            ranks_per_node=ranks.local_world_size,
            flops_per_image=job.flops_per_image,
            peak_tflops=machine.peak_tflops(config.precision),
            matmul_tflops=matmul_tflops,
            startup=clock,
            network=network,
            is_busy=is_busy,
            samples_by_shape=None if mixture is None else mixture.samples_by_shape(),
        )
        self._measurements = merged
        fields = self._describe_work(job, num_images=merged.num_images)
        fields["workload"]["num_steps"] = num_steps
        network_facts = {} if network is None else {"network": network}
        return {"summary": summary, "ranks": network_facts, **fields}

    def _tell_neighbours(self, watch: StepWatch) -> bool:
        """Print which other processes use CPUs or GPUs; returns whether they use the CPUs."""
        ranks, monitor = self.plan.ranks, watch.gpu_monitor
        own = distributed.gather(os.getpid(), ranks)
        on_gpus = distributed.gather(monitor and monitor.describe_others(), ranks)
        if ranks.rank != 0:
            return False
        # Ray's processes, among which are those of the run, have not been started by the ranks.
        on_cpus = None if self.plan.config.engine == RAY else self._neighbours.describe(own)
        for caution in filter(None, [on_cpus, *on_gpus]):
            print(fit(f"caution: {caution}", hanging=4))
        return on_cpus is not None

    @classmethod
    def result(cls, content: dict[str, Any]) -> dict[str, Any]:
        """The row of runs.csv."""
        return make_row(content)

    def write_partial(self, folder: Path) -> None:
        """Write steps.csv, and log to W&B, the steps that the first rank has timed."""
        if self._watch is None:
            return
        if steps := self._watch.timer.steps():
            with warn_if_not_written(STEPS_NAME):
                RunFolder(folder).write_steps(steps)
        self._wandb_log.close()

    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """Write steps.csv and the row of runs.csv, and end the log."""
        with warn_if_not_written(STEPS_NAME):
            RunFolder(folder).write_steps(self._measurements.timings.steps)
        with warn_if_not_written("runs.csv"):
            append_row(folder.parent / "runs.csv", content)
        self._wandb_log.finish(content["summary"])
        command = typed_command(content["command"]) if self.plan.ranks.num_nodes == 1 else None
        outlook = describe_outlook(content, folder, command=command)
        return f"{format_summary(content)}\n\n{outlook}"


def _measure_peak(plan: Plan[BenchmarkConfig]) -> float:
    """Mean TFLOP/s of the ranks' matrix products, all measured at once as they may share cores."""
    from sdbench.measure.ceilings import measure_matmul_tflops

    distributed.gather(None, plan.ranks)
    device_type = plan.machine.device_type
    reached = measure_matmul_tflops(plan.config.precision, device_type=device_type)
    by_rank = distributed.gather(reached, plan.ranks)
    return sum(by_rank) / len(by_rank)


def _make_watch(
    plan: Plan[BenchmarkConfig], run: Run, *, observers: Sequence[Observer]
) -> StepWatch:
    """A watch that measures what the plan asks for, and comes to one decision on all ranks."""
    from sdbench.measure.timer import WindowPolicy
    from sdbench.measure.watch import make_watch

    config, ranks = plan.config, plan.ranks
    policy = WindowPolicy(
        max_warmup_steps=config.max_warmup_batches,
        max_measured_steps=config.max_measure_batches,
        target_precision=config.target_precision,
        gather=lambda value: distributed.gather(value, ranks),
    )
    return make_watch(
        timing={
            "num_warmup_steps": config.warmup_batches,
            "num_measured_steps": config.measure_batches,
            "num_profiled_steps": config.profile_batches,
            "policy": policy,
        },
        num_steps=None if config.max_duration is None else plan.num_steps,
        cuda_device=ranks.local_rank if plan.machine.device_type == "cuda" else None,
        observers=observers,
        trace_file=run.folder / "trace.json.gz" if config.profile_trace else None,
        records_attention=looks_at_attention(config, ranks),
        stop_grace_s=config.stop_grace_s,
    )
