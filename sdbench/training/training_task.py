"""`TrainingTask`: the base of the tasks that train a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.data.formats.identity import describe_data_or_warn
from sdbench.measure import startup
from sdbench.measure.hardware import Machine
from sdbench.plan import describe
from sdbench.plan.draft import Plan
from sdbench.plan.resolve import check_ahead, resolve
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import RunFolder
from sdbench.run.runner import garbage_collection_paused
from sdbench.run.task import Run, Task
from sdbench.run.trackers import WandbLog
from sdbench.settings.recipe import EngineConfig
from sdbench.settings.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from sdbench.data.batches.loader import CheckedLoader
    from sdbench.engines.job import TrainJob

# What Ray Data reports of its stages.
RAY_DATA_NAME = "ray_data.txt"


class TrainingTask(Task):
    """A task that trains; its request is for a `BenchmarkConfig` or a `TrainConfig`."""

    imports = ("sdbench.plan.memory_limit",)
    request: Request[EngineConfig]
    plan: Plan[EngineConfig]
    _wandb_log: WandbLog | None = None

    @property
    def timeout_s(self) -> float:
        """The flag --dist_timeout."""
        return self.request.config.dist_timeout

    def _planning(self) -> dict[str, Any]:
        """Arguments of `resolve` and `check_ahead` beside the request."""
        return {}

    def check_ahead(self, ranks: Any) -> None:
        """Check what the plan does not decide for a machine."""
        check_ahead(self.request, ranks=ranks, **self._planning())

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Make the plan."""
        self.plan = resolve(self.request, machine=machine, ranks=ranks, **self._planning())

    def make_folder(self) -> Path:
        """Make a new folder in --results_dir."""
        return self._new_folder(self.plan.name)

    def _new_folder(self, name: str) -> Path:
        machine = self.plan.machine.slug
        return RunFolder.create(self.plan.config.results_dir, machine=machine, name=name)

    def printed_config(self) -> str | None:
        """The plan as a config file."""
        if not self.request.print_config:
            return None
        plan = self.plan
        return describe.as_yaml(plan.request, plan.config, chosen=plan.chosen, notes=plan.notes)

    def _begin(
        self, run: Run, settings: dict[str, Any], *, has_parts: bool = False
    ) -> tuple[WandbLog, Callable[..., Any]]:
        """Open the log to W&B, set the process up, and import the engine, whose `fit` trains."""
        from sdbench.engines import load_engine
        from sdbench.training import tuning

        config = self.plan.config
        wandb_log = WandbLog(
            name=config.wandb_name, project=config.wandb_project, rank=self.plan.ranks.rank
        )
        self._wandb_log = wandb_log
        wandb_log.start(config=settings, folder=run.folder, has_parts=has_parts)
        tuning.set_up_process(config)
        run.clock.ends(startup.PLAN)
        with garbage_collection_paused():
            fit = load_engine(config.engine)
        run.clock.ends(startup.IMPORTS)
        return wandb_log, fit

    def _describe_work(self, job: TrainJob, *, num_images: int) -> dict[str, Any]:
        """The fields ``workload`` and ``data`` of a record; called on every rank."""
        ranks = self.plan.ranks
        stats = distributed.gather(job.loader.stats, ranks)
        return {
            "workload": {
                "num_parameters": job.num_parameters,
                "num_trainable_parameters": job.num_trainable_parameters,
                "flops_per_image": job.flops_per_image,
                "num_images": num_images,
                "num_bad_samples": sum(of_rank.num_bad_samples for of_rank in stats),
                "num_dropped_samples": job.loader.stats.num_dropped_samples,
                "num_failed_blocks": sum(of_rank.num_failed_blocks for of_rank in stats),
            },
            "data": describe_data_or_warn(self.plan.config) if ranks.rank == 0 else None,
        }

    def for_person(self) -> str:
        """The plan in words."""
        return describe.for_person(self.plan)

    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """The plan as a record has it."""
        return describe.for_record(self.plan, num_restarts=num_restarts)


def end_loading(loader: CheckedLoader, folder: Path, *, ranks: Ranks) -> None:
    """Write what Ray Data reports of its stages, and end the loading processes."""
    description = loader.describe_stream() if ranks.rank == 0 else None
    if description is not None:
        (folder / RAY_DATA_NAME).write_text(description, encoding="utf-8")
    loader.close()
