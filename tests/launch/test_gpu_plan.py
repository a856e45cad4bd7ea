"""`make benchmark-gpu` without a GPU: its cells are valid there, and run in miniature here."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import benchmark
from sdbench.launch.sweep_file import read_sweep_file, to_flags
from sdbench.plan.resolve import resolve
from sdbench.ranks.distributed import ALONE
from sdbench.settings.config import parse_request
from tests.machines import make_machine
from tests.runs import only_record
from tools.gpu_stand_in import STAND_INS as STAND_IN_VALUES
from tools.gpu_stand_in import stand_in

ROOT = Path(__file__).resolve().parents[2]
PARTS = [ROOT / "sweeps" / f"benchmark_gpu_{part}.yaml" for part in (1, 2, 3, 4)]
H200 = make_machine(
    device_name="NVIDIA H200", num_devices=1, device_memory_gib=140.0, free_memory_gib=139.5
)
OLD_H100 = make_machine(num_devices=1, cudnn_version=90501)


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def flags_of(content: dict) -> list[list[str]]:
    return [to_flags({**content["base"], **cell}) for cell in content["list"]]


def test_the_parts_are_measured_alike_and_end_within_ten_minutes():
    sweeps = [{**read(path), "list": None, "repeats": None} for path in PARTS]
    assert sweeps[0] == sweeps[1] == sweeps[3]
    lengths = ("warmup_batches", "max_warmup_batches", "measure_batches", "profile_batches")
    for sweep in sweeps:
        assert sweep["timeout_s"] == 400 and sweep["budget_s"] == 520
        assert [sweep["base"][name] for name in lengths] == [3, 3, 10, 1]
        assert "check_memory" not in sweep["base"]


@pytest.mark.slow
@pytest.mark.usefixtures("plain_replay")
@pytest.mark.parametrize("machine", [H200, OLD_H100], ids=["H200", "H100 with torch 2.7"])
@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_every_cell_can_run_on_a_gpu_and_keeps_what_the_file_gives_it(path, machine, monkeypatch):
    monkeypatch.chdir(ROOT)
    for cell in read_sweep_file(path).cells:
        # Of the miniature the memory is estimated in a second; on a GPU it refuses nothing.
        tiny = STAND_IN_VALUES["model_name"].get(cell.settings.get("model_name"), "tiny")
        settings = {**cell.settings, "model_name": tiny}
        if tiny != "tiny":
            settings["image_size"] = 128  # the largest of tiny-sd3 is 192
        argv = to_flags(settings)
        request = parse_request(argv, description="", epilog="")
        config = resolve(request, machine=machine, ranks=ALONE).config
        assert {name: getattr(config, name) for name in settings} == settings
        fast = config.preset == "fast"
        assert (config.compile == "all", config.cudnn_benchmark) == (fast, fast)


STAND_INS = list(itertools.chain(*(flags_of(stand_in(read(path))[0]) for path in PARTS)))


def find(*words: str) -> list[str]:
    """The first cell with these words."""
    return next(argv for argv in STAND_INS if all(any(w in flag for flag in argv) for w in words))


# All levers online, in bf16, and LoRA in bf16 on Flux.1; at the smallest size, as a CPU may lack
# bf16.
@pytest.mark.slow
@pytest.mark.parametrize(
    "argv", [find("latents=online", "master_weights"), find("lora_rank")], ids=" ".join
)
def test_a_cell_runs_in_miniature(argv, tmp_path):
    argv = [*argv, "--image_size", "64", "--batch_size", "4"]
    with torch.compiler.set_stance("force_eager"):  # compiling takes minutes on two cores
        assert benchmark.main([*argv, "--results_dir", str(tmp_path)]) == 0
    record = only_record(tmp_path)
    assert record["status"] == "ok" and record["summary"]["attention_kernels"]


@pytest.mark.full
@pytest.mark.timeout(3600)  # torch.compile takes minutes for the miniature on two cores
@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_a_part_runs_to_its_end_in_miniature_with_all_that_a_gpu_host_does(part, tmp_path):
    make = ["make", "rehearse-gpu", f"PART={part}", f"PYTHON={sys.executable}", f"OUT={tmp_path}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    num_cells = len(stand_in(read(PARTS[part - 1]))[0]["list"])
    assert done.stdout.count("  ok") == num_cells
