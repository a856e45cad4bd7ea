"""What only a GPU can show: its memory, every precision, the losses of its speed-ups."""

from __future__ import annotations

import pytest

import benchmark
from sdbench.analysis.ladder import RUNGS
from sdbench.settings.setting import GPU, describe_flags
from tests.runs import only_record
from tests.train.written import read_losses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("what", [(), ("--lora_rank", "4")], ids=["all", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "amp_fp16", "amp_bf16", "bf16"])
def test_the_tiny_model_trains_in_every_precision(tmp_path, precision, what):
    argv = ["--model_name", "tiny", "--use_synth_data", "--num_workers", "0", "--use_ema"]
    argv += ["--batch_size", "8", "--device_train_microbatch_size", "4", "--precision", precision]
    assert benchmark.main([*argv, *what, "--results_dir", str(tmp_path)]) == 0
    summary = only_record(tmp_path)["summary"]
    assert summary["images_per_second"] > 0
    assert summary["peak_memory_gib"] > 0


# Each speed-up for GPUs alone, speed-ups with another kernel there, and some together.
SWITCHES = [
    *(
        describe_flags({**rung.needs, **rung.settings})
        for rung in RUNGS
        if rung.devices == (GPU,) and not rung.needs_ranks and "precision" not in rung.settings
    ),
    "--attention flash",
    "--attention efficient --precision fp32",
    "--group_norm fused",
    "--compile unet --compile_mode max-autotune-no-cudagraphs",
    "--engine torch --copy_stream side",
    "--engine torch --cuda_graph --compile unet --ema_interval_batches 2",
    "--precision bf16 --master_weights fp32 --engine torch --cuda_graph",
]


@pytest.mark.parametrize("flags", SWITCHES)
def test_a_switch_of_a_gpu_gives_the_losses_of_the_plain_recipe(tmp_path, flags):
    if "xformers" in flags:
        pytest.importorskip("xformers")
    argv = ["--model_name", "tiny", "--use_synth_data", "--num_workers", "2", "--use_ema"]
    argv += ["--batch_size", "4", "--device_train_microbatch_size", "2", "--preset", "seed"]
    argv += ["--precision", "amp_bf16", "--optimizer", "adamw_fused", "--ema_impl", "foreach"]
    argv += ["--optimizer_params", "trainable", "--warmup_batches", "8", "--measure_batches", "8"]
    losses = []
    for name, switches in (("plain", ""), ("switched", flags)):
        folder = tmp_path / name
        assert benchmark.main([*argv, *switches.split(), "--results_dir", str(folder)]) == 0
        (path,) = folder.glob("*/steps.csv")
        losses.append([float(loss) for loss in read_losses(path.parent)])
    plain, switched = losses
    # bf16 keeps 8 bits (4e-3 an operation); a mean over many numbers loses most of them.
    assert switched == pytest.approx(plain, rel=2e-2)
