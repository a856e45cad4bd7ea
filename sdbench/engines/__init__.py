"""The engines: programs that run a training loop.

An engine gets a job and a watch, places the model, builds optimizer and moving average, trains at
most `job.num_steps` steps and returns what it measured on its rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sdbench.base.stop import keep_handlers

ENGINES: dict[str, str] = {
    "composer": "sdbench.engines.composer:fit",
    "torch": "sdbench.engines.torch:fit",
}


def load_engine(name: str) -> Callable[..., Any]:
    """The `fit` function of an engine, imported only now."""
    module, function = ENGINES[name].split(":")
    with keep_handlers():
        return getattr(importlib.import_module(module), function)
