"""`sdbench dreambooth`: from pictures of a subject to pictures drawn of it, on the tiny model."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sdbench.base.errors import ConfigError
from sdbench.cli import main as sdbench
from sdbench.launch.child import LOCK_NAME
from sdbench.launch.dreambooth import DreamboothFlags, plan_steps
from sdbench.record.store import load_record
from tests.data.datasets import write_folder
from tests.launch.steps_here import run_steps_here
from tests.refusals import printed_refusal, refusal_of
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PROMPT, CLASS_PROMPT = "photo of a unqtkn dog", "photo of a dog"
SUBJECT = ("my-dog", "--prompt", PROMPT)
SMALL = ("--model_name", "tiny", "--engine", "torch", "--generate_flags", "--num_steps 2")
SMALL += ("--num_samples", "1", "--num_class_images", "2", "--sample_prompts", "unqtkn on the moon")
COMMAND = (*SUBJECT, "--class_prompt", CLASS_PROMPT, *SMALL)
FOLDER = Path("runs", "my-dog")


@pytest.fixture(autouse=True)
def workplace(plain_replay) -> None:
    """A folder with four pictures of a subject without captions; nothing of the checkout."""
    write_folder(Path("my-dog"), num_samples=4, has_captions=False)


@pytest.fixture
def started(monkeypatch) -> list[str]:
    return run_steps_here(monkeypatch)


def times(*patterns: str) -> dict[str, int]:
    """When the files of the folder were last written, in ns."""
    paths = [path for pattern in patterns for path in FOLDER.glob(pattern) if path.is_file()]
    assert paths
    return {str(path): path.stat().st_mtime_ns for path in paths}


KEPT = ("*/pictures/*.png", "train/checkpoints/**/*", "model/**/*", "train/latents*")


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize(("model", "is_frozen"), [("tiny", False), ("tiny-sdxl", True)])
def test_a_text_encoder_that_a_family_keeps_frozen_is_not_trained(model, is_frozen, rank) -> None:
    flags = DreamboothFlags(
        subject="my-dog",
        model_name=model,
        prompt=PROMPT,
        class_prompt=CLASS_PROMPT,
        lora_rank=rank,
        image_size=64,
    )
    steps = plan_steps(flags, (), folder=FOLDER)
    (training,) = (step.command for step in steps if step.what == "training")
    assert ("train_text_encoder=false" in training) == is_frozen


@pytest.mark.slow
def test_each_step_is_done_once_and_a_longer_training_goes_on(started, capsys) -> None:
    assert sdbench(["dreambooth", *COMMAND, "--", "--max_duration", "2ba"]) == 0
    printed = capsys.readouterr().out
    assert f"--model_name {FOLDER / 'model'} --prompts '{PROMPT}' --folder pictures" in printed
    shown = [line for line in printed.splitlines() if line.startswith("python ")]
    assert [line.removeprefix("python -m sdbench ") for line in shown] == started
    programs = [line.split()[0] for line in started]
    assert programs == ["generate"] * 2 + ["train", "export", "generate"]
    record = load_record(FOLDER / "train")
    assert (record["config"]["task"], record["config"]["instance_prompt"]) == ("dreambooth", PROMPT)
    assert record["config"]["class_remote"] == str(FOLDER / "class" / "pictures")
    drawn = {name: [*(FOLDER / name / "pictures").iterdir()] for name in ("class", "before")}
    assert (len(drawn["class"]), len(drawn["before"])) == (2, 3)
    changed = [
        (FOLDER / "before" / "pictures" / path.name).read_bytes() != path.read_bytes()
        for path in (FOLDER / "after" / "pictures").iterdir()
    ]
    assert changed == [True] * 3
    assert f"{FOLDER / 'before' / 'grid.png'} and {FOLDER / 'after' / 'grid.png'}" in printed

    before = times(*KEPT)
    assert sdbench(["dreambooth", *COMMAND, "--", "--max_duration", "2ba"]) == 0
    assert times(*KEPT) == before
    assert "export" not in "".join(started[5:])  # it is not even started

    assert sdbench(["dreambooth", *COMMAND, "--", "--max_duration", "3ba"]) == 0
    assert f"{FOLDER / 'model'} is made again" in capsys.readouterr().out
    assert load_record(FOLDER / "train")["summary"]["first_step"] == 2
    after = times(*KEPT)
    kept = {name for name, time_ns in before.items() if after.get(name) == time_ns}
    assert {name.split("/")[2] for name in kept} == {"class", "before", "train"}
    again = {name for name in before if "/model/" in name or "/after/" in name}
    assert again and not kept & again


@pytest.mark.slow
def test_a_step_that_fails_ends_it_and_the_same_command_goes_on(started, capsys) -> None:
    command = ["dreambooth", *SUBJECT, "--no_prior", *SMALL[:6], "--num_samples", "1", "--"]
    command += ["--max_duration", "1ba"]
    wrong = ["--generate_flags=--num_stepps 2"]
    assert sdbench([*command[:-3], *wrong, *command[-3:]]) == 2
    assert "error: unknown flag: got '--num_stepps'" in capsys.readouterr().err
    assert len(started) == 1
    assert sdbench(command) == 0
    assert not (FOLDER / "class").exists()
    drawn = (FOLDER / "before" / "prompts.csv").read_text()
    scenes = ("", " on the moon", " at the beach", " in a bucket")
    assert re.findall(r",(.*),\d+,", drawn) == [f"{PROMPT}{scene}" for scene in scenes]
    # An export that was taken away is made again, and the pictures drawn with it.
    drawn = times("after/pictures/*.png")
    shutil.rmtree(FOLDER / "model")
    assert sdbench(command) == 0
    assert not drawn.items() & times("after/pictures/*.png").items()
    # What somebody has put in the place of the model stays.
    (FOLDER / ".model-made-of").unlink()
    assert sdbench(command) == 2
    assert (FOLDER / "model" / "model_index.json").is_file()


@pytest.mark.slow
def test_each_step_refuses_other_inputs_than_those_of_its_results(started, capsys) -> None:
    command = ["dreambooth", *SUBJECT, "--no_prior", *SMALL[:6], "--num_samples", "1"]
    length = ["--", "--max_duration", "1ba"]
    assert sdbench([*command, "--sample_prompts", "unqtkn asleep", *length]) == 0

    def refused(*argv: str) -> ConfigError:
        before = times("**/*.png", "train/checkpoints/**/*", "model/**/*")
        capsys.readouterr()
        assert sdbench([*command, "--sample_prompts", "unqtkn asleep", *argv, *length]) == 2
        assert times("**/*.png", "train/checkpoints/**/*", "model/**/*") == before
        return printed_refusal(capsys.readouterr().err)

    # The training is checked before anything is drawn for it.
    done = len(started)
    error = refused("--prompt", "photo of a zwxtkn dog")
    assert (error.flag, error.value) == ("--prompt", "photo of a zwxtkn dog")
    assert error.allowed == f"{PROMPT}, or another --folder for another run"
    shutil.copy("my-dog/000.png", "my-dog/img6.png")
    assert "1 file was added: img6.png" in refused().what
    Path("my-dog/img6.png").unlink()
    assert len(started) == done

    # Other prompts alone need no training.
    other = ("--sample_prompts", "unqtkn awake")
    error = refused(*other)
    assert error.what.endswith("another job: not the same prompts")
    assert (error.flag, error.value) == ("--folder", str(FOLDER / "before"))
    made = times("train/checkpoints/**/*", "model/**/*")
    for name in ("before", "after"):
        (FOLDER / name).rename(name)
    assert sdbench([*command, *other, *length]) == 0
    assert times("train/checkpoints/**/*", "model/**/*") == made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_ends_the_training_too_and_it_goes_on(started) -> None:
    command = [*SUBJECT, "--no_prior", *SMALL[:6], "--num_samples", "1"]
    # The pictures before are drawn already; the rest is done by processes of their own.
    assert sdbench(["dreambooth", *command, "--dry_run", "--", "--max_duration", "9ba"]) == 0
    assert started == [] and not FOLDER.exists()
    endless = ["--", "--max_duration", "1000000ba", "--save_every_batches", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = ["-m", "sdbench", "dreambooth", *command, *endless]
    process = subprocess.Popen([sys.executable, *arguments], env=environment)
    try:
        wait_for(lambda: list(FOLDER.glob("train/checkpoints/step_*2")), what="a checkpoint")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    with (FOLDER / LOCK_NAME).open("a") as lock:  # all that was started has ended
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    record = load_record(FOLDER / "train")
    assert (record["status"], "Ctrl-C" in record["reason"]) == ("interrupted", True)
    last = max(int(path.name[5:]) for path in FOLDER.glob("train/checkpoints/step_*"))
    drawn = times("before/pictures/*.png")
    assert sdbench(["dreambooth", *command, "--", "--max_duration", f"{last + 1}ba"]) == 0
    assert load_record(FOLDER / "train")["summary"]["first_step"] == last
    assert times("before/pictures/*.png") == drawn


def planned(capsys, *argv: str) -> list[str]:
    capsys.readouterr()
    assert sdbench(["dreambooth", *COMMAND, "--dry_run", *argv]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_ranks_and_engines_get_their_launchers(started, capsys) -> None:
    drawn = ("--num_class_images", "999", "--generate_flags", "--negative_prompt 'a cat, text'")
    lines = planned(capsys, "--num_ranks", "2", "--image_size", "128", *drawn)
    # No class picture has a seed of the pictures that are drawn to judge.
    (seed,) = {found[1] for line in lines if (found := re.search(r"--seed=(\d+)", line))}
    assert int(seed) >= 999
    launchers = [line.split(" ", 4)[:4] for line in lines]
    of_ranks = ["torchrun", "--standalone", "--nproc_per_node", "2"]
    alone = [line.split()[:4] for line in lines if line.startswith("python")]
    assert [launcher == of_ranks for launcher in launchers] == [True] * 3 + [False, True]
    assert alone == [["python", "-m", "sdbench", "export"]]
    assert sum("--image_size=128" in line for line in lines) == 4
    assert sum("--negative_prompt 'a cat, text'" in line for line in lines) == 3
    lines = planned(capsys, "--num_ranks", "2", "--engine", "ray", "--", "--max_failures", "1")
    # The model's own size, and not that of the recipe.
    assert sum("--image_size=64" in line for line in lines) == 4
    (training,) = (line for line in lines if " train " in line)
    assert training.startswith("python -m sdbench train ") and training.endswith("--max_failures 1")
    assert "--engine=ray" in training and "--num_ray_workers=2" in training
    token = ("--", "--learned_token", "unqtkn", "--initial_token", "dog")
    lines = planned(capsys, "--lora_rank", "4", *token)
    assert lines[-2].endswith(f"export {FOLDER / 'train'} --folder={FOLDER / 'model'}")
    assert f"--model_name={FOLDER / 'model'}" in lines[-1] and "--lora" not in lines[-1]


def test_the_sample_prompts_may_be_a_file(started, capsys) -> None:
    Path("p.txt").write_text("asleep\nat sea\n")
    (drawn,) = {
        found[1]
        for line in planned(capsys, "--sample_prompts", "p.txt")
        if (found := re.search(r"'--prompts=(.*?\|.*?)'", line))
    }
    assert drawn.split("|") == [PROMPT, CLASS_PROMPT, "asleep", "at sea"]
    Path("p.txt").write_text("asleep | at sea")
    assert (
        refusal_of("dreambooth", *COMMAND, "--sample_prompts", "p.txt").value == "asleep | at sea"
    )


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        (("--model_name", "stabilityai/stable-diffusion-2-base"), "--model_name"),
        (("--model_name", "my-dog"), "--model_name"),
        (("--prompt", "Photo of a dog"), "--prompt"),
        (("--prompt", "a unqtkn | dog"), "--prompt"),
        (("--sample_prompts", "nothing.txt"), "--sample_prompts"),
        (("--no_prior",), "--num_class_images or --prior"),
        (("--image_size", "100"), "--image_size"),
        (("--num_ranks", "3"), "--num_ranks"),
        (("--folder", "my-dog/run"), "--folder"),
        (("--", "--lora_rank", "4"), "what stands behind --"),
        (("--", "--num_class_images", "4"), "what stands behind --"),
        (("--", "--dry_run"), "what stands behind --"),
        (("--generate_flags", "--folder elsewhere"), "--generate_flags"),
        (("--generate_flags=--seed 3",), "--generate_flags"),
        (("--generate_flags=--width 128",), "--generate_flags"),
        (("--generate_flags", "'"), "--generate_flags"),
        (("--", "--lr", "much"), "--lr"),
    ],
    ids=str,
)
def test_mistakes_are_found_before_anything_is_started(started, change, flag) -> None:
    error = refusal_of("dreambooth", *COMMAND, *change)
    assert error.flag == flag
    assert started == [] and not FOLDER.exists()


def test_a_flag_of_train_in_front_of_the_dashes_is_told_where_it_belongs() -> None:
    error = refusal_of("dreambooth", *COMMAND, "--max_duration", "2ba")
    assert error.what == "unknown flag before -- (behind it: FLAGS OF train.py ...)"


@pytest.mark.parametrize("dry_run", [(), ("--dry_run",)], ids=["started", "dry_run"])
def test_what_train_would_refuse_is_found_before_anything_is_drawn(
    started, capsys, dry_run
) -> None:
    command = ["dreambooth", *COMMAND, *dry_run]
    assert sdbench([*command, "--", "--on_bad_sample", "skip"]) == 2
    error = capsys.readouterr().err
    assert "train.py would refuse this training: a subject has too few pictures" in error
    Path("my-dog/003.png").write_bytes(b"no picture")
    assert sdbench(command) == 2
    error = capsys.readouterr().err
    assert "my-dog/003.png: the image cannot be decoded" in error
    assert error.endswith("change it with SUBJECT.\n")
    assert started == [] and {path.name for path in FOLDER.glob("*")} <= {LOCK_NAME}


def test_a_subject_without_pictures_and_a_class_without_a_name_are_refused() -> None:
    assert refusal_of("dreambooth", *SUBJECT, *SMALL).flag == "--class_prompt or --no_prior"
    Path("empty").mkdir()
    assert refusal_of("dreambooth", "empty", *COMMAND[1:]).flag == "SUBJECT"
