"""The imports of a run, and the start-up times in its record."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from sdbench.record.store import SCHEMA_FILE, load_record

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
def test_a_run_of_the_lean_engine_loads_what_it_needs_and_accounts_for_its_start_up(
    repository: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-X", "importtime", "benchmark.py", "--engine", "torch"]
    argv = ["--model_name", "tiny", "--use_synth_data", "--results_dir", str(tmp_path)]
    start_s = time.monotonic()
    done = subprocess.run([*command, *argv], cwd=repository, capture_output=True, text=True)
    wall_s = time.monotonic() - start_s
    assert done.returncode == 0, done.stderr[-2000:]

    imported = set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", done.stderr, re.MULTILINE))
    assert {"torch", "diffusers", "transformers"} <= imported
    assert not imported & set(NEEDLESS)

    (folder,) = tmp_path.glob("*/")
    record = load_record(folder)
    jsonschema.validate(record, json.loads(SCHEMA_FILE.read_text()))
    startup = record["summary"]["startup"]
    seconds = startup["seconds"]
    assert startup["total_s"] == pytest.approx(sum(seconds.values()))
    assert startup["compile_s"] == 0.0 and seconds["launcher"] == 0.0
    with (folder / "steps.csv").open() as file:
        steps = list(csv.DictReader(file))
    warmup_s = sum(float(step["step_time_s"]) for step in steps if step["phase"] == "warmup")
    rest_s = sum(float(step["step_time_s"]) for step in steps if step["phase"] != "warmup")
    assert seconds["first_step"] + seconds["warmup"] == pytest.approx(warmup_s, rel=0.2, abs=1)
    # The start-up and the other steps lie inside the run, and little else does.
    assert 0.5 * wall_s < startup["total_s"] + rest_s < wall_s
    assert re.search(rf"start-up +{startup['total_s']:.2f} s to the first measured", done.stdout)
