"""The imports of a run, and the start-up times in its record."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import only_record

# What a run of the lean engine on synthetic data has no need of. diffusers itself brings
# transformers, torchvision and scipy, and accelerate, which peft requires and which loads boto3.
NEEDLESS = (
    "composer",
    "streaming",
    "torchmetrics",
    "wandb",
    "pandas",
    "matplotlib",
    "webdataset",
    "pyarrow",
    "torch._inductor.compile_fx",
)


@pytest.mark.slow
def test_a_run_of_the_lean_engine_loads_what_it_needs(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "benchmark.py", "--engine", "torch"]
    argv = ["--model_name", "tiny", "--use_synth_data", "--results_dir", str(tmp_path)]
    start_s = time.monotonic()
    done = subprocess.run([*command, *argv], cwd=repository, capture_output=True, text=True)
    wall_s = time.monotonic() - start_s
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", done.stderr, re.MULTILINE))
    assert {"torch", "diffusers", "transformers"} <= imported
    assert not imported & set(NEEDLESS)
    startup = only_record(tmp_path)["summary"]["startup"]
    assert 0.3 * wall_s < startup["total_s"] < wall_s
    assert re.search(rf"start-up +{startup['total_s']:.2f} s to the first measured", done.stdout)
