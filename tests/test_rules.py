"""Settings that do not suit each other, or change nothing, are refused by name."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import train
from sdbench.base.errors import ConfigError
from sdbench.ranks.distributed import Ranks
from sdbench.settings import rules
from sdbench.settings.recipe import TrainConfig, parse_request
from sdbench.settings.rules import UNKNOWN, Unknown, settle
from tests.machines import make_cpu_machine
from tests.refusals import printed_refusal, refused

RUN = ("--model_name", "tiny", "--max_duration", "1ba")
PICTURES = "--remote subject --instance_prompt <dog>"
SUBJECT = f"--task dreambooth {PICTURES}"
TOKEN = f"{SUBJECT} --learned_token <dog> --initial_token dog"
ONLINE = "--online_preprocessing --engine ray"
HELD_OUT = "--validation_remote a"
VALIDATED = f"--validate_every_batches 9 {HELD_OUT}"
SCORED = f"--score_every_batches 9 {HELD_OUT}"
PRECOMPUTED = "--latents precomputed"
LOGIT_NORMAL = "--time_sampling logit_normal"
PROMPTS = "--sample_prompts a"
SAMPLED = f"--sample_every_batches 9 {PROMPTS}"


def check(argv: str = "", world_size: int = 1) -> TrainConfig:
    request = parse_request([*RUN, *argv.split()], description="", epilog="")
    ranks = Ranks(rank=0, world_size=world_size, local_rank=0, local_world_size=world_size)
    return settle(request, machine=make_cpu_machine(), ranks=ranks)[0]


@pytest.mark.parametrize(
    ("argv", "others", "needed"),
    [
        (HELD_OUT, "validate_every_batches or --score_every_batches", SCORED),
        ("--num_validation_images 5", "validate_every_batches", VALIDATED),
        (PROMPTS, "sample_every_batches", SAMPLED),
        ("--sample_steps 26", "sample_every_batches or --score_every_batches", SAMPLED),
        ("--sample_shapes 64x64", "sample_every_batches", SAMPLED),
        ("--fid_network a", "score_every_batches", SCORED),
        ("--text_encoder_lr 2", "train_text_encoder or --learned_token", "--train_text_encoder"),
        ("--kl_weight 2", "train", "--train vae"),
        ("--lr_end_factor 0.5", "lr_schedule", "--lr_schedule linear"),
        ("--ema_half_life_batches 9", "use_ema", "--use_ema"),
        ("--ema_warmup", "use_ema", "--use_ema"),
        ("--ema_interval_batches 9", "use_ema", "--use_ema"),
        ("--keep_every_batches 9", "save_every_batches", "--save_every_batches 9"),
        ("--lora_alpha 2", "lora_rank", "--lora_rank 4"),
        ("--max_failures 2", "engine", "--engine ray --resume auto --run_name a"),
        ("--num_encoders 2", "online_preprocessing", ONLINE),
        ("--max_failed_blocks 2", "online_preprocessing", ONLINE),
        ("--instance_prompt a", "task", SUBJECT),
        ("--task dreambooth --instance_prompt a", "remote or --local", SUBJECT),
        (f"{SUBJECT} --class_prompt a", "class_remote", "--class_remote b"),
        (f"{SUBJECT} --prior_loss_weight 2", "class_remote", "--class_remote b"),
        ("--initial_token dog", "learned_token", TOKEN),
    ],
)
def test_a_flag_without_an_effect_is_refused(argv, others, needed):
    idle = argv[argv.rindex("--") :].split()[0]
    with refused(f"{idle} or --{others}") as caught:
        check(argv)
    assert f"--{others.split()[0]}" in caught.value.allowed
    check(f"{argv} {needed}")


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        ("--resume auto", "run_name or --resume", None),
        ("--use_ema --ema_impl composer --engine composer", "ema_impl", "composer"),
        ("--cuda_graph --engine torch", "cuda_graph", "--cuda_graph"),
        ("--validate_every_batches 9", "validation_remote or --validate_every_batches", None),
        ("--sample_every_batches 9", "sample_prompts or --sample_every_batches", None),
        (
            "--use_ema --ema_decay 0.9 --ema_half_life_batches 5",
            *("ema_half_life_batches or --ema_decay", 5),
        ),
        (f"{SAMPLED} {PRECOMPUTED}", "latents or --sample_every_batches", "precomputed"),
        ("--train vae --noise_offset 0.1", "noise_offset or --train", 0.1),
        ("--train vae --time_shift resolution", "time_shift or --train", "resolution"),
        ("--train vae --flow_weighting cosmap", "flow_weighting or --train", "cosmap"),
        ("--train vae --guidance_embedding 0", "guidance_embedding or --train", 0.0),
        ("--train vae --lora_rank 4", "lora_rank or --train", 4),
        (f"--train_text_encoder {PRECOMPUTED}", "latents or --train_text_encoder", "precomputed"),
        (
            "--engine ray --num_ray_workers 2 --min_ray_workers 3",
            *("min_ray_workers or --num_ray_workers", 3),
        ),
        ("--engine ray --max_failures 1", "resume or --max_failures", "never"),
        ("--online_preprocessing", "engine or --online_preprocessing", "composer"),
        (f"{SUBJECT} {PRECOMPUTED}", "latents or --task", "precomputed"),
        (f"{SUBJECT} --train vae", "train or --task", "vae"),
        (f"{SUBJECT} --num_workers 1", "num_workers or --task", 1),
        (f"{SUBJECT} --on_bad_sample skip", "on_bad_sample or --task", "skip"),
        (f"{SUBJECT} --learned_token <dog>", "initial_token or --learned_token", None),
        (f"{TOKEN} --instance_prompt a", "learned_token or --instance_prompt", "<dog>"),
        (
            f"{TOKEN} --train_text_encoder",
            *("learned_token or --train_text_encoder or --lora_rank", "<dog>"),
        ),
        (
            f"{TOKEN} --class_remote a",
            *("learned_token or --class_remote or --lora_rank", "<dog>"),
        ),
    ],
)
def test_settings_that_do_not_suit_each_other_are_refused(argv, flag, value):
    with refused(f"--{flag}", value=value):
        check(argv)


@pytest.mark.parametrize(
    ("argv", "num_ranks", "is_refused"),
    [
        ("--lora_alpha 2", None, True),
        ("--sharding zero1", 1, True),
        ("--sharding zero1", 2, False),
        ("--sharding zero1", None, False),
        # On two machines of two ranks each it shards within a machine.
        ("--sharding hybrid", 4, False),
        # A GPU may have it.
        ("--precision tf32", None, False),
        ("--sharding full --optimizer_params all", None, True),
        # A machine may replace what the preset has.
        ("--sharding full --preset seed", None, False),
    ],
)
def test_rules_are_applied_ahead_of_a_machine_where_it_changes_nothing(argv, num_ranks, is_refused):
    ranks = UNKNOWN if num_ranks is None else Unknown(world_size=num_ranks)
    request = parse_request([*RUN, *argv.split()], description="", epilog="")
    with pytest.raises(ConfigError) if is_refused else contextlib.nullcontext():
        rules.check(request, ranks=ranks)


def test_a_demand_says_which_flag_needs_which():
    with refused("--validation_remote or --validate_every_batches") as caught:
        check("--validate_every_batches 9")
    needs = "--validate_every_batches needs --validation_remote"
    assert caught.value.what == f"validation needs held-out samples ({needs})"
    with refused("--on_bad_sample or --task", allowed="error") as caught:
        check(f"{SUBJECT} --on_bad_sample skip")
    assert "(--task dreambooth needs --on_bad_sample error)" in caught.value.what


def test_what_the_other_setting_may_be_is_told():
    with refused("--sharding or --train", allowed="none | zero1 | hybrid_zero1"):
        check("--train vae --sharding full", world_size=2)
    allowed = "only with another --lr_schedule than constant"
    with refused("--lr_end_factor or --lr_schedule", value=0.5, allowed=allowed):
        check("--lr_end_factor 0.5")


def test_a_speed_up_of_a_preset_that_does_not_suit_is_replaced():
    assert check().convolution == "matmul"
    assert check("--train vae").convolution == "torch"


def test_a_training_run_needs_an_end(capsys):
    assert train.main(RUN[:2]) == 2
    assert printed_refusal(capsys.readouterr().err).flag == "--max_duration"


def test_a_file_may_hold_what_a_flag_switches_off(tmp_path):
    path = str(tmp_path / "run.yaml")
    Path(path).write_text("use_ema: true\nema_warmup: true\nema_half_life_batches: 9\n")
    check(f"--config {path}")
    check(f"--config {path} --no_use_ema")
    Path(path).write_text("ema_warmup: true\n")
    with refused("--ema_warmup or --use_ema", value="--ema_warmup"):
        check(f"--config {path}")


@pytest.mark.usefixtures("plain_replay")
def test_a_printed_config_and_other_programs_keys_are_no_wishes(tmp_path, capsys):
    assert train.main([*RUN, "--use_synth_data", "--print_config"]) == 0
    path = str(tmp_path / "run.yaml")
    Path(path).write_text(capsys.readouterr().out)
    check(f"--config {path}")
    Path(path).write_text("experiment: {num_eval_images: 10, save_only_most_recent: false}\n")
    check(f"--config {path}")


def test_settings_of_rectified_flow_are_numbers_or_words():
    config = check(f"{LOGIT_NORMAL} --time_mean -0.5 --time_std 2 --time_shift 3")
    assert (config.time_sampling, config.time_mean, config.time_std) == ("logit_normal", -0.5, 2.0)
    assert config.time_shift == 3.0
    assert check("--time_shift resolution").time_shift == "resolution"
    assert check().time_shift is check().flow_weighting is check().guidance_embedding is None
    for argv, flag, value in (
        ("--time_shift 0", "--time_shift", "0"),
        ("--time_shift size", "--time_shift", "size"),
        ("--time_mean nan", "--time_mean", "nan"),
        ("--time_std 0", "--time_std", "0"),
        ("--flow_weighting mode", "--flow_weighting", "mode"),
        ("--guidance_embedding -1", "--guidance_embedding", "-1"),
    ):
        with refused(flag, value=value):
            check(argv)
