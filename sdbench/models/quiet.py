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
def quiet_transformers() -> Iterator[None]:
    """Have transformers log errors alone within the block, and draw no progress bars."""
    from transformers.utils import logging as of_transformers

    level, had_bars = of_transformers.get_verbosity(), of_transformers.is_progress_bar_enabled()
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        of_transformers.set_verbosity(level)
        if had_bars:
            of_transformers.enable_progress_bar()
