"""A GPU that torch has no code for is refused; torch answers for GPUs that are elsewhere."""

from __future__ import annotations

import pytest
import torch

from sdbench.base.errors import ConfigError
from sdbench.measure.hardware import check_gpu_code, inspect_machine
from tests.machines import make_cpu_machine

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
    ("built_for", "name", "capability", "sm", "word"),
    [
        (TORCH_2_7, "NVIDIA B200", (10, 0), "sm_100", "TORCH=2.14"),
        (TORCH_2_7, "NVIDIA GeForce RTX 5090", (12, 0), "sm_120", "TORCH=2.14"),
        (TORCH_2_14, "Tesla V100-SXM2-16GB", (7, 0), "sm_70", "TORCH=2.7"),
        # Code for 8.6 does not run on 8.0.
        (["sm_86"], "NVIDIA A100-SXM4-80GB", (8, 0), "sm_80", "TORCH=2.14"),
        (["sm_80", "compute_90"], "NVIDIA L4", (7, 5), "sm_75", "TORCH=2.14"),
    ],
)
def test_a_gpu_without_code_is_refused_by_name(torch_sees, built_for, name, capability, sm, word):
    with pytest.raises(ConfigError) as refusal:
        check_gpu_code(torch_sees(built_for, name, capability))
    assert refusal.value.value == f"{name} ({sm})"
    assert refusal.value.flag == f"`make benchmark {word}`"
    assert ", ".join(built_for) in refusal.value.allowed
    assert torch.__version__ in refusal.value.allowed


@pytest.mark.parametrize(
    ("built_for", "capability"),
    [
        (TORCH_2_7, (9, 0)),
        (TORCH_2_7, (8, 9)),  # by the code for 8.6
        (TORCH_2_14, (10, 3)),
        (TORCH_2_14, (12, 1)),
        (["sm_90a"], (9, 0)),
        (["sm_80", "compute_90"], (12, 0)),  # the driver compiles
        (["gfx90a", "gfx942"], (9, 4)),
        ([], (9, 0)),
    ],
)
def test_a_gpu_with_code_is_not_refused_nor_a_cpu(torch_sees, built_for, capability):
    check_gpu_code(torch_sees(built_for, "a GPU", capability))
    check_gpu_code(make_cpu_machine())
