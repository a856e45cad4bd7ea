"""A GPU that torch has no code for is refused; torch answers for GPUs that are elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sdbench.measure.hardware import check_gpu_code, inspect_machine
from tests.refusals import refused

TORCH_2_7 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
TORCH_2_14 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture
def torch_sees(monkeypatch):
    """Gives torch code for these architectures, and this GPU."""

    def torch_sees(built_for, name, capability):
        answers = {
            "is_available": True,
            "mem_get_info": (70 << 30, 80 << 30),
            "get_device_name": name,
            "device_count": 1,
            "get_device_capability": capability,
            "get_arch_list": built_for,
        }
        for function, answer in answers.items():
            monkeypatch.setattr(torch.cuda, function, lambda *_, answer=answer: answer)
        return inspect_machine()

    return torch_sees


@pytest.mark.parametrize(
    ("built_for", "capability", "word"),
    [
        (TORCH_2_7, (8, 9), None),  # by the code for 8.6
        (TORCH_2_7, (10, 0), "TORCH=2.11"),
        (TORCH_2_14, (10, 3), None),
        (TORCH_2_14, (7, 0), "TORCH=2.7"),
        (["sm_80", "compute_90"], (12, 0), None),  # the driver compiles
        (["sm_80", "compute_90"], (7, 5), "TORCH=2.11"),
        (["sm_90a"], (9, 0), None),
        (["sm_100a"], (10, 3), "TORCH=2.11"),
        (["sm_100f"], (10, 3), None),
        (["gfx90a", "gfx942"], (9, 4), None),
    ],
)
def test_a_gpu_without_code_is_refused_by_name(torch_sees, built_for, capability, word):
    machine = torch_sees(built_for, "a GPU", capability)
    if word is None:
        check_gpu_code(machine)
        return
    value = f"a GPU (sm_{capability[0]}{capability[1]})"
    with refused(f"`make benchmark {word}`", value=value) as refusal:
        check_gpu_code(machine)
    assert ", ".join(built_for) in refusal.value.allowed
    assert torch.__version__ in refusal.value.allowed


@pytest.mark.slow
def test_an_openmp_that_binds_its_threads_takes_no_cores_away(repository):
    """torch's OpenMP leaves the first thread one core, and so the process, as the system has it."""
    script = "import sdbench, torch; print(sdbench.NUM_CPUS)"
    printed = subprocess.check_output(
        [sys.executable, "-c", script],
        cwd=repository,
        env={**os.environ, "OMP_PLACES": "cores", "OMP_PROC_BIND": "true"},
    )
    assert int(printed) == len(os.sched_getaffinity(0))
