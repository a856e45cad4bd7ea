"""train.py: a run that was stopped and resumed has the losses of one that was not, bit for bit."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import train
from sdbench.engines import load_engine
from sdbench.record.store import load_record
from sdbench.settings.setting import SAME_FP32
from tests.data import datasets
from tests.forked import codes_of, log_of
from tests.marks import quick_and_slow
from tests.refusals import printed_refusal
from tests.state.states import flip_byte
from tests.train.in_turn import train_in_turn
from tests.train.written import read_events, read_steps

TINY = ("--model_name", "nano", "--batch_size", "16")
RECIPE = ("--use_ema", "--ema_half_life_batches", "3", "--clip_norm", "0.5")
RECIPE += ("--lr_warmup_batches", "4", "--log_every_batches", "1")
LORA = ("--lora_rank", "4", "--precision", "fp32")
MASTERS = ("--precision", "bf16", "--master_weights", "fp32")
# 49 samples are three batches of 16: steps 3 and 6 end an epoch.
NUM_STEPS = 7


def command(name: str, num_steps: int, *argv: str) -> list[str]:
    """The arguments of train.py for a run up to a step."""
    return [*TINY, *RECIPE, "--run_name", name, "--max_duration", f"{num_steps}ba", *argv]


def run(*args) -> int:
    """Train in this process, as `command` says."""
    return train.main(command(*args))


def losses(name: str) -> list[tuple[str, str, str]]:
    """Step, loss and learning rate of each step."""
    rows = read_steps(Path("runs", name))
    return [(row["step"], row["loss"], row["learning_rate"]) for row in rows]


# All engines read data in the same way, and tests/data resumes every format.
QUICK = ("torch", 0, "mds")
CASES = [
    QUICK,
    ("torch", 0, "subject"),
    ("torch", 0, "vae"),
    ("composer", 2, "folder"),
]


def write_subject(folder: Path) -> list[str]:
    """Pictures of a subject and of its class; an epoch is three batches of eight pairs."""
    for name, count in (("subject", 3), ("class", 24)):
        datasets.write_folder(folder / name, num_samples=count, has_captions=False)
    return [
        *("--task", "dreambooth", "--train_text_encoder"),
        *("--remote", str(folder / "subject"), "--instance_prompt", "a photo of unqtkn dog"),
        *("--class_remote", str(folder / "class"), "--class_prompt", "a photo of a dog"),
    ]


@pytest.mark.parametrize(
    ("engine", "num_workers", "data_format"), quick_and_slow(CASES, quick=[QUICK])
)
def test_resumed_at_any_step(tmp_path, monkeypatch, engine, num_workers, data_format):
    # A crop or a flip of them changes the loss.
    monkeypatch.setattr(datasets, "make_png", datasets.make_ramp_png)
    argv = ["--engine", engine, "--num_workers", str(num_workers)]
    if data_format == "vae":
        argv += ["--use_synth_data", "--train", "vae"]
    elif data_format == "subject":
        argv += write_subject(tmp_path)
        argv += ["--horizontal_flip_probability", "0.5", "--caption_drop_probability", "0.2"]
    else:
        place = tmp_path / "data"
        datasets.WRITERS[data_format](place)
        argv += ["--remote", str(place), "--crop", "random", "--horizontal_flip_probability", "0.5"]
    assert run("whole", NUM_STEPS, *argv) == 0
    for num_steps in (2, 3, NUM_STEPS):  # within an epoch, at its end, and in the third
        assert run("parts", num_steps, "--resume", "auto", *argv) == 0
    assert losses("parts") == losses("whole")
    assert len(losses("whole")) == NUM_STEPS
    assert load_record(Path("runs/parts"))["summary"]["first_step"] == 3


UNCLIPPED = ("--use_synth_data", "--use_ema", "--engine", "torch", "--log_every_batches", "1")
LEVERS = [
    # With bf16 the rounding draws random numbers.
    "--optimizer adamw_8bit --precision bf16 --update_in_backward",
    "--optimizer adamw_4bit",
    "--lora_rank 4 --frozen_bits nf4 --model_name tiny-flux",
    "--precision amp_bf16 --linear_dtype fp8",
]


@pytest.mark.slow
@pytest.mark.usefixtures("without_compiling")
@pytest.mark.parametrize("lever", LEVERS)
def test_resumed_with_a_lever_for_memory(lever):
    argv = (*TINY, *UNCLIPPED, *lever.split())
    for name, num_steps in (("whole", 3), ("parts", 2), ("parts", 3)):
        turn = ("--run_name", name, "--max_duration", f"{num_steps}ba", "--resume", "auto")
        assert train.main([*argv, *turn]) == 0
    assert losses("parts") == losses("whole")


@pytest.mark.slow
def test_engines_take_turns_in_one_run():
    argv = ("--use_synth_data", "--ema_impl", "foreach")
    assert run("whole", 4, *argv, "--engine", "torch") == 0
    for num_steps, engine in ((1, "composer"), (2, "ray"), (3, "torch"), (4, "composer")):
        turn = ("--engine", engine, "--resume", "auto")
        assert run("turns", num_steps, *argv, *turn) == 0
    turns, whole = losses("turns"), losses("whole")
    assert [float(loss) for _, loss, _ in turns] == pytest.approx(
        [float(loss) for _, loss, _ in whole], rel=SAME_FP32
    )
    assert [(step, rate) for step, _, rate in turns] == [(step, rate) for step, _, rate in whole]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sharding", "what", "ranks_and_nodes"),
    [
        ("composer", "full", LORA, {}),
        ("torch", "hybrid_zero1", MASTERS, {"num_ranks": 4, "num_nodes": 2}),
    ],
    ids=str,
)
def test_ranks_stop_and_one_goes_on(tmp_path, engine, sharding, what, ranks_and_nodes):
    """Ranks stop and go on with the losses of those that did not, and one rank goes on alone."""
    what = (*what, "--batch_size", "4")
    argv = ("--use_synth_data", *what, "--engine", engine, "--sharding", sharding)
    lines = [
        command(name, num_steps, *argv, "--resume", resume)
        # The whole run between the parts, so that no part begins as the one before has ended.
        for name, num_steps, resume in (
            ("parts", 2, "never"),
            ("whole", 3, "never"),
            ("parts", 3, "auto"),
        )
    ]
    train_in_turn(engine, tmp_path, *lines, **ranks_and_nodes)
    assert losses("parts") == losses("whole")
    alone = ("--use_synth_data", *what, "--engine", "torch", "--resume", "auto")
    assert run("parts", 4, *alone) == 0
    assert len(losses("parts")) == 4


def in_two_ranks(folder, *args) -> tuple[list[int], str]:
    """Train in two ranks; their exit codes, and what the first one printed."""
    codes = codes_of(lambda: run(*args), folder, timeout_s=240)
    return codes, log_of(folder, 0).read_text()


@pytest.mark.slow
def test_two_ranks_pass_over_a_checkpoint_with_a_damaged_file_of_one(tmp_path):
    load_engine("torch")
    importlib.import_module("sdbench.training.evaluations")
    recipe = ("--use_synth_data", "--engine", "torch", "--save_every_batches", "2")
    argv = ("one", 5, *recipe, "--resume", "auto")
    assert in_two_ranks(tmp_path, "one", 4, *recipe)[0] == [0, 0]
    before = losses("one")
    folder = Path("runs/one/checkpoints")
    damaged = folder / "step_00000004" / "__1_0.distcp"
    flip_byte(damaged)
    codes, printed = in_two_ranks(tmp_path, *argv)
    assert codes == [0, 0], printed
    assert str(damaged) in printed
    restart = read_events(Path("runs/one"), "begin")[-1]
    assert (restart["step"], restart["num_lost_steps"]) == (2, 2)
    assert str(damaged) in restart["passed_over"][0]
    # Nothing of the damaged one was taken.
    steps = losses("one")
    assert len(steps) == 5 and steps[:4] == before

    for step in (4, 5):
        flip_byte(folder / f"step_{step:08d}" / "__0_0.distcp")
    codes, printed = in_two_ranks(tmp_path, *argv)
    assert codes == [2, 2] and str(folder) in printed
    assert losses("one") == steps


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(capsys):
    argv = ("--use_synth_data", "--engine", "torch")
    assert run("one", 1, *argv) == 0
    again = command("one", 2, *argv)
    assert train.main(again) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == ("--run_name or --resume", "runs/one")
    for flag, value in (("--seed", 18), ("--lora_rank", 4), ("--prediction_type", "v_prediction")):
        assert train.main([*again, "--resume", "auto", flag, str(value)]) == 2
        refusal = printed_refusal(capsys.readouterr().err)
        assert (refusal.flag, refusal.value) == (flag, value)
