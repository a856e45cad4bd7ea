"""A small state, and its checkpoints."""

from __future__ import annotations

import torch

from sdbench.state.checkpoint_files import ALONE
from sdbench.state.checkpoints import Checkpoints


def make_checkpoints(folder, *, ranks=ALONE, keep=3, keep_every=None):
    """Those of a run folder."""
    return Checkpoints(folder, ranks=ranks, keep=keep, keep_every=keep_every)


def make_state(value=0):
    """Tensors of the kinds that a state has; each value is another one for another `value`."""
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5) + value
    return {
        "weights.conv": images.to(memory_format=torch.channels_last),
        "weights.head": torch.linspace(-1, 1, 7).add(value).bfloat16(),
        "optimizer.step": torch.tensor(float(value)),
        "rng.0": torch.full((16,), value % 256, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
    }


def save(checkpoints, step, *, value=None):
    """Save a state, whose value is the step, and wait for it."""
    checkpoints.begin_save(step, make_state(step if value is None else value), {})
    checkpoints.finish()


def holds(checkpoint, value):
    """Whether the checkpoint loads, and every tensor has this value's bits."""
    loaded = make_state(-1)
    checkpoint.load_into(loaded)
    expected = make_state(value)
    return all(
        torch.equal(loaded[name], expected[name]) and loaded[name].dtype == expected[name].dtype
        for name in expected
    )


def names(folder):
    """What is in the folder of checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def flip_byte(path, *, where=0.5):
    """Change one bit of a file, at this share of its length, as a disk may."""
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 2))] ^= 1
    path.write_bytes(content)
