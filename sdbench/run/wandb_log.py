"""Logging of a run to Weights & Biases, whose failures never end the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class WandbLog:
    """Logs to W&B when asked to. What W&B raises becomes one warning, and logging ends there."""

    def __init__(self, *, name: str | None, project: str | None, rank: int) -> None:
        """Decide whether to log: on rank 0, when either name or project is given."""
        self._name = name
        self._project = project
        self._enabled = rank == 0 and (name is not None or project is not None)
        self._run: Any = None

    def start(self, *, config: dict[str, Any], folder: Path) -> None:
        """Open the W&B run; without an API key, or with WANDB_MODE=offline, it stays on disk."""

        def init() -> None:
            import wandb

            # Without a key wandb.init would ask at the terminal and wait.
            has_key = "WANDB_API_KEY" in os.environ or wandb.api.api_key is not None
            mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
            self._run = wandb.init(
                name=self._name,
                project=self._project,
                config=config,
                dir=str(folder),
                mode=mode,
                # Neither the command line nor the output, which W&B would take as they are: the
                # config and stdout.log have them without secrets.
                settings=wandb.Settings(init_timeout=30, console="off", _disable_meta=True),
            )

        self._guard(init)

    def loop_begins(self) -> None:
        """Nothing to log yet."""

    def step_ends(self, *, index: int, phase: str, loss: float, num_steps: int) -> None:
        """Log one step."""
        if self._run is not None:
            self._guard(lambda: self._run.log({"loss/train/total": loss, "phase": phase}, index))

    def finish(self, summary: dict[str, Any]) -> None:
        """Log the result and close the W&B run."""

        def finish() -> None:
            self._run.summary.update(summary)
            self._run.finish()

        if self._run is not None:
            self._guard(finish)

    def _guard(self, action: Callable[[], None]) -> None:
        if not self._enabled:
            return
        try:
            action()
        # Anything at all: a logger that was asked for must not cost the measurement.
        except Exception as error:
            self._enabled, self._run = False, None
            print(f"warning: Weights & Biases is off for this run: {error}", file=sys.stderr)
