"""`TrainHooks`: figures, checkpoints and evaluations between the steps of train.py."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import RunError, add_remark, first_line
from sdbench.base.stop import STOPS
from sdbench.settings.recipe import TrainConfig
from sdbench.training.bad_loss import BadLosses
from sdbench.training.log import TrainLog
from sdbench.training.resuming import digest_of_validation

if TYPE_CHECKING:
    from torch import Tensor

    from sdbench.engines.job import TrainJob
    from sdbench.engines.train_state import TrainState
    from sdbench.measure.watch import StepWatch
    from sdbench.plan.draft import Plan
    from sdbench.run.step_progress import StepProgress
    from sdbench.state.checkpoints import Checkpoint, Checkpoints
    from sdbench.state.ray_storage import RayStorage
    from sdbench.training.evaluations import Evaluation


def reaches(target: float | None, event: str, facts: Mapping[str, Any]) -> bool:
    """Whether an event is a validation at a target; averaged weights decide where they are kept."""
    if target is None or event != "validation":
        return False
    loss = facts.get("ema_loss", facts["loss"])
    return loss is not None and loss <= target


@dataclasses.dataclass(kw_only=True)
class TrainHooks:
    """The `TrainingHooks` of a run.

    Attributes:
        storage: Gets a copy of each checkpoint.
        resumed: The checkpoint that the run begins with.
        log: The log of the first rank; None on the others.
        facts: Facts that each checkpoint stores beside the state.
        seconds: Seconds without training in this process, by event.
        num_saved: Checkpoints written by this process.
        last_loss: The last finite loss that has been read; None before the first.
        reached_step: The step whose validation loss has reached the target; None before.
    """

    plan: Plan[TrainConfig]
    job: TrainJob
    watch: StepWatch
    checkpoints: Checkpoints
    storage: RayStorage | None
    resumed: Checkpoint | None
    log: TrainLog | None
    progress: StepProgress
    evaluations: dict[str, tuple[int, Evaluation]]
    facts: dict[str, Any]
    seconds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_saved: int = 0
    last_loss: float | None = None
    reached_step: int | None = None
    _state: TrainState | None = None
    _saved_step: int | None = None
    _whole_step: int = 0  # of the newest checkpoint

    def __post_init__(self) -> None:
        self._config = self.plan.config
        self._timer: Any = self.watch.timer
        self._bad_losses = BadLosses(
            action=self._config.on_bad_loss,
            has_scaler=self._config.precision == "amp_fp16",
            losses=self._timer.losses,
            loader=self.job.loader,
            checkpoints=self.checkpoints,
            log=self.log,
            ranks=self.plan.ranks,
        )

    def begins(self, state: TrainState) -> None:
        """Load the checkpoint, if there is one."""
        self._state = state
        if self.resumed is not None:
            facts = self.resumed.facts["state"]
            tensors = state.prepare_to_load(facts, saved=self.resumed.tensors().keys())
            self.resumed.load_into(tensors)
            state.loaded(tensors, facts)
            self._saved_step = self._whole_step = state.num_steps
        if self.log is not None:
            self.log.begin(
                num_steps=state.num_steps,
                images_per_step=self.job.images_per_step,
                passed_over=() if self.resumed is None else self.resumed.passed_over,
                validated_by=digest_of_validation(self.facts),
            )

    def gradients_ready(self, loss: Tensor, norm: Tensor | None) -> None:
        """Skip the update of a bad step, and wait for a save that still reads the state."""
        assert self._state is not None
        self._bad_losses.judge(self._state, loss, norm)
        if self.checkpoints.is_reading:
            self._timer.pause()
            self.checkpoints.wait_until_read()
            self._timer.start()

    def step_ended(self, state: TrainState) -> None:
        """Write figures, save and evaluate, as far as each is due.

        The save comes first: an evaluation takes minutes, in which a run may be killed. A step that
        is stopped is saved by `end_early`.
        """
        step, is_stopped = state.num_steps, self.watch.is_stopped
        if self.log is not None:
            self.log.mark_step(step)
        is_last = self.watch.is_over and not is_stopped

        def is_due(interval: int | None) -> bool:
            return is_last or (interval is not None and step % interval == 0)

        saves = is_due(self._config.save_every_batches)
        due = {
            event: evaluate
            for event, (interval, evaluate) in self.evaluations.items()
            if is_due(interval) and not is_stopped
        }
        ends_period = saves or due or is_stopped or is_due(self._config.log_every_batches)
        if ends_period or state.is_skipped:
            self._bad_losses.read()
        self._report_saves()
        is_bad = self._bad_losses.is_known
        if ends_period or is_bad:
            figures = self.write_steps()
            if figures is not None:
                self.progress.period_ends(figures)
        if not (due or saves or is_bad):
            return
        self._timer.pause()
        started_s = time.perf_counter()
        if is_bad:
            with contextlib.suppress(RunError):  # a save that failed is reported in the next line
                self.checkpoints.finish()
            self._report_saves()
            self._bad_losses.act(state, is_last=is_last)
            self.seconds["bad_loss"] += time.perf_counter() - started_s
        may_save = step != self._saved_step and state.is_whole
        if saves and may_save:
            self._begin_save(state)
        for event, evaluate in due.items():
            self.checkpoints.wait_until_read()  # evaluations swap the weights for averages
            facts = self._evaluate(event, evaluate, state)
            # After going back they are of weights of an older step.
            if state.is_whole and reaches(self._config.target_loss, event, facts):
                self.reached_step = step
                self.watch.end_early()
                if self.log is not None:
                    print(f"step {step}: the validation loss has reached --target_loss", flush=True)
        if self.reached_step and may_save and not saves:
            self._begin_save(state)
        self.progress.leave_out(time.perf_counter() - started_s)
        self._timer.start()

    def end_early(self, error: BaseException) -> None:
        """Save the last step that has ended, and add to the error what is lost.

        It is saved if its state is whole, if other ranks save it too, and if nothing is known to be
        bad. A further signal ends the wait.
        """
        state = self._state
        try:
            with contextlib.suppress(RunError):  # it is reported
                self.close()
            if state is not None and state.is_whole and self.watch.ends_together:
                self._bad_losses.read()
                if state.num_steps > self._whole_step and not self._bad_losses.is_known:
                    self._begin_save(state)
                    with contextlib.suppress(RunError):
                        self.close()
        except (Exception, *STOPS) as fault:  # the reason is what has ended the run
            print(f"warning: the last step was not saved: {first_line(fault)}", file=sys.stderr)
        add_remark(error, self.describe_saved_steps())

    def close(self) -> None:
        """Wait for the checkpoint under way; a `RunError` says that it was not saved."""
        if self._state is not None:
            try:
                self.checkpoints.finish()
            finally:
                self._report_saves()

    def describe_saved_steps(self) -> str:
        """The end of a sentence: which steps are lost, and from which a run can go on."""
        num_steps = 0 if self._state is None else self._state.num_steps
        remark = ""
        if num_steps > self._whole_step:
            remark = f"; lost: steps {self._whole_step + 1} to {num_steps}, in no checkpoint"
        if self._whole_step:
            command = "the same command" if self._config.resume == "auto" else "--resume auto"
            remark += f"; step {self._whole_step} is saved, and {command} goes on from it"
        return remark

    def write_steps(self) -> str | None:
        """Write a row for each step since the last call; return their figures in words."""
        if self._state is None:
            return None
        step, period = self._state.num_steps, self._timer.end_period()
        if not period.num_steps:
            return None
        finite = filter(math.isfinite, reversed(period.losses))
        self.last_loss = next(finite, self.last_loss)
        rate = period.num_steps * self.job.images_per_step / period.time_s
        wait_percent = 100 * period.data_wait_s / period.time_s
        rows = [
            (number, loss, self._learning_rate(number), rate, wait_percent)
            for number, loss in enumerate(period.losses, start=step - period.num_steps + 1)
        ]
        if self.log is not None:
            self.log.add_steps(rows)
        figures = (
            f"mean loss {statistics.fmean(period.losses):.4f}, {rate:.3g} images/s, learning rate "
            f"{self._learning_rate(step):.3g}, data wait {wait_percent:.1f} %"
        )
        if self.watch.is_over:
            return figures
        interval = self._config.save_every_batches or self.plan.num_steps
        next_save = min((step // interval + 1) * interval, self.plan.num_steps)
        return f"{figures}, next checkpoint at step {next_save}"

    def _learning_rate(self, step: int) -> float:
        return self._config.lr * self.job.schedule(step - 1)

    def _evaluate(self, event: str, evaluate: Evaluation, state: TrainState) -> dict[str, Any]:
        started_s = time.perf_counter()
        facts = evaluate(state)
        seconds = time.perf_counter() - started_s
        self.seconds[event] += seconds
        if self.log is not None:
            self.log.add_event(event, step=state.num_steps, seconds=seconds, **facts)
        return facts

    def _begin_save(self, state: TrainState) -> None:
        facts = self.facts | {"state": state.facts()}
        self.checkpoints.begin_save(state.num_steps, state.tensors(), facts)
        self._saved_step = state.num_steps

    def _report_saves(self) -> None:
        for save in self.checkpoints.poll():
            self.seconds["save"] += save.stall_s
            if self.log is not None:
                self.log.add_event(
                    "save",
                    step=save.step,
                    seconds=save.duration_s,
                    stall_s=save.stall_s,
                    is_copied=save.is_copied,
                    num_bytes=save.num_bytes,
                    error=save.error,
                )
            if save.error is None:
                self.num_saved += 1
                self._whole_step = max(self._whole_step, save.step)
                if self.storage is not None:
                    self.storage.keep(save.step)
                continue
            if self.log is not None:
                print(f"warning: step {save.step} was not saved: {save.error}", file=sys.stderr)
            if save.not_finite is not None:
                self._bad_losses.save_was_bad(save.step, save.not_finite)
            elif self._config.on_failed_save == "stop":
                raise RunError(f"step {save.step} was not saved (--on_failed_save): {save.error}")
