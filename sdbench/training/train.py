"""The task of train.py: train a model, save it, and resume after a stop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError
from sdbench.base.secrets import redact_values
from sdbench.base.units import counted
from sdbench.data.formats.identity import CLASS_PICTURES, DATA, HELD_OUT, identify
from sdbench.measure import startup
from sdbench.measure.hardware import Machine
from sdbench.plan.draft import Plan
from sdbench.plan.window import steps_in_duration
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks
from sdbench.record.formulas import rate_of
from sdbench.record.history import read_history
from sdbench.record.store import TRAIN, RunFolder
from sdbench.run.step_progress import StepProgress
from sdbench.run.task import Run
from sdbench.run.trackers import TensorboardLog
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.request import Request
from sdbench.training.log import TrainLog
from sdbench.training.resuming import (
    compare_inputs,
    compare_settings,
    describe_random_parts,
    digest_of_validation,
)
from sdbench.training.surprises import describe_average, describe_rate
from sdbench.training.training_task import TrainingTask, end_loading

if TYPE_CHECKING:
    from sdbench.measure.watch import Observer, StepWatch
    from sdbench.state.checkpoints import Checkpoint, Checkpoints
    from sdbench.state.ray_storage import RayStorage
    from sdbench.training.evaluations import Evaluations
    from sdbench.training.train_hooks import TrainHooks


# The summary of a process that has no step left to train.
NOTHING_LEFT = {
    "images_per_second": None,
    "train_s": 0.0,
    "other_s": {},
    "num_saved": 0,
    "loss_last": None,
    "peak_memory_gib": None,
}


class Train(TrainingTask):
    """Trains a model for as long as the user says; its request is a `Request`."""

    kind = TRAIN
    program = "train.py"
    request: Request[TrainConfig]
    plan: Plan[TrainConfig]
    _evaluations: Evaluations | None = None
    _hooks: TrainHooks | None = None

    def _planning(self) -> dict[str, Any]:
        config = self.request.config
        return {"model_parts": config.model_parts, "resolve_steps": _resolve_length}

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Make the plan, and check what training needs beyond a measurement."""
        super().resolve(machine, ranks)
        config = self.request.config
        notes = []
        if config.save_every_batches is None:
            notes.append(
                f"A checkpoint is written only at the end, step {self.plan.num_steps}, or when the "
                "run is told to stop: a kill before that loses all steps. "
                "--save_every_batches writes more checkpoints."
            )
        intervals = ("validate", "sample", "score")
        if any(getattr(config, f"{name}_every_batches") for name in intervals):
            from sdbench.training.evaluations import Evaluations

            self._evaluations = Evaluations(self.plan)
        self._refuse_another_run()
        self._initial = self._find_initial()
        given: set[str] = set()
        if checkpoint := self._found or self._initial:
            from sdbench.training.checkpoint_weights import parts_in

            given = parts_in(checkpoint)
        notes += describe_random_parts(self.plan, given=given)
        planned = self.plan.config
        surprises = [describe_average(planned, num_steps=self.plan.num_steps)]
        if self._found is not None and ranks.rank == 0:
            surprises.append(describe_rate(planned, self._found, num_steps=self.plan.num_steps))
        notes += filter(None, surprises)
        if self._evaluations is not None:
            notes += self._evaluations.notes
        self.plan.notes += notes

    def make_folder(self) -> Path:
        """The folder of --run_name, locked against a second run; else a new one."""
        from sdbench.state.lock import lock

        config = self.plan.config
        if config.run_name is None:
            folder = super().make_folder()
        else:
            folder = Path(config.results_dir, config.run_name)
            folder.mkdir(parents=True, exist_ok=True)
        self.resources.enter_context(lock(folder))
        log = TrainLog(folder)
        if config.resume == "never":
            if (folder / "checkpoints").exists() or log.has_steps():
                raise ConfigError(
                    "the folder holds a run already",
                    value=str(folder),
                    allowed="--resume auto to go on with it, or another name",
                    flag="--run_name or --resume",
                )
            if log.forget():
                print(f"{folder} has a run that took no step: it begins anew.")
        RunFolder(folder).begin_again()
        return folder

    def work(self, run: Run) -> dict[str, Any]:
        """Build the job, go on from its checkpoint, and train it."""
        from sdbench.state.checkpoints import Checkpoints
        from sdbench.training import train_job
        from sdbench.training.checkpoint_weights import take_kept, take_weights
        from sdbench.training.encode_once import encode_once
        from sdbench.training.train_hooks import TrainHooks

        plan, clock, ranks = self.plan, run.clock, self.plan.ranks
        config = plan.config
        is_first = ranks.rank == 0
        checkpoints = Checkpoints(
            run.folder, ranks=ranks, keep=config.keep, keep_every=config.keep_every_batches
        )
        storage = self._open_storage(checkpoints)
        resumed = checkpoints.newest() if config.resume == "auto" else None
        first_step = 0 if resumed is None else resumed.step
        if resumed is not None:
            changes = self._compare_with(resumed)
            if is_first:
                print(f"Going on from step {resumed.step} ({resumed.folder}).")
                print("".join(f"  {change}\n" for change in changes), end="")
        reached = distributed.broadcast(self._find_reached(run.folder, first_step), ranks)
        if first_step >= plan.num_steps or reached is not None:
            summary = NOTHING_LEFT | {"first_step": first_step} | self._totals(run.folder)
            workload = {"num_steps": first_step}
            return {"summary": summary | self._to_target(reached), "workload": workload}
        tensorboard_log = TensorboardLog(is_on=config.tensorboard and ranks.rank == 0)
        tensorboard_log.start(folder=run.folder, num_steps=first_step)
        self.resources.callback(tensorboard_log.close)
        wandb_log, fit = self._begin(run, self._settings(), has_parts=True)
        progress = StepProgress(
            images_per_step=config.batch_size,
            enabled=is_first,
            first_step=first_step,
            steps_per_period=config.log_every_batches,
        )
        watch = _make_watch(
            plan, num_steps=plan.num_steps - first_step, observers=[clock, run.heartbeat, progress]
        )
        job = train_job.build(plan, phase=watch.phases.phase)
        if resumed is not None:
            job = dataclasses.replace(job, kept=take_kept(job.model, resumed))
        elif self._initial is not None:
            kept, message = take_weights(job.model, self._initial)
            job = dataclasses.replace(job, kept=kept)
            if is_first:
                print(message)
        evaluations = {}
        if self._evaluations is not None:
            evaluations = self._evaluations.begin(job, run.folder, watch)
        job = encode_once(job, plan, keeps_encoders=bool(evaluations))
        clock.ends(startup.BUILD)
        trackers = (wandb_log, tensorboard_log)
        log = TrainLog(run.folder, trackers=trackers) if is_first else None
        if log is not None:
            self.resources.callback(log.close)
        hooks = TrainHooks(
            plan=plan,
            job=job,
            watch=watch,
            checkpoints=checkpoints,
            storage=storage,
            resumed=resumed,
            log=log,
            progress=progress,
            evaluations=evaluations,
            facts=self._facts(),
        )
        self._hooks = hooks
        try:
            with contextlib.closing(progress):
                measurements = fit(job, config, watch, hooks)
        except BaseException as error:
            hooks.end_early(error)
            raise
        hooks.close()
        end_loading(job.loader, run.folder, ranks=ranks)
        train_s = max(distributed.gather(measurements.timings.window_s, ranks))
        num_steps = hooks.reached_step or plan.num_steps
        images = (num_steps - first_step) * job.images_per_step
        summary = {
            "images_per_second": rate_of(images, train_s) if train_s else None,
            "train_s": train_s,
            "other_s": hooks.seconds,
            "first_step": first_step,
            "num_saved": hooks.num_saved,
            "loss_last": hooks.last_loss,
            "peak_memory_gib": measurements.peak_memory_gib,
        }
        content = self._describe_work(job, num_images=num_steps * job.images_per_step)
        content["workload"]["num_steps"] = num_steps
        to_target = self._to_target(hooks.reached_step)
        return {"summary": summary | self._totals(run.folder) | to_target, **content}

    def _open_storage(self, checkpoints: Checkpoints) -> RayStorage | None:
        """Open Ray's storage for copies of checkpoints, if it is asked for; fetch one to resume."""
        config = self.plan.config
        if config.ray_storage_path is None:
            return None
        from sdbench.state.ray_storage import RayStorage

        storage = RayStorage(checkpoints, ranks=self.plan.ranks)
        if config.resume == "auto":
            storage.fetch()
        return storage

    @functools.cached_property
    def _inputs(self) -> dict[str, Any]:
        """What `compare_inputs` compares; on the first rank, as all of these weights are read."""
        plan, architecture = self.plan, self.plan.architecture
        config = plan.config
        parts = [] if config.train == "vae" else [architecture.family.denoiser]
        if config.step_has_encoders or config.online_preprocessing:
            parts += architecture.encoders
        if config.lora_rank is None and config.learned_token is None:
            trained = architecture.modules_of(config.trained_parts)
            parts = [part for part in parts if part not in trained]
        held_out = None if self._evaluations is None else self._evaluations.held_out
        sources = {DATA: plan.source, CLASS_PICTURES: plan.class_source, HELD_OUT: held_out}
        names = ("sample_prompts", "fid_network", "clip_network")
        return identify(
            {name: source for name, source in sources.items() if source is not None},
            files={f"--{name}": getattr(config, name) for name in names},
            model=architecture.identify(parts, seed=config.seed_of_weights),
        )

    def _facts(self) -> dict[str, Any]:
        """What each checkpoint stores beside the state; that of the first rank is stored."""
        inputs = self._inputs if self.plan.ranks.rank == 0 else {}
        return {"config": self._settings(), "inputs": inputs}

    def _settings(self) -> dict[str, Any]:
        """The settings as a checkpoint stores them: without secrets, and a hub model's commit."""
        settings = dataclasses.asdict(self.plan.config)
        return redact_values(settings | {"model_revision": self.plan.architecture.revision})

    def _refuse_another_run(self) -> None:
        """Find the checkpoint to resume; refuse another run's before anything is written."""
        from sdbench.state.checkpoints import find_newest

        config = self.plan.config
        self._found = None
        if config.resume == "auto":
            self._found = find_newest(Path(config.results_dir, config.run_name))
        if self._found is not None:
            self._compare_with(self._found)

    def _compare_with(self, checkpoint: Checkpoint) -> list[str]:
        """Describe what differs from a checkpoint; a `ConfigError` refuses what may not differ."""
        facts, folder = checkpoint.facts, checkpoint.folder
        changes = compare_settings(facts["config"], self._settings(), folder=folder)
        if self.plan.ranks.rank == 0:
            accepts = self.plan.config.changed_inputs == "accept"
            changes += compare_inputs(facts["inputs"], self._inputs, accepts=accepts, folder=folder)
        return changes

    def _find_initial(self) -> Checkpoint | None:
        """The checkpoint whose weights a new run begins with; it suits the model."""
        config = self.plan.config
        if config.init_from is None or self._found is not None:
            return None
        from sdbench.training.checkpoint_weights import check_weights, open_checkpoint, parts_in

        checkpoint = open_checkpoint(Path(config.init_from), flag="--init_from")
        architecture = self.plan.architecture
        trained = architecture.modules_of(config.trained_parts)
        trained_encoders = parts_in(checkpoint) - set(trained)
        if config.online_preprocessing and trained_encoders:
            raise ConfigError(
                "encoders that run beside the training have the weights of the model alone, and "
                f"the checkpoint has its own {' and '.join(sorted(trained_encoders))}",
                value=config.init_from,
                allowed="its export as --model_name, or no --online_preprocessing",
                flag="--init_from or --online_preprocessing",
            )
        # Neither a VAE that is trained nor a U-Net that reads latents has another part beside it.
        is_alone = config.train == "vae" or not config.step_has_encoders
        parts = trained if is_alone else architecture.modules
        check_weights(checkpoint, architecture, parts=parts)
        return checkpoint

    def _find_reached(self, folder: Path, first_step: int) -> int | None:
        """The step, up to that which the run goes on from, at which it has reached the target.

        Steps that a stop has lost and that were trained again do not count, nor do losses that were
        measured on other held-out samples, or otherwise.
        """
        from sdbench.training.train_hooks import reaches

        config = self.plan.config
        if self.plan.ranks.rank != 0 or not config.target_loss:
            return None
        validated_by = digest_of_validation(self._facts())
        steps: list[int] = []
        is_same = False
        for one in read_history(folder):
            if one["event"] == "begin":
                steps = [step for step in steps if step <= one["step"]]
                is_same = one.get("validated_by") == validated_by
            elif is_same and reaches(config.target_loss, one["event"], one):
                steps.append(one["step"])
        return next((step for step in steps if step <= first_step), None)

    def _to_target(self, step: int | None) -> dict[str, Any]:
        """Samples until the target, for a summary; empty without a target."""
        config = self.plan.config
        if config.target_loss is None:
            return {}
        return {"samples_to_target": None if step is None else step * config.batch_size}

    def _totals(self, folder: Path) -> dict[str, Any]:
        """Figures of the run over all its processes; on the first rank, which has its files."""
        if self.plan.ranks.rank != 0:
            return {}
        return TrainLog(folder).totals(images_per_step=self.plan.config.batch_size)

    def write_partial(self, folder: Path) -> None:
        """Write the rows of the steps that have ended."""
        if self._hooks is not None:
            self._hooks.write_steps()

    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """End the log, and give the result in words."""
        summary = content["summary"]
        if self._wandb_log is not None:
            self._wandb_log.finish(summary)
        rate, num_steps = summary["images_per_second"], content["workload"]["num_steps"]
        TrainLog(folder).add_event("end", step=max(num_steps, summary["first_step"]))
        export = f"Its model for diffusers: python -m sdbench export {shlex.quote(str(folder))}"
        if rate is None:
            trained = counted(summary["first_step"], "step")
            done = f"Nothing is left to train: the run has {trained}"
            if summary.get("samples_to_target"):
                samples = summary["samples_to_target"]
                return (
                    f"{done} and had reached its --target_loss after {samples} samples.\n{export}"
                )
            return f"{done}, and a larger --max_duration trains on.\n{export}"
        other_s = ", ".join(f"{event} {s:.1f} s" for event, s in summary["other_s"].items())
        loss = summary["loss_last"]  # None where all steps were skipped
        target = ""
        if "samples_to_target" in summary:
            config = self.plan.config
            samples = summary["samples_to_target"]
            reached = "not reached" if samples is None else f"reached after {samples} samples"
            target = f"The validation loss {config.target_loss:g} was {reached}.\n"
        return (
            f"Trained to step {num_steps}: {rate:.4g} images/s while training ({other_s} besides), "
            f"last loss {'none' if loss is None else f'{loss:.4f}'}.\n{target}{export}"
        )


def _resolve_length(draft: Plan[TrainConfig], *, num_samples: int | None) -> tuple[int, int]:
    """The steps of the run, which nothing makes longer."""
    num_steps = steps_in_duration(draft, draft.config.max_duration, num_samples)
    return num_steps, num_steps


def _make_watch(plan: Plan[TrainConfig], *, num_steps: int, observers: list[Observer]) -> StepWatch:
    import torch

    from sdbench.measure.phases import PhaseClock
    from sdbench.measure.timer import PeriodTimer
    from sdbench.measure.watch import StepWatch

    on_gpu = plan.machine.device_type == "cuda"
    timer: Any = PeriodTimer(**({"synchronize": torch.cuda.synchronize} if on_gpu else {}))
    return StepWatch(
        timer,
        phases=PhaseClock(),
        observers=observers,
        num_steps=num_steps,
        keeps_steps=True,
        stop_grace_s=plan.config.stop_grace_s,
    )
