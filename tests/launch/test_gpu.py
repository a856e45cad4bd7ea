"""What only a GPU can show: device-synchronised timing, MFU, utilisation, every precision."""

from __future__ import annotations

import pytest

import benchmark
from sdbench.measure.record import load_record

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "tf32", "amp_fp16", "amp_bf16", "bf16"])
def test_the_tiny_model_trains_in_every_precision(tmp_path, precision):
    argv = ["--model_name", "tiny", "--use_synth_data", "--num_workers", "0", "--use_ema"]
    argv += ["--batch_size", "8", "--device_train_microbatch_size", "4", "--precision", precision]
    assert benchmark.main([*argv, "--results_dir", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/record.json")
    summary = load_record(path)["summary"]
    assert summary["images_per_second"] > 0
    assert summary["peak_memory_gib"] > 0


def test_the_estimate_is_near_the_peak_of_the_real_model(tmp_path):
    argv = ["--use_synth_data", "--use_ema", "--batch_size", "16", "--measure_batches", "5"]
    argv += ["--device_train_microbatch_size", "8", "--results_dir", str(tmp_path)]
    assert benchmark.main(argv) == 0
    (path,) = tmp_path.glob("*/record.json")
    record = load_record(path)
    estimate_gib = record["memory_estimate_gib"]["total_gib"]
    assert record["summary"]["peak_memory_gib"] == pytest.approx(estimate_gib, rel=0.15)
