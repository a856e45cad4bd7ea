"""What Inductor would launch on an H200 is seen without one, and the fused norm turns no images."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tools.comparison import ROOT

# In a process of its own, which believes in a GPU from then on.
COMPILE_BLOCKS = """
import json
import torch
from diffusers.models.resnet import ResnetBlock2D
from sdbench.models import blocks
from sdbench.models.weights import Weights
from tools import compiled_step
from tools.fake_cuda import pretend

pretend()
blocks.compute_again()
rows = []
for is_fused in (False, True):
    record = compiled_step.Recording()
    with record.recording():
        block = ResnetBlock2D(in_channels=320, out_channels=320, temb_channels=1280)
        Weights(seed=None, device="cuda", dtype=torch.bfloat16).place(block)
        compiled_step.lay_out(block, torch.channels_last)
        if is_fused:
            blocks.fuse_group_norms(block)
        block.compile(dynamic=False)
        x = torch.empty(32, 320, 64, 64, device="cuda", dtype=torch.bfloat16)
        times = torch.empty(32, 1280, device="cuda", dtype=torch.bfloat16).requires_grad_()
        block(x.contiguous(memory_format=torch.channels_last).requires_grad_(), times)
    rows.append([*compiled_step.summarize(record.graphs)])
print(json.dumps(rows))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is None or torch.__version__ < "2.11", reason="it takes torch 2.11 with CUDA"
)
def test_compiled_norms_by_channel_read_whole_lines_and_turn_no_images():
    run = subprocess.run(
        [sys.executable, "-c", COMPILE_BLOCKS], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    plain, fused = json.loads(run.stdout.splitlines()[-1])
    for rows in (plain, fused):
        # Two convolutions and one product, and their gradients: those of a product are two more.
        assert [row["library"] for row in rows] == [3, 4, 7]
    of_plain, of_fused = plain[-1], fused[-1]
    assert of_plain["turned"] > 0 and of_plain["short GB"] > 0
    assert (of_fused["turned"], of_fused["short GB"]) == (0, 0)
    assert of_fused["generated GB"] < 0.7 * of_plain["generated GB"]
    assert of_fused["generated GB"] > of_fused["ideal GB"]
