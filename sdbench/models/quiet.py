"""Context managers that keep lines of diffusers and transformers out of the output of a program."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Have diffusers log nothing but what is critical within the block."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Have transformers draw no progress bars within the block; 5 has one for each folder."""
    from transformers.utils import logging as of_transformers

    were_enabled = of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        if were_enabled:
            of_transformers.enable_progress_bar()
