"""Machines to plan for, as data."""

from __future__ import annotations

from sdbench.measure.hardware import Machine


def make_machine(**changes) -> Machine:
    """One node with 8 H100, unless changed."""
    values = {
        "device_type": "cuda",
        "device_name": "NVIDIA H100 80GB HBM3",
        "num_devices": 8,
        "device_memory_gib": 79.1,
        "free_memory_gib": 78.6,
        "held_memory_gib": 0.5,
        "num_cpu_cores": 192,
        "cpu_name": "CPU",
        "memory_gib": 2048.0,
        "cpu_flags": (),
        "compute_capability": "9.0",
        "driver": None,
        "cudnn_version": 91900,
        "platform": "Linux-x86_64",
    }
    return Machine(**{**values, **changes})


def make_cpu_machine(**changes) -> Machine:
    """A machine with 2 cores, 24 GiB and bf16 instructions, as the README's figures come from."""
    values = {
        "device_type": "cpu",
        "device_name": "CPU",
        "num_devices": 1,
        "device_memory_gib": 23.5,
        "free_memory_gib": 23.0,
        "held_memory_gib": 0.3,
        "num_cpu_cores": 2,
        "memory_gib": 23.5,
        "cpu_flags": ("avx512f", "avx512_bf16"),
        "compute_capability": None,
        "cudnn_version": None,
    }
    return make_machine(**{**values, **changes})
