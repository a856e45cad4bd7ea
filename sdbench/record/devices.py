"""`count_devices` names the devices of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def count_devices(machine: Mapping[str, Any], ranks: Mapping[str, Any]) -> str:
    """The devices of a record, e.g. ``8 x NVIDIA H200``; several ranks share the CPU of a node."""
    num_ranks, num_nodes, name = ranks["world_size"], ranks["num_nodes"], machine["device_name"]
    if machine["device_type"] != "cpu" or num_ranks == num_nodes:
        return f"{num_ranks} x {name}"
    return f"{num_ranks} ranks on {'' if num_nodes == 1 else f'{num_nodes} x '}{name}"
