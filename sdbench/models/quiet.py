"""`quiet_diffusers`: what diffusers warns of is told by this suite in its own way."""

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
