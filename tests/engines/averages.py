"""`gather_average`: the whole moving average of a run of several ranks."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from sdbench.engines.ema import ForeachEma
from sdbench.ranks.distributed import Ranks, gather


def gather_average(ema: ForeachEma) -> dict[str, torch.Tensor]:
    """The whole averages by name, on every rank; each of them calls it."""
    own = {
        name: (average.full_tensor() if isinstance(average, DTensor) else average).cpu()
        for name, average in ema.state_dict()["averages"].items()
    }
    of_ranks = gather(own, Ranks.from_environment())
    return {name: average for of_rank in of_ranks for name, average in of_rank.items()}
