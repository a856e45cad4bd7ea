"""Every engine against one hand-written loop: same losses, same weights, same average, same counts.

What several ranks add to it is in tests/launch/test_sharding.py.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import benchmark
from sdbench.base.errors import RunError
from sdbench.engines import ENGINES, load_engine
from sdbench.engines.ema import ForeachEma
from sdbench.engines.job import EmaSpec
from sdbench.ranks.ray_cluster import OMP_VARIABLE
from sdbench.settings.setting import SAME_FP32
from tests.engines.linear import (
    BATCH_SIZE,
    MICROBATCH,
    NUM_STEPS,
    Hooks,
    ResumingHooks,
    average_by_hand,
    losses_of,
    make_config,
    make_parts,
    train_by_hand,
    watch_with,
)
from tests.forked import run_in_group
from tests.marks import quick_and_slow
from tests.runs import only_record
from tests.train.written import read_losses

# Half-life of 2 steps: decay 0.5 ** (1/2), so that the average differs from the weights in 5 steps.
HALF_LIFE_BATCHES = 2

each_engine = pytest.mark.parametrize("engine", ENGINES)


class Listener:
    def __init__(self) -> None:
        self.indices = []

    def loop_begins(self):
        assert self.indices == []

    def step_ends(self, *, index, phase, loss, num_steps):
        self.indices.append(index)


@each_engine
@pytest.mark.parametrize("microbatch", [MICROBATCH, 3, 100])  # 3 + 3 + 2, and all 8 at once
def test_losses_weights_and_counts_are_those_of_the_reference(engine, microbatch):
    listener = Listener()
    job, config = make_parts(), make_config(device_train_microbatch_size=microbatch)
    measurements = load_engine(engine)(job, config, watch_with(listener))
    losses, weights = train_by_hand()
    assert losses_of(measurements) == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(job.model.unet.weight.detach()[0], weights[-1])
    steps = measurements.timings.steps
    assert [step.phase for step in steps] == ["warmup"] * 2 + ["measured"] * 3
    assert listener.indices == list(range(NUM_STEPS))
    assert measurements.num_images == BATCH_SIZE * NUM_STEPS
    assert measurements.peak_memory_gib > 0
    assert sum(step.step_time_s for step in measurements.timings.measured) == pytest.approx(
        measurements.timings.window_s, abs=1e-3
    )


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU: numbers read from tensors, one or many."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.num = 0
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, function):
        def count(*args, **kwargs):
            self.num += 1
            return function(*args, **kwargs)

        return count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@each_engine
def test_nothing_is_read_from_the_device_within_the_window(engine, monkeypatch):
    reads, num_reads = Reads(monkeypatch), []

    class Counter(Listener):
        def loop_begins(self):
            num_reads.append(reads.num)

        def step_ends(self, **_):
            num_reads.append(reads.num)

    with reads:
        load_engine(engine)(make_parts(), make_config(), watch_with(Counter()))
    # Two steps of warm-up, three measured: read is at both edges of the window.
    # Before that torch draws the seed of a loader's epoch.
    assert [num - num_reads[0] for num in num_reads[1:]] == [1, 2, 2, 2, 3]


@pytest.fixture
def cpu_scaler(monkeypatch):
    """The gradient scaler of fp16, which a GPU has, on a CPU; its scale doubles every two steps."""
    make = functools.partial(torch.amp.GradScaler, "cpu", init_scale=1024.0, growth_interval=2)
    trainer = importlib.import_module("composer.trainer.trainer")
    monkeypatch.setattr(trainer, "GradScaler", make)
    # It refuses fp16 on a CPU.
    monkeypatch.setattr(trainer, "_validate_precision", lambda precision, device: None)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: make(enabled=enabled))


@each_engine
def test_the_scale_of_fp16_losses_is_saved_and_restored(engine, cpu_scaler):
    def scale_after(num_steps, hooks):
        config = make_config(precision="amp_fp16")
        load_engine(engine)(make_parts(num_steps=num_steps), config, watch_with(), hooks)
        scaler = hooks.saved[-1][0]["scaler"]
        return scaler["scale"], scaler["_growth_tracker"]

    first = Hooks()
    # Five steps: doubled twice, and one step towards the next time.
    assert scale_after(NUM_STEPS, first) == (4096, 1)
    assert scale_after(2 * NUM_STEPS, ResumingHooks(*first.saved[-1])) == (32768, 0)


@each_engine
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_a_skipped_update_changes_neither_weights_nor_average(engine, precision, cpu_scaler):
    hooks = Hooks(skipped_step=3)
    job = make_parts(ema=EmaSpec("foreach", HALF_LIFE_BATCHES), max_gradient_norm=1.0)
    load_engine(engine)(job, make_config(precision=precision), watch_with(), hooks)
    weights = [tensors["model.unet.weight"] for _, tensors in hooks.saved]
    changes = [not torch.equal(*pair) for pair in itertools.pairwise(weights)]
    assert changes == [True, False, True, True]
    facts, _ = hooks.saved[-1]
    assert (facts["num_steps"], facts["ema_num_steps"]) == (NUM_STEPS, NUM_STEPS - 1)


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize(
    ("engine", "implementation"),
    [("composer", "composer"), *((engine, "foreach") for engine in ENGINES)],
)
def test_the_average_is_that_of_the_closed_form(engine, implementation, interval, monkeypatch):
    fit, hooks, kept = load_engine(engine), Hooks(), []
    if implementation == "composer":
        module = importlib.import_module("sdbench.engines.composer")
        original = module.EMA
        monkeypatch.setattr(module, "EMA", lambda **kw: kept.append(original(**kw)) or kept[0])
    spec = EmaSpec(implementation, HALF_LIFE_BATCHES, interval)
    fit(make_parts(ema=spec), make_config(), watch_with(), hooks)
    if implementation == "composer":
        average = kept[0].ema_model.named_parameters_dict["model.unet.weight"]
    else:
        average = hooks.state.averages["unet.weight"]
    _, weights = train_by_hand()
    expected = average_by_hand(weights, half_life=HALF_LIFE_BATCHES, interval=interval)
    torch.testing.assert_close(average.detach()[0], expected)
    assert not torch.allclose(average.detach()[0], weights[-1], atol=1e-3)


def test_a_composer_that_is_not_known_is_refused(monkeypatch):
    import composer

    fit = load_engine("composer")
    monkeypatch.setattr(composer, "__version__", "0.33.0")
    with pytest.raises(RunError, match=r"0\.33\.0"):
        fit(make_parts(), make_config(), watch_with())


@pytest.mark.parametrize(("warms_up", "decay"), [(False, 0.5 ** (1 / 1000)), (True, 3 / 12)])
def test_the_average_of_bf16_weights_is_kept_in_fp32(warms_up, decay):
    weight = torch.ones(3, dtype=torch.bfloat16)
    spec = EmaSpec("foreach", half_life_batches=1000, warms_up=warms_up)
    ema = ForeachEma({"weight": weight}, spec)
    ema.update()
    weight += 1
    ema.update()
    average = ema.averages["weight"]
    assert average.dtype == torch.float32
    # 1 + (1 - d), which bf16 would round to 1 without a warm-up.
    torch.testing.assert_close(average, torch.full((3,), 2 - decay))


def test_two_ranks_keep_the_threads_of_the_plan(tmp_path):
    """Lightning would give each all cores of the machine, and say so in the variable."""

    def run(rank):
        os.environ.pop(OMP_VARIABLE, None)
        for engine in ENGINES:
            torch.set_num_threads(3)
            job = make_parts(num_ranks=2, rank=rank)
            load_engine(engine)(job, make_config(), watch_with())
            assert (torch.get_num_threads(), os.environ.get(OMP_VARIABLE)) == (3, None), engine

    run_in_group(run, tmp_path)


@pytest.mark.parametrize(
    "model",
    quick_and_slow(["nano", "tiny-sdxl", "tiny-sd3", "tiny-flux"], quick=["nano", "tiny-flux"]),
)
def test_all_engines_draw_the_same_noise_and_have_the_same_losses(
    model, tmp_path, launched, plain_replay
):
    argv = ["--model_name", model, "--use_synth_data", "--num_workers", "0", "--precision", "fp32"]
    argv += ["--batch_size", "4", "--device_train_microbatch_size", "2", "--no_measure_peak"]
    argv += ["--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "0"]
    losses = {}
    for engine in ENGINES:
        folder = tmp_path / engine
        assert benchmark.main([*argv, "--engine", engine, "--results_dir", str(folder)]) == 0
        record = only_record(folder)
        assert record["config"]["engine"] == engine
        losses[engine] = read_losses(folder / record["run_id"])
    assert len(losses["torch"]) == 3
    assert losses["torch"] == losses["composer"]  # to the last digit
    assert list(map(float, losses["ray"])) == pytest.approx(
        list(map(float, losses["torch"])), rel=SAME_FP32
    )
