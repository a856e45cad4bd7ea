"""Does every speed-up train the miniature to the losses of the plain recipe?

Data, noise and weights are those of one seed, so that only the arithmetic may differ. What needs
several ranks is in tests/launch/test_sharding.py, what needs a GPU in tests/launch/test_gpu.py.
"""

from __future__ import annotations

import csv

import pytest
import torch

import benchmark
from sdbench.record.store import load_record
from sdbench.settings.config import FIELDS, SPEED

# Two micro-batches a step, the second of them smaller.
RUN = (
    *("--model_name", "tiny", "--use_synth_data", "--num_workers", "0", "--no_measure_peak"),
    *("--warmup_batches", "0", "--measure_batches", "3", "--profile_batches", "0"),
    *("--batch_size", "3", "--device_train_microbatch_size", "2", "--allow_uneven_batch"),
)
# Relative differences of the losses of three steps: sums in another order differ by fp32's rounding
# (6e-8 an operation), bf16 keeps 8 bits (4e-3 an operation, averaged over many), and bf16 weights
# lose most of an update unless a copy keeps it.
SAME_FP32, BF16, BF16_WEIGHTS = 2e-6, 2e-3, 2e-2
SWITCHES = {
    "attention=eager": SAME_FP32,
    "attention=flash": SAME_FP32,
    "unit_divisions=drop": 0.0,
    "group_norm=fused": SAME_FP32,
    "memory_format=channels_last": SAME_FP32,
    "memory_format=channels_last convolution=matmul": SAME_FP32,
    "compile=all": SAME_FP32,
    "activation_checkpointing=transformer": 0.0,
    "activation_checkpointing=full": 0.0,
    "encoder_batch_size=3": SAME_FP32,
    "encoder_batch_size=2": 0.0,
    "optimizer=adamw_fused": SAME_FP32,
    "optimizer_params=trainable": 0.0,
    "image_dtype=uint8": 1e-5,
    "cpu_allocator=keep": 0.0,
    "flush_denormals": 0.0,
    "num_threads=2": SAME_FP32,
    "precision=amp_bf16": BF16,
    "encoder_dtype=bf16": BF16,
    "precision=bf16": BF16_WEIGHTS,
    "precision=bf16 master_weights=fp32": BF16_WEIGHTS,
}
ELSEWHERE = {
    # The average does not show in the losses: tests/engines/test_conformance.py.
    *("ema_impl", "ema_interval_batches"),
    *("sharding", "grad_sync", "gradient_as_bucket_view", "static_graph"),  # test_sharding.py
    *("ddp_bucket_mib", "grad_compression"),
    *("compile_mode", "cuda_graph", "cudnn_benchmark", "copy_stream"),  # test_gpu.py
}


def losses_of(folder, *argv):
    assert benchmark.main([*RUN, *argv, "--results_dir", str(folder)]) == 0
    (path,) = folder.glob("*/record.json")
    assert load_record(path)["status"] == "ok"
    with path.with_name("steps.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of the recipe without speed-ups, under Composer."""
    losses = losses_of(tmp_path_factory.mktemp("plain"), "--preset", "seed")
    assert losses[-1] < losses[0]  # it learns
    return losses


@pytest.fixture
def without_compiling():
    """Let torch.compile run the code that it was given: compiling takes minutes on two cores."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize(("switch", "tolerance"), SWITCHES.items())
def test_a_switch_alone_gives_the_same_losses(
    switch, tolerance, plain, tmp_path, without_compiling
):
    flags = [f"--{flag}" for flag in switch.split()]
    losses = losses_of(tmp_path, "--preset", "seed", *flags, "--engine", "torch")
    assert losses == pytest.approx(plain, rel=tolerance, abs=0)


@pytest.mark.parametrize("engine", ["composer", "torch"])
def test_the_defaults_together_give_the_same_losses(engine, plain, tmp_path):
    losses = losses_of(tmp_path, "--engine", engine)
    assert losses == pytest.approx(plain, rel=BF16)


def test_every_speed_up_is_tested():
    named = {flag.split("=")[0] for switch in SWITCHES for flag in switch.split()}
    speed_ups = {name for name, field in FIELDS.items() if field.metadata["group"] == SPEED}
    assert speed_ups - named - ELSEWHERE == set()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # compiling the miniature alone takes minutes on two cores
@pytest.mark.parametrize("switch", ["group_norm=fused", "compile=unet", "compile=encoders"])
def test_what_is_compiled_gives_the_same_losses(switch, plain, tmp_path):
    losses = losses_of(tmp_path, "--preset", "seed", f"--{switch}")
    assert losses == pytest.approx(plain, rel=1e-5)
