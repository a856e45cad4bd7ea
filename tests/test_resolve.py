"""A request becomes a plan on a given machine, or is refused before any weights are built."""

from __future__ import annotations

import re
import shutil

import pytest

from sdbench.base.errors import ConfigError
from sdbench.plan.describe import for_person
from sdbench.plan.resolve import check_ahead, resolve
from sdbench.ranks.distributed import Ranks
from sdbench.settings import recipe
from sdbench.settings.config import parse_request
from sdbench.settings.rules import UNKNOWN, Unknown
from tests.machines import make_cpu_machine, make_machine
from tests.refusals import PLACE_FLAGS, refused


def plan(*argv, machine=None, world_size=1, num_local=None):
    local = num_local or world_size
    return resolve(
        parse_request(argv, description="", epilog=""),
        machine=machine or make_cpu_machine(),
        ranks=Ranks(rank=0, world_size=world_size, local_rank=0, local_world_size=local),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("plain_replay")
def test_gpu_defaults_are_the_seeds():
    argv = ("--device_train_microbatch_size", "8")
    config = plan(*argv, machine=make_machine(), world_size=8).config
    assert (config.batch_size, config.image_size, config.num_workers) == (2048, 512, 8)


@pytest.mark.slow
def test_without_a_gpu_the_defaults_shrink_but_the_model_does_not():
    result = plan("--use_synth_data")
    config = result.config
    assert result.architecture.name == "sd2-base"
    batches = (config.batch_size, config.device_train_microbatch_size)
    assert (config.image_size, *batches) == (256, 2, 2)
    assert (config.warmup_batches, config.measure_batches, result.num_steps) == (4, 10, 17)
    assert result.chosen["image_size"] == "no GPU"
    assert config.precision == "amp_bf16"


@pytest.mark.usefixtures("plain_replay")
def test_a_value_of_the_users_is_never_changed():
    given = {
        **{"model_name": "tiny", "image_size": 128, "batch_size": 6, "num_workers": 0},
        **{"device_train_microbatch_size": 3, "precision": "bf16", "encoder_dtype": "fp32"},
        **{"warmup_batches": 0, "measure_batches": 1},
    }
    flags = [f"--{name}={value}" for name, value in given.items()]
    result = plan("--use_synth_data", *flags)
    assert {name: getattr(result.config, name) for name in given} == given
    bounds = {"profile_batches", "max_warmup_batches", "max_measure_batches"}
    assert set(result.chosen) == {"data_format", "num_threads", *bounds}


@pytest.mark.slow
def test_the_longest_window_has_room_for_what_a_precision_takes():
    def longest(*argv):
        return plan("--use_synth_data", *argv).config.max_measure_batches

    assert longest() == 10
    assert longest("--target_precision", "5%") == 160  # 16 windows of 10; 3 / 0.05 is 60
    assert longest("--target_precision", "1%") == 300
    assert longest("--target_precision", "1%", "--max_measure_batches", "20") == 20


@pytest.mark.slow
@pytest.mark.usefixtures("plain_replay")
def test_auto_takes_the_largest_micro_batch_that_fits_and_divides():
    small = plan("--batch_size", "96", machine=make_machine(device_memory_gib=40.0))
    large = plan(
        "--batch_size", "96", machine=make_machine(device_memory_gib=140.0, free_memory_gib=139.0)
    )
    sizes = [result.config.device_train_microbatch_size for result in (small, large)]
    assert sizes[0] < sizes[1]
    assert all(96 % size == 0 for size in sizes)
    assert "auto" in small.chosen["device_train_microbatch_size"]
    assert small.memory.total_gib < 0.9 * 40


UNEVEN = ("--batch_size", "15", "--device_train_microbatch_size", "3")


@pytest.mark.usefixtures("plain_replay")
def test_an_uneven_batch_is_cut_and_its_ragged_micro_batch_trained_if_the_user_says_so():
    result = plan("--model_name", "tiny", *UNEVEN, "--allow_uneven_batch", world_size=2)
    assert result.config.batch_size == 14  # 7 images per rank: two micro-batches of 3, one of 1
    cut, ragged = result.notes[-2:]
    assert cut.startswith("The global batch of 15 does not divide over 2 ranks: 14 images")
    assert "last micro-batch of each step holds 1 of 3 images" in ragged
    assert "7 images per rank in 3 micro-batches of 3" in for_person(result)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_replay")
def test_the_default_batch_of_96_gpus_divides_by_ranks_and_micro_batches():
    # 2048 // 96 is 21, which micro-batches of 4 do not divide: 5 of them are 1920 images.
    result = plan("--device_train_microbatch_size", "4", machine=make_machine(), world_size=96)
    assert result.config.batch_size == 1920
    assert result.chosen["batch_size"].endswith("up to the seeds' 2048 that divides by 384")


OF_2048 = ("--batch_size", "2048", "--device_train_microbatch_size")


@pytest.mark.usefixtures("plain_replay")
@pytest.mark.parametrize(
    ("argv", "num_warmup", "num_measured", "num_steps"),
    [
        (["--max_duration", "7ba"], 4, 3, 7),
        (["--max_duration", "1ba"], 0, 1, 1),
        (["--max_duration", "20ba", "--measure_batches", "4"], 4, 4, 20),
        # 100,000 synthetic samples in batches of 2,048: 48 full batches an epoch, as in the seed.
        # Two of the 96 are profiled, and one of up to 32 micro-batches shows the kernels of
        # attention: a profiler would fill the memory with the events of more.
        (["--max_duration", "2ep", *OF_2048, "64"], 4, 89, 96),
        (["--max_duration", "2ep", *OF_2048, "32"], 4, 90, 96),
    ],
)
def test_windows_lie_inside_the_duration(argv, num_warmup, num_measured, num_steps):
    result = plan("--model_name", "tiny", *argv)
    config = result.config
    assert (config.warmup_batches, config.measure_batches) == (num_warmup, num_measured)
    assert result.num_steps == num_steps


OF_3 = "--device_train_microbatch_size 3"
UNEVEN_FLAGS = "--batch_size, or accept it with --allow_uneven_batch"


@pytest.mark.usefixtures("plain_replay")
@pytest.mark.parametrize(
    ("argv", "world_size", "value", "allowed", "flag"),
    [
        ("--batch_size 7", 2, 7, "multiples of 2, the nearest are 6 and 8", UNEVEN_FLAGS),
        ("--batch_size 1", 2, 1, "multiples of 2, the nearest are 2", "--batch_size"),
        ("--batch_size 1 --allow_uneven_batch", 2, 1, "the nearest are 2", "--batch_size"),
        (
            f"--batch_size 16 {OF_3}",
            2,
            16,
            "multiples of 6, the nearest are 12 and 18",
            UNEVEN_FLAGS,
        ),
        (
            *(f"--batch_size 4 {OF_3}", 2, 3, "1 to 2, or a global batch of at least 6"),
            "--device_train_microbatch_size or --batch_size",
        ),
        ("--image_size 100", 1, 100, "multiples of 64, nearest 64 or 128", "--image_size"),
        ("--image_size 32", 1, 32, "nearest 64", "--image_size"),
        ("--precision amp_fp16", 1, "amp_fp16", "fp32 | amp_bf16 | bf16", "--precision"),
        ("--encoder_dtype fp16", 1, "fp16", "fp32 | bf16", "--encoder_dtype"),
        ("--remote no/such/folder", 1, "no/such/folder", "", PLACE_FLAGS),
        (
            *("--use_synth_data --remote data", 1, "data", "a folder, or --use_synth_data"),
            "--use_synth_data, --data_format, --remote or --local",
        ),
        ("--latents precomputed --remote data", 1, "data", "", PLACE_FLAGS),
        (
            *("--max_duration 5ba --measure_batches 9", 1, "5ba", "at least 9ba"),
            "--max_duration, --warmup_batches, --measure_batches or --profile_batches",
        ),
        (
            *("--max_measure_batches 9 --measure_batches 3", 1, 9, ""),
            "--max_measure_batches or --target_precision",
        ),
        (
            *("--max_warmup_batches 1 --warmup_batches 3", 1, 1, "at least 3"),
            "--max_warmup_batches or --warmup_batches",
        ),
        (
            *("--max_duration 20ba --warmup_batches 2 --max_warmup_batches 30", 1, "20ba", ""),
            "--max_duration, --max_warmup_batches or --max_measure_batches",
        ),
        ("--model_name tinny", 1, "tinny", "tiny", "--model_name"),
        ("--model_revision main", 1, "main", "", "--model_revision"),
        ("--results_dir /dev/null/runs", 1, "/dev/null/runs", "", "--results_dir"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(argv, world_size, value, allowed, flag):
    with refused(flag, value=value) as caught:
        plan("--model_name", "tiny", *argv.split(), world_size=world_size)
    assert allowed in caught.value.allowed


WINDOWS = "--batch_size 8 --device_train_microbatch_size 4 --warmup_batches 9 --measure_batches 9"


@pytest.mark.parametrize(
    ("argv", "world_size", "value"),
    [
        ("--batch_size 7", 2, 7),
        (f"--batch_size 4 {OF_3}", 2, 3),
        (f"{WINDOWS} --max_duration 5ba", 2, "5ba"),
        ("--image_size 100", None, 100),
        ("--model_name tinny", None, "tinny"),
        ("--model_revision main", None, "main"),
        ("--use_synth_data --remote data", None, "data"),
        ("--data_format folder --remote data --latents precomputed", None, "precomputed"),
    ],
)
def test_what_no_machine_can_run_is_refused_without_one(argv, world_size, value):
    with pytest.raises(ConfigError) as caught:
        plan_ahead(argv, world_size)
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("argv", "world_size"),
    [
        ("--batch_size 7", None),
        ("--batch_size 8", 2),
        (f"{WINDOWS} --max_duration 30ba", 2),
        (f"{WINDOWS} --max_duration 1ep", 2),
        ("--precision tf32", 2),
        ("--model_name /elsewhere/model --image_size 100", 2),
        ("--remote /elsewhere/pictures --results_dir /dev/null/runs", 2),
    ],
)
def test_what_some_machine_may_run_is_not_refused_without_one(argv, world_size):
    plan_ahead(argv, world_size)


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ("--time_sampling uniform", "--time_sampling"),
        ("--time_shift resolution", "--time_shift"),
        ("--guidance_embedding 1", "--guidance_embedding"),
    ],
)
def test_a_model_with_a_schedule_of_noise_has_no_settings_of_rectified_flow(argv, flag):
    words = ("--model_name", "tiny", "--max_duration", "1ba", *argv.split())
    request = recipe.parse_request(words, description="", epilog="")
    ranks = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
    with refused(f"{flag} or --model_name"):
        check_ahead(request, ranks=UNKNOWN)
    with refused(f"{flag} or --model_name"):
        resolve(request, machine=make_cpu_machine(), ranks=ranks)


def plan_ahead(argv, world_size):
    request = parse_request(["--model_name", "tiny", *argv.split()], description="", epilog="")
    ranks = UNKNOWN if world_size is None else Unknown(world_size=world_size)
    check_ahead(request, ranks=ranks)


def test_an_empty_data_folder_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    with refused(PLACE_FLAGS):
        plan("--model_name", "tiny", "--remote", str(tmp_path / "data"))


@pytest.mark.slow
def test_a_results_folder_without_space_is_refused(monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024**2))
    with refused("--results_dir", allowed="at least 16 MiB"):
        plan("--model_name", "tiny")


@pytest.mark.slow
def test_24_gib_refuse_the_seed_recipe_with_ema_at_micro_batch_8():
    argv = ("--preset", "seed", "--use_ema", "--device_train_microbatch_size", "8")
    with pytest.raises(ConfigError) as caught:
        plan(*argv)
    assert plan(*argv, "--no_check_memory").memory.total_gib > 21
    # Each that is named is enough.
    named = re.findall(r"(--[a-z_]+(?: [a-z0-9_]+)?) \(([0-9.]+) GiB", caught.value.flag)
    assert [flags for flags, _ in named] == [
        "--cpu_allocator return",
        "--no_use_ema",
        "--latents precomputed",
    ]
    for flags, gib in named:
        assert f"{plan(*argv, *flags.split()).memory.total_gib:.1f}" == gib


@pytest.mark.slow
@pytest.mark.usefixtures("plain_replay")
def test_a_gpu_whose_memory_may_not_suffice_is_tried_with_a_warning():
    argv = ("--batch_size", "128", "--device_train_microbatch_size", "128")
    result = plan(*argv, machine=make_machine())
    (note,) = [note for note in result.notes if note.startswith("The memory may not suffice")]
    assert f"the estimate is {result.memory.total_gib:.1f} GiB" in note
    assert (
        "at most 71.2 GiB" in note
        and "--device_train_microbatch_size 16 together (45.2 GiB)" in note
    )
    assert note in for_person(result)
    for changes in (("--no_check_memory",), ("--batch_size", "8", *argv[2:3], "8")):
        notes = plan(*argv, *changes, machine=make_machine()).notes
        assert not any("memory" in one for one in notes)


@pytest.mark.slow
def test_workers_on_a_cpu_keep_the_old_weights():
    argv = ("--model_name", "tiny", "--num_workers", "1")
    need = plan(*argv, "--no_check_memory").memory
    # 90 % of what is free are enough for the run and half of the weights before the first step.
    limit_gib = need.total_gib + need.trained_weights / 2
    machine = make_cpu_machine(held_memory_gib=0.0, free_memory_gib=limit_gib / 0.9)
    with pytest.raises(ConfigError) as caught:
        plan(*argv, machine=machine)
    assert caught.value.flag.startswith(f"--num_workers 0 ({need.total_gib:.1f} GiB")
    plan(*argv[:-1], "0", machine=machine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ["--device_train_microbatch_size", "8"],
        ["--use_ema", "--device_train_microbatch_size", "4"],
        ["--preset", "seed"],
    ],
)
def test_24_gib_accept_the_commands_of_the_readme(argv):
    assert plan("--use_synth_data", *argv).config.image_size == 256


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        (("tiny-flux", "--convolution", "matmul"), "--convolution", "matmul"),
        (("tiny-sd3", "--keep_layout"), "--keep_layout", True),
        (("tiny-sdxl", "--train_text_encoder"), "--train_text_encoder", True),
    ],
)
def test_a_setting_that_a_family_of_models_cannot_have_is_refused(argv, flag, value):
    with refused(flag, value=value):
        plan("--model_name", *argv)


@pytest.mark.slow
def test_a_preset_has_no_setting_that_a_family_of_models_cannot_have():
    result = plan("--model_name", "tiny-flux", "--preset", "fast")
    assert (result.config.convolution, result.config.keep_layout) == ("torch", False)
    assert {"convolution", "keep_layout"} <= result.chosen.keys()
    assert plan("--model_name", "tiny", "--preset", "fast").config.convolution == "matmul"
