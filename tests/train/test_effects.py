"""Settings that change nothing are refused where the user asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

import train
from sdbench.settings.recipe import parse_request
from sdbench.tasks.train.effects import check_effects
from tests.refusals import printed_refusal, refused

RUN = ("--model_name", "tiny", "--use_synth_data", "--max_duration", "1ba")


def check(*argv: str) -> None:
    check_effects(parse_request([*RUN, *argv], description="", epilog=""))


@pytest.mark.parametrize(
    ("argv", "others", "acts_with"),
    [
        (
            ("--validation_remote", "a"),
            ("--validate_every_batches", "--score_every_batches"),
            ("--score_every_batches", "9"),
        ),
        (("--num_validation_images", "5"), ("--validate_every_batches",), None),
        (("--sample_prompts", "a"), ("--sample_every_batches",), None),
        (
            ("--sample_steps", "25"),  # its default
            ("--sample_every_batches", "--score_every_batches"),
            ("--sample_every_batches", "9"),
        ),
        (("--text_encoder_lr_factor", "2"), ("--train_text_encoder",), ("--train_text_encoder",)),
        (("--kl_weight", "2"), ("--train",), ("--train", "vae")),
        (("--lr_end_factor", "0.5"), ("--lr_schedule",), ("--lr_schedule", "linear")),
        (("--ema_half_life_batches", "9"), ("--use_ema",), ("--use_ema",)),
        (("--ema_decay", "0.9"), ("--use_ema",), ("--use_ema",)),
        (("--ema_warmup",), ("--use_ema",), ("--use_ema",)),
        (("--ema_interval_batches", "9"), ("--use_ema",), ("--use_ema",)),
        (("--fid_network", "a"), ("--score_every_batches",), None),
        (("--keep_every_batches", "9"), ("--save_every_batches",), None),
    ],
)
def test_a_flag_without_an_effect_is_refused(argv, others, acts_with):
    flags = " or ".join((argv[0], *others))
    with refused(flags) as caught:
        check(*argv)
    assert all(other in caught.value.allowed for other in others)
    check(*argv, *(acts_with or (others[0], "9")))


def test_the_program_refuses_it(capsys):
    assert train.main([*RUN, "--lr_end_factor", "0.5"]) == 2
    error = printed_refusal(capsys.readouterr().err)
    assert (error.flag, error.value) == ("--lr_end_factor or --lr_schedule", 0.5)
    assert error.allowed == "only with another --lr_schedule than constant"


def test_a_file_may_hold_what_a_flag_switches_off(tmp_path):
    path = str(tmp_path / "run.yaml")
    Path(path).write_text("use_ema: true\nema_warmup: true\nema_half_life_batches: 9\n")
    check("--config", path)
    check("--config", path, "--no_use_ema")
    Path(path).write_text("ema_warmup: true\n")
    with refused("--ema_warmup or --use_ema", value=True):
        check("--config", path)


def test_a_printed_config_and_other_programs_keys_are_no_wishes(tmp_path, capsys):
    assert train.main([*RUN, "--print_config"]) == 0
    path = str(tmp_path / "run.yaml")
    Path(path).write_text(capsys.readouterr().out)
    check("--config", path)
    Path(path).write_text("experiment: {num_eval_images: 10, save_only_most_recent: false}\n")
    check("--config", path)
