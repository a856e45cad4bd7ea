"""Which speed-ups a machine and a combination of settings can use, and what replaces the others."""

from __future__ import annotations

import dataclasses

import pytest

from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import PRESETS, SETTINGS, parse_request
from sdbench.settings.kinds import SWITCH
from sdbench.settings.rules import settle
from sdbench.settings.setting import ANY_NUMBER, PerDevice
from tests.machines import make_cpu_machine, make_machine
from tests.refusals import refused

CPU, H100, V100 = make_cpu_machine(), make_machine(), make_machine(compute_capability="7.0")
OLD_CUDNN = make_machine(cudnn_version=90501)  # 9.5.1, as torch 2.7.0 brings it
ONE = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
EIGHT = Ranks(rank=0, world_size=8, local_rank=0, local_world_size=8)
TWO_NODES = Ranks(rank=0, world_size=16, local_rank=0, local_world_size=8)
NODES_OF_ONE = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=1)


def settled(*argv, machine=CPU, ranks=ONE):
    request = parse_request(argv, description="", epilog="")
    return settle(request, machine=machine, ranks=ranks)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("machine", [CPU, H100, V100, make_cpu_machine(cpu_flags=())])
@pytest.mark.parametrize("ranks", [ONE, EIGHT, TWO_NODES])
@pytest.mark.parametrize("engine", ["composer", "torch"])
def test_a_preset_runs_everywhere(preset, machine, ranks, engine):
    argv = ("--preset", preset, "--engine", engine)
    config, reasons = settled(*argv, machine=machine, ranks=ranks)
    for name in PRESETS[preset]:
        assert not isinstance(getattr(config, name), PerDevice)
        assert getattr(config, name) is not None
    # What a preset brings is legal when the user spells it out, too.
    spelled = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name in PRESETS[preset]
        if (value := getattr(config, name)) is not False
    ]
    again, none = settled(*argv, *spelled, machine=machine, ranks=ranks)
    assert dataclasses.replace(again, preset=preset) == config
    assert none == {}
    assert all(name in PRESETS[preset] for name in reasons)


@pytest.mark.parametrize(
    ("machine", "seed", "fast"),
    [
        (H100, "amp_fp16", "amp_bf16"),
        (CPU, "fp32", "amp_bf16"),
        (V100, "amp_fp16", "amp_fp16"),
        (make_cpu_machine(cpu_flags=("avx2",)), "fp32", "fp32"),
    ],
)
def test_the_presets_take_the_precision_that_the_device_has(machine, seed, fast):
    assert settled("--preset", "seed", machine=machine)[0].precision == seed
    config, reasons = settled("--preset", "fast", machine=machine)
    assert config.precision == fast
    assert ("precision" in reasons) == (fast != "amp_bf16")


def test_what_a_preset_cannot_have_here_is_replaced_with_a_reason():
    config, reasons = settled("--preset", "seed", "--engine", "torch")
    assert config.ema_impl == "foreach"
    assert reasons == {
        "ema_impl": "Composer's moving average needs Composer's engine and unsharded weights"
    }


COPIES = "--precision bf16 --master_weights fp32"
GRAPH = "--cuda_graph --engine torch"
AHEAD = "--encode_ahead --encoder_batch_size 8"
REFUSED = [
    ("--encoder_dtype fp16", CPU, ONE, "fp32 | bf16"),
    ("--master_weights fp32", CPU, ONE, "--precision bf16"),
    ("--attention by_shape", H100, ONE, "eager | sdpa | flash | cudnn | efficient"),
    ("--keep_layout --preset seed", CPU, ONE, "--memory_format channels_last"),
    ("--convolution matmul --preset seed", CPU, ONE, "--memory_format channels_last"),
    ("--attention cudnn", CPU, ONE, "eager | by_shape | sdpa | flash"),
    ("--attention cudnn", OLD_CUDNN, ONE, "eager | sdpa | flash | efficient"),
    ("--attention xformers", H100, ONE, "eager | sdpa | flash | cudnn | efficient"),
    ("--attention flash --precision fp32", H100, ONE, "amp_bf16"),
    ("--compile encoders --latents precomputed", CPU, ONE, "none | unet"),
    ("--compile_unit block --compile none", H100, ONE, "--compile unet"),
    ("--compile_mode max-autotune --compile none", H100, ONE, "--compile unet"),
    ("--compile_mode reduce-overhead --compile all", CPU, ONE, "default"),
    ("--cudnn_benchmark", CPU, ONE, "--no_cudnn_benchmark"),
    ("--copy_stream side", CPU, ONE, "compute"),
    ("--sharding zero1", CPU, ONE, "none"),
    ("--sharding hybrid", H100, EIGHT, "none | zero1 | grad_op | full"),
    ("--sharding full --precision amp_fp16", H100, EIGHT, "none | zero1, or another --precision"),
    ("--sharding full --optimizer_params all", H100, EIGHT, "trainable"),
    ("--gather_ahead --sharding full", H100, EIGHT, "grad_op | hybrid_grad_op"),
    ("--gather_ahead --sharding grad_op --latents precomputed", H100, EIGHT, "--no_gather_ahead"),
    ("--gather_ahead --sharding grad_op --encoder_batch_size 8", H100, EIGHT, "--no_gather_ahead"),
    ("--sharding hybrid_grad_op", H100, EIGHT, "none | zero1 | grad_op | full"),
    ("--sharding hybrid_zero1", CPU, EIGHT, "none | zero1 | grad_op | full"),
    ("--sharding hybrid", H100, NODES_OF_ONE, "none | zero1 | grad_op | full"),
    ("--master_weights fp32 --precision bf16 --lora_rank 4", CPU, ONE, "none, or no --lora_rank"),
    ("--sharding full --precision bf16 --lora_rank 4", H100, EIGHT, "another --precision"),
    ("--ema_impl composer --engine torch", CPU, ONE, "--engine composer"),
    ("--ema_impl composer --sharding full", H100, EIGHT, "foreach"),
    ("--gradient_as_bucket_view --sharding full", H100, EIGHT, "none | zero1 | hybrid_zero1"),
    ("--static_graph --sharding grad_op", H100, EIGHT, "none | zero1 | hybrid_zero1"),
    ("--grad_compression bf16 --sharding full", H100, EIGHT, "none | zero1 | hybrid_zero1"),
    (GRAPH, CPU, ONE, "--no_cuda_graph"),
    ("--cuda_graph", H100, ONE, "--engine torch"),
    (f"{GRAPH} --precision amp_fp16", H100, ONE, "than amp_fp16"),
    (f"{GRAPH} --optimizer adamw", H100, ONE, "adamw_fused"),
    (GRAPH, H100, EIGHT, "--no_cuda_graph"),
    (f"{GRAPH} --warmup_batches 0", H100, ONE, "another --warmup_batches than 0 | 1 | 2"),
    (f"{GRAPH} --compile unet --compile_mode reduce-overhead", H100, ONE, "no-cudagraphs"),
    ("--flush_denormals", H100, ONE, "--no_flush_denormals"),
    ("--cpu_allocator keep --lora_rank 4 --frozen_bits int8", CPU, ONE, "default | return"),
    ("--cpu_allocator keep --optimizer adamw_8bit", CPU, ONE, "default | return"),
    (AHEAD, CPU, ONE, "--copy_stream side"),
    ("--encode_ahead", H100, ONE, "--encoder_batch_size"),
    (f"{AHEAD} --latents precomputed", H100, ONE, "--no_encode_ahead"),
    (f"{AHEAD} --compile_mode reduce-overhead", H100, ONE, "max-autotune-no-cudagraphs"),
    ("--compile_unit block --compile_mode max-autotune", H100, ONE, "no-cudagraphs"),
    ("--convolution matmul --sharding full", CPU, EIGHT, "--sharding none | zero1 | hybrid_zero1"),
]


@pytest.mark.parametrize(("argv", "machine", "ranks", "allowed"), REFUSED)
def test_what_cannot_be_used_is_refused_by_name_with_what_can(argv, machine, ranks, allowed):
    flag, value, *_ = [*argv.split(), "--"]
    with refused(flag, value=flag if value.startswith("--") else value) as caught:
        settled(*argv.split(), machine=machine, ranks=ranks)
    assert allowed in caught.value.allowed


@pytest.mark.parametrize(
    ("machine", "ranks", "size_mib"),
    [(H100, TWO_NODES, 200), (H100, EIGHT, 25), (CPU, TWO_NODES, 25), (CPU, ONE, 25)],
)
def test_pieces_of_gradients_are_large_between_nodes_of_gpus(machine, ranks, size_mib):
    config, reasons = settled(machine=machine, ranks=ranks)
    assert config.ddp_bucket_mib == size_mib
    assert ("ddp_bucket_mib" in reasons) == (machine is H100 and size_mib == 25)
    given, _ = settled("--ddp_bucket_mib", "200", machine=machine, ranks=ranks)
    assert given.ddp_bucket_mib == 200


@pytest.mark.parametrize("ranks", [EIGHT, TWO_NODES])
@pytest.mark.parametrize("machine", [CPU, H100])
def test_copies_in_fp32_are_shared_in_every_way(machine, ranks):
    values = SETTINGS["sharding"].kind.choices
    for sharding in values if ranks is TWO_NODES else values[:4]:
        config, _ = settled(*COPIES.split(), f"--sharding={sharding}", machine=machine, ranks=ranks)
        assert (config.sharding, config.master_weights) == (sharding, "fp32")


@pytest.mark.parametrize("argv", ["--compile unet", "--group_norm fused"])
def test_compiling_needs_a_compiler(argv, monkeypatch):
    monkeypatch.setenv("PATH", "")
    flag, value, *_ = argv.split()
    with refused(flag, value=value):
        settled(*argv.split())


def test_a_number_format_without_instructions_is_kept_where_the_user_asked_for_it():
    old_cpu = make_cpu_machine(cpu_flags=())
    config, reasons = settled(machine=old_cpu)
    assert (config.precision, config.encoder_dtype) == ("fp32", "fp32")
    assert {"precision", "encoder_dtype"} <= reasons.keys()
    argv = ("--precision", "bf16", "--encoder_dtype", "bf16")
    config, reasons = settled(*argv, machine=old_cpu)
    assert (config.precision, config.encoder_dtype, reasons) == ("bf16", "bf16", {})
    with refused("--precision", allowed="fp32 | amp_fp16"):  # and not where it cannot run at all
        settled(*argv, machine=V100)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_declaration_speaks_of_values_that_its_setting_takes(name):
    declared = SETTINGS[name]
    values = [value for rule in declared.rules for value in (*rule.values, rule.instead)]
    values += [rung.value for rung in declared.rungs if rung.value != ANY_NUMBER]
    values += [*declared.presets.values(), declared.default]
    for value in values:
        of_devices = (value.gpu, value.cpu) if isinstance(value, PerDevice) else (value,)
        for one in of_devices:
            assert one is None or declared.parse(one) == one
    for rung in declared.rungs:
        for other, value in {**rung.together, **rung.needs}.items():
            assert SETTINGS[other].parse(value) == value
    for rule in declared.rules if declared.presets else ():
        if declared.kind is SWITCH:
            assert rule.values == (True,)
        # What replaces a preset's value is none of those that the rule forbids.
        instead = declared.presets["seed"] if rule.instead is None else rule.instead
        of_devices = instead if isinstance(instead, PerDevice) else (instead, instead)
        assert not set(of_devices) & set(rule.values)
