"""benchmark.py with a spy: each rank writes what it drew and saw in each forward pass.

Profiled steps are timed by a clock that stands still but for the forward pass, which takes each
rank its part of OWN_S, and the communication of the last gradients of a step, which takes SLOW_S.

Usage: composer -n 2 spy_on_ranks.py FOLDER <flags of benchmark.py>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch._subclasses import FakeTensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import benchmark
from sdbench.measure.phases import PhaseClock
from sdbench.models.stable_diffusion import StableDiffusion

SLOW_S = 0.25
OWN_S = (0.125, 0.375)

original_forward = StableDiffusion.forward
original_init = DistributedDataParallel.__init__


def forward(self, batch):
    """Write the sum of the noise, of the images and of the weights of one layer."""
    prediction, target = original_forward(self, batch)
    if isinstance(target, FakeTensor):
        return prediction, target  # the memory estimate replays a step without numbers
    Clock.now_s += OWN_S[int(os.environ["RANK"])]
    sums = (target, batch["image"].double(), self.unet.conv_in.weight)
    file = Path(sys.argv[1]) / f"rank{os.environ['RANK']}.txt"
    with file.open("a") as lines:
        lines.write(" ".join(f"{float(tensor.detach().sum()):.6f}" for tensor in sums) + "\n")
    return prediction, target


class Clock:
    """Moves when told."""

    now_s = 0.0


def send_slowly(group, bucket):
    """Average a bucket of gradients over the ranks, the last one of a step late."""
    if bucket.is_last():
        Clock.now_s += SLOW_S
    return allreduce_hook(group, bucket)


def init(self, *args, **kwargs):
    """Make a DDP wrapper whose communication is slow."""
    original_init(self, *args, **kwargs)
    self.register_comm_hook(None, send_slowly)


if __name__ == "__main__":
    StableDiffusion.forward = forward
    DistributedDataParallel.__init__ = init
    PhaseClock.__init__.__kwdefaults__["clock"] = lambda: Clock.now_s
    sys.exit(benchmark.main(sys.argv[2:]))
