"""`WandbLog` logs a run to Weights & Biases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sdbench.base.files import replace_file
from sdbench.run.tracker import Tracker

# An observer logs this often, and where the phase changes: reading a loss waits for the device.
PERIOD_S = 10.0
# Has the id of the W&B run, with which the next process of the same run goes on.
ID_NAME = "wandb_id.txt"


class WandbLog(Tracker):
    """Logs to W&B when asked to: losses as an observer of steps, or the figures it is given."""

    program = "Weights & Biases"

    def __init__(self, *, name: str | None, project: str | None, rank: int) -> None:
        """Prepare; only rank 0 logs, and only if a name or a project is given."""
        super().__init__(is_on=rank == 0 and (name is not None or project is not None))
        self._name = name
        self._project = project
        self._run: Any = None
        self._pending: list[tuple[int, str, Callable[[], float]]] = []
        self._last_s = time.monotonic()

    def start(self, *, config: dict[str, Any], folder: Path, has_parts: bool = False) -> None:
        """Open the W&B run; it is offline without an API key or with WANDB_MODE=offline.

        Args:
            config: Settings, without secrets.
            folder: Of the run.
            has_parts: Whether several processes may train the run in turn. All log to one W&B run,
                whose charts have the key ``step`` as their x axis.
        """

        def init() -> None:
            import wandb

            # Without a key wandb.init would ask at the terminal and wait.
            has_key = "WANDB_API_KEY" in os.environ or wandb.api.api_key is not None
            mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
            same_run = {"id": _read_id(folder), "resume": "allow"} if has_parts else {}
            self._run = wandb.init(
                name=self._name,
                project=self._project,
                config=config,
                dir=str(folder),
                mode=mode,
                # Neither the command line nor the output, which W&B would take as they are: the
                # config and stdout.log have them without secrets.
                settings=wandb.Settings(init_timeout=30, console="off", _disable_meta=True),
                **same_run,
            )
            if has_parts:
                # W&B's own step only rises: it would drop the steps that are trained again.
                self._run.define_metric("*", step_metric="step")

        self._guard(init)

    def loop_begins(self) -> None:
        """Nothing to log yet."""

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """Keep this step to be logged later, and log the kept ones if that is due."""
        if not self.is_on:
            return
        is_due = time.monotonic() - self._last_s >= PERIOD_S
        if self._pending and (is_due or phase != self._pending[-1][1]):
            self._guard(self._log_pending)
        self._pending.append((index, phase, loss))

    def close(self) -> None:
        """Log the steps that are still kept; the loop has ended. Waits for the device."""
        self._guard(self._log_pending)

    def finish(self, summary: dict[str, Any]) -> None:
        """Log the result and close the W&B run."""

        def finish() -> None:
            self._run.summary.update(summary)
            self._run.finish()

        self._guard(finish)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **figures})

    def _log_picture(self, name: str, path: Path, step: int) -> None:
        import wandb

        self._run.log({"step": step, name: wandb.Image(str(path))})

    def _log_pending(self) -> None:
        for index, phase, loss in self._pending:
            self._run.log({"loss/train/total": loss(), "phase": phase}, index)
        self._pending.clear()
        self._last_s = time.monotonic()


def _read_id(folder: Path) -> str:
    """The id that the folder keeps; a new one is written there first."""
    import wandb

    path = folder / ID_NAME
    if not path.exists():
        replace_file(path, wandb.util.generate_id())
    return path.read_text(encoding="utf-8")
