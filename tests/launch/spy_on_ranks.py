"""benchmark.py with a spy: each rank writes what it drew and saw in each forward pass.

Usage: composer -n 2 spy_on_ranks.py FOLDER <flags of benchmark.py>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch._subclasses import FakeTensor

import benchmark
from sdbench.models.stable_diffusion import StableDiffusion

original_forward = StableDiffusion.forward


def forward(self, batch):
    """Write the sum of the noise, of the images and of the weights of one layer."""
    prediction, target = original_forward(self, batch)
    if isinstance(target, FakeTensor):
        return prediction, target  # the memory estimate replays a step without numbers
    sums = (target, batch["image"].double(), self.unet.conv_in.weight)
    file = Path(sys.argv[1]) / f"rank{os.environ['RANK']}.txt"
    with file.open("a") as lines:
        lines.write(" ".join(f"{float(tensor.detach().sum()):.6f}" for tensor in sums) + "\n")
    return prediction, target


if __name__ == "__main__":
    StableDiffusion.forward = forward
    sys.exit(benchmark.main(sys.argv[2:]))
