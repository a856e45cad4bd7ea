"""Counts of parameters, FLOPs and memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from calculate_number_of_parameters import main as count
from sdbench.base.conditions import NUM_SIZES, SIZES
from sdbench.base.shape import Shape
from sdbench.models import memory, replay
from sdbench.models.architecture import resolve_architecture
from sdbench.models.components import count_parameters, make_part
from sdbench.models.lora import Lora
from sdbench.models.memory import estimate_peak_memory
from sdbench.models.replay import Step, count_flops
from sdbench.models.sd.network import StableDiffusionNetwork
from sdbench.models.weights import Weights
from sdbench.ranks.distributed import Ranks
from tests.documents import ROOT
from tests.marks import quick_and_slow

STEP_NAMES = {field.name for field in dataclasses.fields(Step)}
PLAIN_STEP = dict(architecture=resolve_architecture("tiny"), shape=Shape.square(64))


PLAIN_CONFIG = dict(
    encoder_batch_size="microbatch",
    optimizer="adamw",
    master_weights="none",
    use_ema=False,
    sharding="none",
    gradient_as_bucket_view=False,
    update_in_backward=False,
    has_subject=False,
    cpu_allocator="default",
    engine="torch",
)


def estimate(*, micro_batch=2, num_microbatches=1, num_ranks=1, ranks_per_node=None, **changes):
    options = PLAIN_CONFIG | PLAIN_STEP | changes
    step = Step(**{name: options.pop(name) for name in STEP_NAMES & options.keys()})
    config = SimpleNamespace(batch_size=num_ranks * num_microbatches * micro_batch, **options)
    ranks = Ranks(0, num_ranks, 0, ranks_per_node or num_ranks)
    return estimate_peak_memory(step, config, ranks, micro_batch=micro_batch)


@pytest.mark.parametrize(
    ("name", "unet", "vae", "text_encoder"),
    [
        ("sd2-base", 865_910_724, 83_653_863, 340_387_840),
        ("sd2-768-v", 865_910_724, 83_653_863, 340_387_840),
        ("sd1-base", 859_520_964, 83_653_863, 123_060_480),
        # A quarter of the channels: a sixteenth of the weights of sd2-base, and more of the biases.
        ("small", 54_206_964, 5_252_487, 17_407_232),
        ("mini", 4_731_364, 687_663, 3_267_136),
        ("tiny", 933_508, 81_215, 1_600_672),
    ],
)
def test_parameters(name, unet, vae, text_encoder) -> None:
    counts = {"unet": unet, "vae": vae, "text_encoder": text_encoder}
    assert count_parameters(resolve_architecture(name)) == counts


def test_script_prints_the_seeds_line_or_csv_without_a_hub(capsys) -> None:
    assert count([]) == 0
    line = "Model has 1289.952427 M parameters and 865.910724 M trainable_params\n"
    assert capsys.readouterr().out == line
    assert count(["--model_name", "sd1-base", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sub_model,total,trainable",
        "unet,859520964,859520964",
        "vae,83653863,0",
        "text_encoder,123060480,0",
        "total,1066235307,859520964",
    ]
    assert count(["--model_name", "stabilityai/stable-diffusion-2", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "total,1289952427,865910724"
    assert count(["--model_name", "sd2-bse"]) == 2


@pytest.mark.slow
def test_flops() -> None:
    step = Step(architecture=resolve_architecture("sd2-base"), shape=Shape.square(256))
    online, latents = (
        count_flops(dataclasses.replace(step, encodes_images=encodes)) for encodes in (True, False)
    )
    # The U-Net alone, and with VAE and text encoder.
    assert [round(flops / 1e9, 2) for flops in (latents, online - latents)] == [539.31, 317.85]


@pytest.mark.parametrize("bits", [8, 4])
def test_memory_of_a_state_of_few_bits_is_that_of_the_optimizer(bits) -> None:
    from sdbench.engines.low_bit_adamw import ADAMW_OF_BITS

    unet = make_part("unet", resolve_architecture("tiny"), weights=Weights(seed=None))
    weights = [torch.nn.Parameter(torch.empty_like(one, device="cpu")) for one in unet.parameters()]
    optimizer = ADAMW_OF_BITS[bits](weights)
    buffers = [optimizer._new_buffer(one.detach().reshape(-1), signed=True) for one in weights]
    stored = [(one.codes, one.scale) if hasattr(one, "codes") else (one,) for one in buffers]
    num_bytes = 2 * sum(tensor.nbytes for tensors in stored for tensor in tensors)
    found = estimate(optimizer=f"adamw_{bits}bit").optimizer_state
    assert found == pytest.approx(num_bytes / 2**30)
    assert found < estimate().optimizer_state


@pytest.mark.slow
def test_memory_of_updates_in_the_backward_pass_has_one_gradient_at_a_time() -> None:
    unet = make_part("unet", resolve_architecture("tiny"))
    largest_gib = max(one.numel() for one in unet.parameters()) * 4 / 2**30
    plain = estimate(encodes_images=False)
    early = estimate(encodes_images=False, update_in_backward=True)
    assert 0 < early.gradients <= largest_gib < plain.gradients
    assert early.optimizer_state == plain.optimizer_state


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero1", "hybrid_zero1", "grad_op", "hybrid_grad_op"])
def test_memory_of_shared_copies_is_exact(sharding) -> None:
    shared = estimate(
        precision="bf16",
        master_weights="fp32",
        use_ema=True,
        sharding=sharding,
        num_ranks=16 if sharding.startswith("hybrid") else 8,
        ranks_per_node=8,
    )
    # Each rank has the weights in bf16; the eight share copies, two moments and average in fp32.
    fp32_gib = 933_508 * 4 / 2**30
    assert shared.trained_weights == pytest.approx(fp32_gib / 2)
    assert shared.optimizer_state == pytest.approx(3 * fp32_gib / 8)
    assert shared.ema == pytest.approx(fp32_gib / 8)


@pytest.mark.parametrize(
    ("changes", "temporaries"),
    [
        ({"optimizer": "adamw_fused"}, 2.0),  # copies of weights and gradients in fp32
        ({"optimizer": "adamw_fused", "sharding": "zero1", "num_ranks": 4}, 0.5),
        ({"optimizer": "adamw_fused", "sharding": "full", "num_ranks": 4}, 0.0),
        ({"master_weights": "none"}, 0.0),
        ({"master_weights": "none", "on_cuda": True}, 1.05),  # a root, and what the allocator loses
    ],
)
def test_memory_of_an_optimizer_step_with_copies_is_exact(
    changes, temporaries, monkeypatch
) -> None:
    # 1 GiB of weights, and nothing else.
    none = dict.fromkeys(("frozen_weights", "frozen_beside", "gathered_weights"), 0)
    weights = {"trained_weights": 2**30, "trained_start": 0, "gathered_beside": 0}
    sizes = {"trained_sizes": [2**29]}
    timeline = [(0, 0, 0), (2**30, 0, 2**30)]
    profile = replay.StepProfile(timeline=timeline, **weights, **none, **sizes)
    monkeypatch.setattr(memory, "profile_step", lambda step: profile)
    found = estimate(**{"precision": "bf16", "master_weights": "fp32"} | changes)
    assert found.phase == ("optimizer" if temporaries else "backward")
    assert found.temporaries == pytest.approx(temporaries)


def test_weights_that_fsdp_gathers_are_those_of_two_blocks_and_outside_of_blocks() -> None:
    unet = make_part("unet", resolve_architecture("tiny"))
    sizes = [
        sum(weight.nbytes for weight in module.parameters())
        for module in unet.modules()
        if isinstance(module, StableDiffusionNetwork.sharded_blocks)
    ]
    gathered = 933_508 * 4 - sum(sizes) + 2 * max(sizes)
    shared = estimate(sharding="full", num_ranks=2)
    assert shared.trained_weights * 2**30 == pytest.approx(933_508 * 4 / 2 + gathered)


@pytest.mark.slow
def test_what_the_heap_loses_is_a_share_of_activations_unless_new_gradients_take_it_up() -> None:
    # LoRA has next to no gradients; those of all weights leave room.
    lora = Lora(rank=2, alpha=2.0, layers=(("unet", ("to_q",)),))
    options = {"encodes_images": False, "micro_batch": 16}
    on_heap = estimate(lora=lora, **options)
    assert on_heap.temporaries == pytest.approx(on_heap.activations, rel=0.01)
    of_all = estimate(encodes_images=False, micro_batch=1)
    assert of_all.temporaries < 0.1 * of_all.activations
    assert of_all.gradients == pytest.approx(of_all.trained_weights)
    # Those of an earlier micro-batch and the buckets of DDP are there before the activations.
    ddp = {"num_ranks": 2, "gradient_as_bucket_view": True}
    for changes in ({"num_microbatches": 2}, ddp):
        held = estimate(**options, **changes)
        assert held.gradients == pytest.approx(held.trained_weights)
        assert held.temporaries == pytest.approx(held.activations, rel=0.01)
        without = estimate(**options, cpu_allocator="return", **changes)
        assert held.total_gib - without.total_gib == pytest.approx(held.temporaries, rel=0.01)
        assert without.gradients == held.gradients


@pytest.mark.slow
def test_training_begins_with_the_first_of_the_trained_parts() -> None:
    options = {"encoder_batch_size": 512, "micro_batch": 1, "num_microbatches": 512}
    assert estimate(**options).phase == "encoders"
    # The text encoder comes before the U-Net: what is kept of it is no encoder's.
    starts = [
        replay.profile_step(Step(**PLAIN_STEP, trained=trained)).trained_start
        for trained in (("unet",), ("unet", "text_encoder"))
    ]
    assert 0 < starts[1] < starts[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "num_trained", "num_frozen"),
    [
        (("unet",), 933_508, 81_215 + 1_600_672),
        (("vae",), 81_215, 0),
        (("unet", "text_encoder"), 933_508 + 1_600_672, 81_215),
    ],
)
def test_memory_of_weights_state_and_ema_is_exact(trained, num_trained, num_frozen) -> None:
    plain, with_ema = (estimate(trained=trained, use_ema=use_ema) for use_ema in (False, True))
    weights_gib = num_trained * 4 / 2**30
    assert plain.trained_weights == pytest.approx(weights_gib)
    # 8 bytes for each of the 1,000 times of the schedule and the positions of 77 tokens.
    times, positions = (0, 0) if trained == ("vae",) else (8_000, 616)
    assert plain.frozen_weights == pytest.approx((num_frozen * 4 + times + positions) / 2**30)
    # The VAE's activations are so much larger that its peak is before the first gradient.
    gradients_gib = 0.0 if trained == ("vae",) else weights_gib
    assert plain.gradients == pytest.approx(gradients_gib)
    assert plain.optimizer_state == pytest.approx(2 * weights_gib)
    assert plain.ema == 0
    assert with_ema.total_gib - plain.total_gib == pytest.approx(weights_gib)
    if trained == ("unet",):
        half = estimate(precision="bf16", encoder_dtype="bf16")
        assert half.optimizer_state == pytest.approx(weights_gib)
        frozen_gib = (num_frozen * 2 + times + positions) / 2**30
        assert half.frozen_weights == pytest.approx(frozen_gib)
        # DDP has a second copy of the gradients, unless they are views of its buckets.
        of_ranks = {"num_ranks": 2, "gradient_as_bucket_view": True}
        assert estimate(**of_ranks).gradients == pytest.approx(weights_gib)
        assert estimate(num_ranks=2).gradients == pytest.approx(2 * weights_gib)


def count_saved_bytes(model: torch.nn.Module, run: Callable[[], object]) -> int:
    """Bytes that autograd saves in a forward pass, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(saved.values())


@pytest.mark.parametrize(
    "name",
    quick_and_slow(["tiny", "tiny-sdxl", "tiny-sd3", "tiny-flux"], quick=["tiny", "tiny-flux"]),
)
def test_activations_are_those_that_autograd_saves(name) -> None:
    """Independent count on real tensors: distinct saved storages, per image."""
    architecture = resolve_architecture(name)
    network = architecture.family.load_network()
    denoiser = make_part(architecture.family.denoiser, architecture, weights=Weights(seed=0))

    def predict(num_images: int) -> torch.Tensor:
        latents = torch.randn(num_images, architecture.latents.num_channels, 8, 8)
        shapes = {one.name: one.shape for one in architecture.conditions} | {SIZES: (NUM_SIZES,)}
        conditions = {what: torch.randn(num_images, *shape) for what, shape in shapes.items()}
        times = torch.zeros(num_images)
        return network.predict(denoiser, latents, times=times, conditions=conditions)

    two, three = (count_saved_bytes(denoiser, functools.partial(predict, size)) for size in (2, 3))
    saved_gib = (three - two) / 2**30
    # With several micro-batches all activations and all gradients meet.
    options = {"num_microbatches": 2, "encodes_images": False, "architecture": architecture}
    first, second = (estimate(micro_batch=size, **options).activations for size in (64, 65))
    # Temporaries of the busiest operation come on top.
    assert saved_gib <= second - first <= 1.25 * saved_gib


@pytest.mark.slow
def test_memory_knows_what_each_option_costs() -> None:
    # At 384 px the largest level has 48 x 48 pixels, whose scores by_shape leaves to the kernel.
    eager, by_shape, kernel = (
        estimate(shape=Shape.square(384), attention=attention).activations
        for attention in ("eager", "by_shape", "sdpa")
    )
    assert kernel < by_shape < eager
    assert estimate(encodes_images=False).frozen_weights == 8_000 / 2**30  # the schedule's times
    kept = estimate(on_cuda=True, optimizer="adamw_fused", num_microbatches=2)
    assert kept.total_gib > estimate(on_cuda=True, optimizer="adamw_fused").total_gib
    assert estimate(precision="amp_bf16").temporaries > estimate().temporaries
    # Normalisation runs in fp32 under CUDA's autocast and in bf16 under a CPU's.
    options = {"precision": "amp_bf16", "num_microbatches": 2, "micro_batch": 64}
    on_gpu = estimate(on_cuda=True, **options)
    assert on_gpu.activations > 1.2 * estimate(**options).activations


def profiled_peak(step: Step, *, num_images: int, trace: Path) -> int:
    """Bytes at the peak of a step on real tensors beside the weights, by torch's profiler."""
    model = replay.build_replayed(step, device="cpu")
    with torch.no_grad():
        for weight in (*model.parameters(), *model.buffers()):
            weight.zero_()
    options = {"activities": [ProfilerActivity.CPU], "profile_memory": True}
    with profile(**options) as profiler:
        batch = replay.make_batch(step, num_images=num_images)
        batch = {name: tensor.zero_() for name, tensor in batch.items()}
        model.loss(*model(batch)).backward()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    memory = sorted((one for one in events if one["name"] == "[memory]"), key=itemgetter("ts"))
    return max(itertools.accumulate(one["args"]["Bytes"] for one in memory))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"encodes_images": False},
        {"encodes_images": False, "activation_checkpointing": "full"},
        {"encodes_images": False, "attention": "eager"},
    ],
)
@pytest.mark.parametrize("name", ["small"])
def test_the_peak_of_a_replay_is_that_of_torchs_profiler(name, changes, tmp_path) -> None:
    architecture = resolve_architecture(name)
    step = Step(architecture=architecture, shape=Shape.square(128), **changes)
    timeline = replay.profile_step(step).timeline
    replayed = max(constant + 4 * of_image for constant, of_image, _ in timeline)
    measured = profiled_peak(step, num_images=4, trace=tmp_path / "trace.json")
    assert replayed == pytest.approx(measured, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("on_cuda", [True, False])
def test_moments_that_a_replay_leaves_out_are_no_peaks(monkeypatch, tmp_path, on_cuda) -> None:
    variants = [
        {"micro_batch": size, "on_cuda": on_cuda, **changes}
        for size in (1, 2, 24, 256)
        for changes in (
            {},
            {"num_microbatches": 2},
            {"update_in_backward": True, "optimizer": "adamw_8bit"},
            {"has_subject": True, "encodes_images": False, "encoder_batch_size": 8},
            {"num_ranks": 4, "sharding": "full"},
        )
    ]

    def estimate_all() -> list[tuple[float, int]]:
        replay.profile_step.cache_clear()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(replay._find_peaks)))
        totals = [estimate(**one).total_gib for one in variants]
        return totals, len(replay.profile_step(Step(**PLAIN_STEP, on_cuda=on_cuda)).timeline)

    kept, num_kept = estimate_all()
    monkeypatch.setattr(replay, "_find_peaks", lambda timeline, largest: list(timeline))
    whole, num_all = estimate_all()
    replay.profile_step.cache_clear()
    assert kept == pytest.approx(whole, rel=1e-9)
    assert num_kept < num_all / 20


@pytest.mark.slow
def test_a_step_is_replayed_and_counted_once_on_a_machine(monkeypatch, tmp_path) -> None:
    def estimate_anew():
        replay.profile_step.cache_clear()
        return estimate()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.get_rng_state()
    first = estimate_anew()
    assert torch.equal(torch.get_rng_state(), before)
    (kept,) = tmp_path.glob("*/replayed-steps/*")
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_replay", None)
        assert estimate_anew() == first
        with pytest.raises(TypeError):  # another step
            estimate(shape=Shape.square(128))
    kept.write_bytes(kept.read_bytes()[:1000])
    assert estimate_anew() == first
    assert kept.stat().st_size > 1000
    assert list(tmp_path.glob("*/replayed-steps/*")) == [kept]
    step, count = Step(**PLAIN_STEP), count_flops.__wrapped__
    num_flops = count(step)
    monkeypatch.setattr(replay, "_count_flops", None)
    assert count(dataclasses.replace(step, precision="amp_bf16")) == num_flops > 0
    with pytest.raises(TypeError):  # another step
        count(dataclasses.replace(step, shape=Shape.square(128)))


REPLAY_IN_THREADS = """
import threading
from sdbench.base.shape import Shape
from sdbench.models import replay
from sdbench.models.architecture import resolve_architecture

nano = resolve_architecture("nano")
for size in (64, 128):
    step = replay.Step(architecture=nano, shape=Shape.square(size))
    thread = threading.Thread(target=replay.profile_step, args=(step,))
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_a_thread_that_replayed_a_step_may_end_before_the_next_replays(tmp_path, monkeypatch):
    # In a process of its own: the fault is a segmentation fault, and needs threads to be the first.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-c", REPLAY_IN_THREADS]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len([*tmp_path.rglob("memory-*.json")]) == 2
