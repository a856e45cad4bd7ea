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
from diffusers.models.upsampling import Upsample2D
from sdbench.models import blocks
from sdbench.models.weights import Weights
from tools import compiled_step
from tools.fake_cuda import pretend

class Level(torch.nn.Module):
    # From one level to the next: a residual block whose shortcut is a convolution.
    def __init__(self):
        super().__init__()
        self.shrink = torch.nn.Conv2d(320, 320, 3, stride=2, padding=1)
        self.block = ResnetBlock2D(in_channels=320, out_channels=640, temb_channels=1280)
        self.enlarge = Upsample2D(640, use_conv=True)
    def forward(self, x, times):
        return self.enlarge(self.block(self.shrink(x), times))

def make_block():
    return ResnetBlock2D(in_channels=320, out_channels=320, temb_channels=1280)

pretend()
blocks.compute_again()
rows = []
for make, side, is_fused, keeps in (
    (make_block, 64, False, False),
    (make_block, 64, True, False),
    (Level, 64, True, False),
    (Level, 64, True, True),
):
    record = compiled_step.Recording()
    with record.recording():
        model = make()
        Weights(seed=None, device="cuda", dtype=torch.bfloat16).place(model)
        compiled_step.lay_out(model, torch.channels_last)
        if is_fused:
            blocks.fuse_group_norms(model)
        if keeps:
            blocks.keep_layout(model)
        model.compile(dynamic=False)
        x = torch.empty(32, 320, side, side, device="cuda", dtype=torch.bfloat16)
        times = torch.empty(32, 1280, device="cuda", dtype=torch.bfloat16).requires_grad_()
        model(x.contiguous(memory_format=torch.channels_last).requires_grad_(), times)
    kernels = [kernel.name for graph in record.graphs for kernel in graph.kernels]
    summary = {"adds_atomically": any("index_put" in name for name in kernels)}
    rows.append([*compiled_step.summarize(record.graphs), summary])
print(json.dumps(rows))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is None or torch.__version__ < "2.11", reason="it takes torch 2.11 with CUDA"
)
def test_fused_norms_and_kept_layouts_read_whole_lines_and_turn_no_images():
    run = subprocess.run(
        [sys.executable, "-c", COMPILE_BLOCKS], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    plain, fused, contiguous, keeping = json.loads(run.stdout.splitlines()[-1])
    for rows in (plain, fused):
        # Two convolutions and one product, and their gradients: those of a product are two more.
        assert [row["library"] for row in rows[:3]] == [3, 4, 7]
    of_plain, of_fused, of_contiguous, of_keeping = (
        rows[2] for rows in (plain, fused, contiguous, keeping)
    )
    assert of_plain["turned"] > 0 and of_plain["short GB"] > 0
    assert (of_fused["turned"], of_fused["short GB"]) == (0, 0)
    assert of_fused["generated GB"] < 0.7 * of_plain["generated GB"]
    assert of_fused["generated GB"] > of_fused["ideal GB"]
    # Five convolutions and a product, and their gradients.
    assert of_contiguous["library"] == of_keeping["library"] == 13
    assert of_keeping["turned"] == 0
    assert of_keeping["generated GB"] < of_contiguous["generated GB"]
    assert contiguous[3]["adds_atomically"] and not keeping[3]["adds_atomically"]
