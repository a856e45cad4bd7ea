"""Logging of a run to Weights & Biases, whose failures never end the run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Losses are read as often as that, and where the phase changes: it waits for the device.
PERIOD_S = 10.0


class WandbLog:
    """Logs to W&B when asked to. What W&B raises becomes one warning, and logging ends there."""

    def __init__(self, *, name: str | None, project: str | None, rank: int) -> None:
        """Decide whether to log: on rank 0, when either name or project is given."""
        self._name = name
        self._project = project
        self._enabled = rank == 0 and (name is not None or project is not None)
        self._run: Any = None
        self._pending: list[tuple[int, str, Callable[[], float]]] = []
        self._last_s = time.monotonic()

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

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """Log this step with the next ones, or those before it now."""
        if self._run is None:
            return
        is_due = time.monotonic() - self._last_s >= PERIOD_S
        if self._pending and (is_due or phase != self._pending[-1][1]):
            self._guard(self._log_pending)
        self._pending.append((index, phase, loss))

    def _log_pending(self) -> None:
        for index, phase, loss in self._pending:
            self._run.log({"loss/train/total": loss(), "phase": phase}, index)
        self._pending.clear()
        self._last_s = time.monotonic()

    def finish(self, summary: dict[str, Any]) -> None:
        """Log the result and close the W&B run."""

        def finish() -> None:
            self._log_pending()
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
