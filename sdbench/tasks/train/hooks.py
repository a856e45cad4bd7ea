"""`TrainHooks`: figures, checkpoints, validation and pictures between the steps of train.py."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import RunError
from sdbench.measure.period_timer import Period
from sdbench.measure.watch import StopAskedError
from sdbench.tasks.train.bad_loss import BadLosses
from sdbench.tasks.train.log import TrainLog

if TYPE_CHECKING:
    from torch import Tensor

    from sdbench.engines.job import TrainJob
    from sdbench.engines.train_state import TrainState
    from sdbench.measure.watch import StepWatch
    from sdbench.run.progress import StepProgress
    from sdbench.settings.recipe import TrainConfig
    from sdbench.state.checkpoints import Checkpoint, Checkpoints
    from sdbench.state.ray_storage import RayStorage
    from sdbench.tasks.train.evaluations import Evaluation


class TrainHooks:
    """The `TrainingHooks` of a run.

    Attributes:
        seconds: Seconds without training in this process, by event.
        num_saved: Checkpoints written by this process.
        last_loss: The last finite loss that has been read; None before the first.
    """

    def __init__(
        self,
        config: TrainConfig,
        job: TrainJob,
        *,
        watch: StepWatch,
        checkpoints: Checkpoints,
        storage: RayStorage | None,
        resumed: Checkpoint | None,
        log: TrainLog | None,
        progress: StepProgress,
        looks: dict[str, tuple[int, Evaluation]],
        bad_losses: BadLosses,
        facts: dict[str, Any],
        num_steps: int,
    ) -> None:
        """Connect the pieces.

        Args:
            config: The resolved config.
            job: The training job.
            watch: Watches the steps; its `PeriodTimer` is paused while nothing is trained.
            checkpoints: The checkpoints in the run's folder.
            storage: Gets copies of the checkpoints; None without one.
            resumed: The checkpoint to begin with, or None.
            log: The log of the run on the first rank; None on the others.
            progress: Shows a line of figures for each period.
            looks: Evaluations by event: their interval in steps, and the function that every rank
                calls for the facts of the event.
            bad_losses: Handles losses that are not finite.
            facts: Facts that are saved beside the state.
            num_steps: Steps of the run, including those of earlier processes.
        """
        self.seconds: dict[str, float] = {}
        self.num_saved = 0
        self.last_loss: float | None = None
        self._config = config
        self._job = job
        self._watch = watch
        self._timer: Any = watch.timer
        self._checkpoints = checkpoints
        self._storage = storage
        self._resumed = resumed
        self._log = log
        self._progress = progress
        self._looks = looks
        self._bad_losses = bad_losses
        self._facts = facts
        self._num_steps = num_steps
        self._state: TrainState | None = None
        self._saved_step: int | None = None
        self._whole_step = 0  # of the newest checkpoint
        self._not_shown: list[Period] = []

    def begins(self, state: TrainState) -> None:
        """Load the checkpoint, if there is one."""
        self._state = state
        if self._resumed is None:
            state.make_optimizer_state()
        else:
            facts = self._resumed.facts["state"]
            tensors = state.prepare_to_load(facts, saved=self._resumed.tensors().keys())
            self._resumed.load_into(tensors)
            state.loaded(tensors, facts)
            self._saved_step = self._whole_step = state.num_steps
        if self._log is not None:
            self._log.begin(
                num_steps=state.num_steps,
                images_per_step=self._job.images_per_step,
                passed_over=() if self._resumed is None else self._resumed.passed_over,
            )

    def gradients_ready(self, loss: Tensor, norm: Tensor | None) -> None:
        """Skip the update of a bad step, and wait for a save that still reads the state."""
        assert self._state is not None
        self._bad_losses.judge(self._state, loss, norm)
        if self._checkpoints.is_reading:
            self._timer.pause()
            self._checkpoints.wait_until_read()
            self._timer.start()

    def step_ended(self, state: TrainState) -> None:
        """Write figures, save and evaluate, whatever is due.

        The save comes first: an evaluation takes minutes, in which a run may be stopped.
        """
        step = state.num_steps
        if self._log is not None:
            self._log.mark_step(step)
        is_last = self._watch.is_over
        logs = is_last or step % self._config.log_every_batches == 0
        due = [
            (event, look)
            for event, (interval, look) in self._looks.items()
            if (step % interval == 0 or is_last) and not self._watch.is_stopped
        ]
        interval = self._config.save_every_batches
        saves = is_last or (interval is not None and step % interval == 0)
        self._read_losses(state, is_due=logs or saves or bool(due))
        self._report_saves()
        is_bad = self._bad_losses.is_known
        if logs or due or saves or is_bad:
            self.write_steps(step)
        if logs or is_bad:
            self._show_figures(step)
        if not (due or saves or is_bad):
            return
        self._timer.pause()
        started_s = time.perf_counter()
        has_gone_back = False
        if is_bad:
            with contextlib.suppress(RunError):  # a save that failed is reported in the next line
                self._checkpoints.finish()
            self._report_saves()
            is_end = is_last and not self._watch.is_stopped
            has_gone_back = self._bad_losses.act(state, is_last=is_end)
            self._add_seconds("bad_loss", time.perf_counter() - started_s)
        # After going back, the state is that of an older checkpoint.
        may_save = step != self._saved_step and not has_gone_back
        if saves and may_save:
            self._begin_save(state)
        for event, look in due:
            self._checkpoints.wait_until_read()  # evaluations swap the weights for averages
            self._timed(event, step, look, state)
            if self._watch.is_stopped:  # a signal has ended the evaluation
                if may_save and not saves:
                    self._begin_save(state)
                break
        self._progress.leave_out(time.perf_counter() - started_s)
        self._timer.start()

    def close(self) -> None:
        """Wait for the checkpoint under way; a `RunError` says that it was not saved."""
        if self._state is not None:
            try:
                self._checkpoints.finish()
            finally:
                self._report_saves()

    def describe_lost_steps(self) -> str:
        """The end of a sentence about the steps of this process that are in no checkpoint."""
        newest = self._whole_step
        num_steps = 0 if self._state is None else self._state.num_steps
        if num_steps <= newest:
            return ""
        steps = f"steps {newest + 1} to {num_steps} are"
        if num_steps == newest + 1:
            steps = f"step {num_steps} is"
        where = f"the newest checkpoint is that of step {newest}"
        if newest == 0:
            where = "there is no checkpoint"
        return f"; {steps} lost: {where}"

    def write_steps(self, step: int | None = None) -> None:
        """Write a row for each step since the last call, up to `step` or to the last one."""
        if self._state is None:
            return
        step = self._state.num_steps if step is None else step
        period = self._timer.end_period()
        if not period.num_steps:
            return
        finite = filter(math.isfinite, reversed(period.losses))
        self.last_loss = next(finite, self.last_loss)
        self._not_shown.append(period)
        if self._log is None:
            return
        rate = period.num_steps * self._job.images_per_step / period.time_s
        wait = 100 * period.data_wait_s / period.time_s
        first = step - period.num_steps
        rows = [
            (first + n + 1, loss, self._config.lr * self._job.schedule(first + n), rate, wait)
            for n, loss in enumerate(period.losses)
        ]
        self._log.add_steps(rows)

    def _read_losses(self, state: TrainState, *, is_due: bool) -> None:
        if is_due or state.is_skipped:
            self._bad_losses.read()
            if not self._bad_losses.is_known:
                self._bad_losses.all_good()

    def _show_figures(self, step: int) -> None:
        """Show a line about the steps since the last one."""
        periods, self._not_shown = self._not_shown, []
        if self._log is None or not periods:
            return
        losses = [loss for period in periods for loss in period.losses]
        time_s = sum(period.time_s for period in periods)
        rate = len(losses) * self._job.images_per_step / time_s
        wait = 100 * sum(period.data_wait_s for period in periods) / time_s
        learning_rate = self._config.lr * self._job.schedule(step - 1)
        figures = (
            f"mean loss {statistics.fmean(losses):.4f}, learning rate {learning_rate:.3g}, "
            f"{rate:.3g} images/s, data wait {wait:.1f} %"
        )
        if not self._watch.is_over:
            figures += f", next checkpoint at step {self._next_save(step)}"
        self._progress.period_ends(figures)

    def _next_save(self, step: int) -> int:
        interval = self._config.save_every_batches or self._num_steps
        return min((step // interval + 1) * interval, self._num_steps)

    def _timed(self, event: str, step: int, look: Evaluation, state: TrainState) -> None:
        started_s = time.perf_counter()
        facts = None
        with contextlib.suppress(StopAskedError):
            facts = look(state, self._watch.check_stop)
        seconds = time.perf_counter() - started_s
        self._add_seconds(event, seconds)
        if self._log is not None and facts is not None:
            self._log.add_event(event, step=step, seconds=seconds, **facts)

    def _add_seconds(self, event: str, seconds: float) -> None:
        self.seconds[event] = self.seconds.get(event, 0.0) + seconds

    def _begin_save(self, state: TrainState) -> None:
        self._checkpoints.begin_save(
            state.num_steps,
            state.tensors(),
            self._facts | {"state": state.facts()},
        )
        self._saved_step = state.num_steps

    def _report_saves(self) -> None:
        for save in self._checkpoints.poll():
            if save.error is None:
                self.num_saved += 1
                self._whole_step = max(self._whole_step, save.step)
                if self._storage is not None:
                    self._storage.keep(save.step)
            elif self._log is not None:
                print(f"warning: step {save.step} was not saved: {save.error}", file=sys.stderr)
            if save.not_finite is not None:
                self._bad_losses.save_was_bad(save.step, save.not_finite)
            self._add_seconds("save", save.stall_s)
            if self._log is not None:
                self._log.add_event(
                    "save",
                    step=save.step,
                    seconds=save.duration_s,
                    stall_s=save.stall_s,
                    is_copied=save.is_copied,
                    num_bytes=save.num_bytes,
                    error=save.error,
                )
            if save.error is None or save.not_finite is not None:
                continue
            if self._config.on_failed_save == "stop":
                raise RunError(f"step {save.step} was not saved (--on_failed_save): {save.error}")
