"""Parquet as the programs of seeds 000 and 002 write it, made without the code under test.

They write a picture's latent as `latent_dist.sample() * 0.18215`, so it goes into the U-Net as it
is.
"""

from __future__ import annotations

import numpy as np

NUM_ROWS, TEXT_WIDTH = 6, 32  # the width of `tiny`
SCALING_FACTOR = 0.18215


def make_latents(image_size: int) -> np.ndarray:
    """Samples as their encoder gives them, (N, 4, S/8, S/8) float32, times the scaling factor."""
    generator = np.random.default_rng(7)
    side = image_size // 8
    mean, deviation, noise = generator.standard_normal((3, NUM_ROWS, 4, side, side))
    return ((5 * mean + 0.1 * np.abs(deviation) * noise) * SCALING_FACTOR).astype(np.float32)


def make_texts() -> np.ndarray:
    """Encoded captions, (N, 77, D) float32."""
    generator = np.random.default_rng(8)
    return generator.standard_normal((NUM_ROWS, 77, TEXT_WIDTH)).astype(np.float32)
