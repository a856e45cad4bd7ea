"""What a run goes on with has changed between two starts: data, frozen weights, prompts.

Nothing of it is taken silently: it is refused, and taken by a flag where it is legal.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import train
from sdbench.data.prepare import convert
from sdbench.engines import load_engine
from sdbench.record.store import load_record
from sdbench.tasks.encode import precompute
from tests.data.datasets import make_png, write_folder
from tests.forked import exit_codes, forked_ranks
from tests.refusals import refused
from tests.train.test_poison import losses
from tests.train.tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("launched")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """The tiny model in a folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture
def model(saved_model):
    """A copy of it, which may be changed."""
    return Path(shutil.copytree(saved_model, "model"))


def change_weights(model, part):
    """Let a file of weights have other values, at its size and time."""
    path = next((model / part).glob("*.safetensors"))
    times = path.stat()
    weights = load_file(path)
    first = next(iter(weights))
    weights[first] = weights[first] + 1
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def run(num_steps, model, *argv):
    line = f"""--remote data --model_name {model} --engine torch --batch_size 4 --run_name run
        --resume auto --max_duration {num_steps}ba"""
    return train.main([*line.split(), *map(str, argv)])


def replace_picture():
    """One picture is another, under another name."""
    Path("data/010.png").rename("data/900.png")
    Path("data/010.txt").rename("data/900.txt")
    Path("data/900.png").write_bytes(make_png(12))


def change_caption():
    """Of the same length."""
    Path("data/010.txt").write_text("PICTURE 10")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(replace_picture, "names or sizes", marks=pytest.mark.slow),
        (change_caption, "written again"),
        (None, "the vae"),
    ],
)
def test_a_run_does_not_go_on_with_something_else(model, change, told, capsys):
    write_folder(Path("data"))
    assert run(1, model) == 0
    if change is None:
        change_weights(model, "vae")
    else:
        change()
    assert run(2, model) == 2
    assert told in capsys.readouterr().err
    assert load_record(Path("runs/run"))["status"] == "ok"  # that of the first process
    assert run(2, model, "--changed_inputs", "accept") == 0
    assert told in capsys.readouterr().out
    assert run(2, model) == 0  # with what it has accepted


@pytest.mark.slow
def test_weights_that_the_checkpoint_has_may_change(model):
    write_folder(Path("data"))
    assert run(1, model) == 0
    change_weights(model, "unet")
    assert run(2, model) == 0


@pytest.mark.slow
def test_the_weights_beside_lora_may_not(model, capsys):
    write_folder(Path("data"))
    assert run(1, model, "--lora_rank", 2) == 0
    change_weights(model, "unet")
    assert run(2, model, "--lora_rank", 2) == 2
    assert "the unet" in capsys.readouterr().err


@pytest.mark.slow
def test_copies_that_keep_their_times_are_the_same_data(model):
    write_folder(Path("data"))
    assert run(1, model) == 0
    shutil.copytree("data", "copy", copy_function=shutil.copy2)
    assert run(2, model, "--remote", "copy") == 0


def test_another_picture_or_prompt_of_a_subject_is_another_run(model, capsys):
    write_folder(Path("data"))
    for path in sorted(Path("data").glob("*.png"))[6:]:
        path.unlink()
    for path in Path("data").glob("*.txt"):
        path.unlink()
    subject = ("--task", "dreambooth", "--instance_prompt", "a photo of unqtkn dog")
    assert run(1, model, *subject) == 0
    assert run(1, model, *subject) == 0  # nothing is left
    assert run(2, model, *subject[:-1], "a photo of unqtkn cat") == 2
    Path("data/seventh.png").write_bytes(make_png(40))
    assert run(1, model, *subject) == 2
    assert "7 files" in capsys.readouterr().err


def test_a_conversion_does_not_go_on_with_other_samples():
    write_folder(Path("data"))
    line = ["data", "--folder", "mds", "--samples_per_shard", "10"]
    Path("data/045.png").write_bytes(b"no picture")
    with pytest.raises(Exception, match="045"):
        convert.main(line)
    Path("data/045.png").write_bytes(make_png(45))
    with refused("--changed_inputs"):
        convert.main(line)
    Path("data/045.png").unlink()
    Path("data/045.txt").unlink()
    Path("data/000a.png").write_bytes(make_png(3))
    Path("data/000a.txt").write_text("new")
    with refused("--folder"):
        convert.main([*line, "--changed_inputs", "accept"])


def test_a_conversion_goes_on_with_a_repaired_picture_where_that_is_accepted(capsys):
    write_folder(Path("data"))
    line = ["data", "--folder", "mds", "--samples_per_shard", "10"]
    Path("data/045.png").write_bytes(b"no picture")
    with pytest.raises(Exception, match="045"):
        convert.main(line)
    Path("data/045.png").write_bytes(make_png(45))
    capsys.readouterr()
    assert convert.main([*line, "--changed_inputs", "accept"]) == 0
    told = capsys.readouterr().out
    assert "the data set has" in told
    assert "resuming: 4 of" in told


def test_a_data_set_has_latents_of_one_vae(model, capsys):
    write_folder(Path("data"))
    line = ["--folder", "latents", "--remote", "data", "--model_name", str(model)]
    line += ["--device_batch_size", "2", "--samples_per_shard", "10", "--num_workers", "0"]
    Path("data/045.png").write_bytes(b"no picture")
    assert precompute.main(line) == 1
    change_weights(model, "vae")
    capsys.readouterr()
    assert precompute.main(line) == 2
    assert "--folder" in capsys.readouterr().err


@pytest.mark.slow
def test_random_kills_with_a_change_between_are_refused_or_exact(model, tmp_path):
    """Twenty kills, two of each run; before every other last start something has changed."""
    load_engine("torch")
    write_folder(Path("data"))
    argv = ("--save_every_batches", 2, "--log_every_batches", 1)
    assert run(12, model, *argv, "--run_name", "whole") == 0
    expected = losses("whole")
    chance = random.Random(20)
    kept = shutil.copytree("data", "kept-data", copy_function=shutil.copy2)
    kept_model = shutil.copytree("model", "kept-model", copy_function=shutil.copy2)
    changes = itertools.cycle([replace_picture, change_caption, "vae", "text_encoder"])
    num_refused = 0
    for number in range(10):
        shutil.rmtree("runs/run", ignore_errors=True)
        for _ in range(2):
            step = chance.randrange(3, 11)

            def program(step=step):
                from sdbench.tasks.train.hooks import TrainHooks

                step_ended = TrainHooks.step_ended

                def die(hooks, state):
                    step_ended(hooks, state)
                    if state.num_steps >= step:
                        os.kill(os.getpid(), signal.SIGKILL)

                TrainHooks.step_ended = die
                return run(12, model, *argv)

            with forked_ranks(program, tmp_path, num_ranks=1) as ranks:
                assert exit_codes(ranks) == [-signal.SIGKILL]
        if number % 2:
            change = next(changes)
            change() if callable(change) else change_weights(model, change)
            assert run(12, model, *argv) == 2
            num_refused += 1
            for place, copy in (("data", kept), ("model", kept_model)):
                shutil.rmtree(place)
                shutil.copytree(copy, place, copy_function=shutil.copy2)
        assert run(12, model, *argv) == 0
        assert losses() == expected
    assert num_refused == 5
