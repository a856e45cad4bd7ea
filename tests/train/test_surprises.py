"""What nobody would expect of a run is said in its plan, and what torch would refuse is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import train
from tests.data.datasets import write_folder, write_tar
from tests.refusals import printed_refusal

TINY = ("--model_name", "nano", "--engine", "torch", "--batch_size", "4", "--num_threads", "1")


@pytest.fixture
def plan(capsys, tmp_path, monkeypatch):
    """Plan a run, and return the comments before its settings and what was printed on stderr."""
    monkeypatch.chdir(tmp_path)

    def plan(*argv: object, exit_code: int = 0, main=train.main) -> str:
        capsys.readouterr()
        assert main([*TINY, *map(str, argv), "--dry_run"]) == exit_code
        printed = capsys.readouterr()
        lines = [line for line in printed.out.splitlines() if line.startswith("# ")]
        return printed.err if exit_code else "\n".join(lines)

    return plan


@pytest.mark.parametrize(
    ("argv", "share"),
    [
        (("--max_duration", "200ba"), 0.5**0.2),
        (("--max_duration", "200ba", "--ema_decay", "0.999"), 0.999**200),
        (("--max_duration", "5ba"), 1.0),  # the average is updated every 10 steps on a CPU
        (("--max_duration", "5ba", "--ema_warmup"), 1.0),
        (("--max_duration", "1010ba"), None),
        (("--max_duration", "200ba", "--ema_half_life_batches", "50"), None),
        (("--max_duration", "200ba", "--ema_warmup"), None),
        (("--max_duration", "200ba", "--no_use_ema"), None),
    ],
)
def test_an_average_that_will_be_mostly_the_first_weights_is_told(plan, argv, share):
    notes = plan("--use_synth_data", "--use_ema", *argv)
    if share is None:
        assert "moving average" not in notes
    else:
        assert f"the moving average will be to {share:.0%} the weights of the first" in notes


@pytest.mark.slow
def test_a_falling_rate_that_rises_as_a_run_goes_on_longer_is_told(plan):
    """The rates of the plan are those that the run then has."""
    run = ("--use_synth_data", "--run_name", "r", "--resume", "auto", "--lr", "0.01")
    run += ("--log_every_batches", "1")
    cosine = (*run, "--lr_schedule", "cosine")
    assert train.main([*TINY, *cosine, "--max_duration", "4ba"]) == 0
    # The last step had the rate 0. Of the fifth of 8 steps it is half of (1 + cos(4/7 pi)).
    told = f"from 0 to {0.005 * (1 + math.cos(4 / 7 * math.pi)):.3g} after step 4"
    assert told in plan(*cosine, "--max_duration", "8ba")
    assert "learning rate rises" not in plan(*cosine, "--max_duration", "4ba")
    assert "learning rate rises" not in plan(*run, "--max_duration", "4ba")
    assert train.main([*TINY, *cosine, "--max_duration", "8ba"]) == 0
    rates = [row.split(",")[2] for row in Path("runs/r/steps.csv").read_text().splitlines()[1:]]
    assert float(rates[3]) == 0
    assert float(rates[4]) == pytest.approx(0.005 * (1 + math.cos(4 / 7 * math.pi)))


SAMPLED = ("--sample_every_batches", "1", "--sample_prompts", "a cat")
LONG = "many words " * 37 + "many "  # 75 tokens, and the two at the ends


@pytest.mark.parametrize("kind", ["folder", "table", "tar"])
def test_captions_that_are_cut_are_counted(plan, kind):
    write_folder(Path("data"), num_samples=8, has_captions=kind != "table")
    captions = [f"{LONG}{'more' if index < 3 else ''}".strip() for index in range(8)]
    captions[0] = "of bytes and not of tokens: internationalization " + "internationalization " * 9
    if kind == "folder":
        for index, caption in enumerate(captions):
            Path(f"data/{index:03d}.txt").write_text(caption)
    elif kind == "table":
        rows = [f"{index:03d}.png,{caption}" for index, caption in enumerate(captions)]
        Path("data/captions.csv").write_text("\n".join(["file,caption", *rows]))
    else:
        pictures = sorted(Path("data").glob("*.png"))
        members = [
            member
            for picture, caption in zip(pictures, captions, strict=True)
            for member in (
                (picture.name, picture.read_bytes()),
                (f"{picture.stem}.txt", caption.encode()),
            )
        ]
        for file in Path("data").iterdir():
            file.unlink()
        write_tar(Path("data/0.tar"), members)
    notes = plan("--remote", "data", "--max_duration", "2ba")
    assert "Of all 8 captions, 2 are longer than the 77 tokens that the model reads" in notes


def test_more_captions_than_are_looked_at_are_told_as_the_first_ones(plan):
    write_folder(Path("data"), num_samples=1)
    rows = [f"000.png,{LONG}more" for _ in range(300)]
    Path("data/captions.csv").write_text("\n".join(["file,caption", *rows]))
    notes = plan("--remote", "data", "--max_duration", "2ba")
    assert "Of the first 256 captions, 256 are longer" in notes


def test_a_prompt_of_a_subject_that_is_cut_is_told(plan):
    write_folder(Path("data"), num_samples=4, has_captions=False)
    subject = ("--task", "dreambooth", "--remote", "data", "--max_duration", "2ba")
    told = "Of the caption that all pictures share, 1 is longer than the 77 tokens"
    assert told in plan(*subject, "--instance_prompt", f"{LONG}more")
    assert told not in plan(*subject, "--instance_prompt", LONG.strip())


def test_the_last_samples_that_no_epoch_sees_are_told(plan):
    write_folder(Path("data"), num_samples=9)
    argv = ("--remote", "data", "--max_duration", "2ep")
    told = "1 of 9 samples do not fill a batch and are left out of it, "
    assert f"{told}with --no_shuffle the last ones in each epoch." in plan(*argv, "--no_shuffle")
    assert f"{told}others in each epoch." in plan(*argv)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_told(plan, encoding):
    write_folder(Path("data"), num_samples=8)
    Path("data/001.txt").write_bytes("a cat".encode(encoding))
    told = "Of all 8 captions, 1 cannot be used: data/001.png: the caption has the character NUL"
    assert told in plan("--remote", "data", "--max_duration", "2ba")
    table = "\n".join(["file,caption", *(f"{index:03d}.png,a cat" for index in range(8))])
    Path("data/captions.csv").write_bytes(table.encode(encoding))
    error = plan("--remote", "data", "--max_duration", "2ba", exit_code=2)
    assert "has the character NUL, as UTF-16 without a mark" in printed_refusal(error).what
    Path("prompts.txt").write_bytes("a cat".encode(encoding))
    argv = ("--use_synth_data", "--max_duration", "2ba", *SAMPLED[:-1], "prompts.txt")
    refusal = printed_refusal(plan(*argv, exit_code=2))
    assert "NUL" in refusal.what and refusal.flag == "--sample_prompts"


def test_pictures_without_captions_lead_to_dreambooth(plan):
    write_folder(Path("data"), num_samples=4, has_captions=False)
    argv = ("--remote", "data", "--max_duration", "2ba")
    assert (
        "--task dreambooth and --instance_prompt"
        in printed_refusal(plan(*argv, exit_code=2)).allowed
    )
    plan(*argv, "--task", "dreambooth", "--instance_prompt", "a xyz dog", "--latents", "online")


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (("--beta1", "1.0"), "--beta1"),
        (("--beta2", "1"), "--beta2"),
        (("--adam_eps", "1e-50"), "--adam_eps"),  # 0 in fp32
        (("--data_timeout_s", "1e10"), "--data_timeout_s"),  # no wait can be so long
        ((*SAMPLED, "--sample_steps", "1000"), "--sample_steps"),
        (("--zero_terminal_snr",), "--prediction_type or --zero_terminal_snr"),
        (
            ("--zero_terminal_snr", "--prediction_type", "sample"),
            "--prediction_type or --zero_terminal_snr",
        ),
    ],
)
def test_what_torch_or_the_builder_would_refuse_is_refused_in_the_plan(plan, argv, flag):
    error = plan("--use_synth_data", "--max_duration", "2ba", *argv, exit_code=2)
    assert printed_refusal(error).flag == flag
