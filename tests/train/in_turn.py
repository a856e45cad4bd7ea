"""Trainings one after the other in the same forked ranks: what is made once is made once."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

import train
from sdbench.engines import load_engine
from tests.forked import codes_of, log_of
from tests.ports import free_port


def train_in_turn(
    engine: str, folder: Path, *lines: Sequence[object], **ranks_and_nodes: int
) -> None:
    """Have ranks run command lines of train.py in turn, each of which ends well.

    The engine is that of all of them; the folder gets what the ranks print.
    """
    # Here, and not once in each rank.
    load_engine(engine)
    for name in ("sdbench.training.evaluations", "torch._dynamo"):
        importlib.import_module(name)
    ports = [free_port() for _ in lines]

    def program() -> int:
        for port, line in zip(ports, lines, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            if code := train.main([str(word) for word in line]):
                return code
        return 0

    codes = codes_of(program, folder, timeout_s=240, **ranks_and_nodes)
    logs = [log_of(folder, rank).read_text() for rank in range(len(codes))]
    assert not any(codes) and None not in codes, logs
