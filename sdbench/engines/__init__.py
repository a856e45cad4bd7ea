"""The engines, each of which runs a training loop.

The `fit` of an engine places the model of a job on the device, makes optimizer and moving average,
and trains until `watch.is_over`, for at most `job.num_steps` steps:

    fit(job: TrainJob, config: EngineConfig, watch: StepWatch, hooks: TrainingHooks | None)
        -> Measurements

An engine tells the watch of every step and of each phase within it. It returns the measurements of
its rank, and raises `RunError` if the watch finds that the loss is not finite or the loop ends
before its last step. What their loops share is `Training` in training.py.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sdbench.base.stop import keep_handlers, stopped_by

ENGINES: dict[str, str] = {
    "composer": "sdbench.engines.composer:fit",
    "torch": "sdbench.engines.torch:fit",
    "ray": "sdbench.engines.ray:fit",
}


def load_engine(name: str) -> Callable[..., Any]:
    """The `fit` function of an engine, imported only now."""
    with keep_handlers():
        try:
            return pkgutil.resolve_name(ENGINES[name])
        except SystemExit as ended:  # by the handlers that Composer sets as it is imported
            raise stopped_by(int(ended.code) - 128) from None
