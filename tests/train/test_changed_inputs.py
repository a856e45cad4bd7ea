"""What a run goes on with has changed between two starts: data, frozen weights, prompts.

Nothing of it is taken silently: it is refused, and taken by a flag where it is legal.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import train
from sdbench.data.prepare import convert
from sdbench.record.store import load_record
from sdbench.state.checkpoint import write_description
from sdbench.tasks.encode import precompute
from tests.data.datasets import make_png, write_folder
from tests.refusals import refused
from tests.train.tiny_model import write_tiny_model


@pytest.fixture
def model():
    """The tiny model in a folder."""
    write_tiny_model(Path("model"))
    return Path("model")


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


def rename_picture(model):
    Path("data/010.png").rename("data/900.png")
    Path("data/010.txt").rename("data/900.txt")


def change_caption(model):
    """Of the same length."""
    Path("data/010.txt").write_text("PICTURE 10")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            rename_picture,
            "2 files were added: 900.png, 900.txt, 2 files were taken away: 010.png, 010",
        ),
        (change_caption, "1 file was written again: 010.txt"),
        (lambda model: change_weights(model, "vae"), "the vae"),
    ],
)
def test_a_run_does_not_go_on_with_something_else(model, change, told, capsys):
    write_folder(Path("data"))
    assert run(1, model) == 0
    change(model)
    assert run(2, model) == 2
    assert told in capsys.readouterr().err
    assert load_record(Path("runs/run"))["status"] == "ok"  # that of the first process
    assert run(2, model, "--changed_inputs", "accept") == 0
    assert told in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lr", "a_setting_that_is_gone"])
def test_a_checkpoint_with_other_settings_than_this_version_is_refused(name, capsys):
    write_folder(Path("data"))
    assert run(1, "tiny") == 0
    (note,) = Path("runs/run").rglob("checkpoint.json")
    content = json.loads(note.read_text())
    config = content["facts"]["config"]
    if name in config:
        del config[name]
    else:
        config[name] = 1
    kept = {part: content[part] for part in ("step", "facts", "files")}
    write_description(note.parent, **kept)
    assert run(2, "tiny") == 2
    told = capsys.readouterr().err
    assert f"was saved by a version of the suite with other settings: got '{name}'" in told


@pytest.mark.slow
def test_what_it_has_accepted_or_saved_or_copied_may_differ(model):
    write_folder(Path("data"))
    assert run(1, model) == 0
    change_caption(model)
    assert run(2, model, "--changed_inputs", "accept") == 0
    shutil.copytree("data", "copy", copy_function=shutil.copy2)
    change_weights(model, "unet")
    assert run(3, model, "--remote", "copy") == 0


@pytest.mark.slow
def test_the_weights_beside_lora_may_not(model, capsys):
    write_folder(Path("data"))
    assert run(1, model, "--lora_rank", 2) == 0
    change_weights(model, "unet")
    assert run(2, model, "--lora_rank", 2) == 2
    assert "the unet" in capsys.readouterr().err


@pytest.mark.slow
def test_another_picture_or_prompt_of_a_subject_is_another_run(model, capsys):
    write_folder(Path("data"), num_samples=6, has_captions=False)
    subject = ("--task", "dreambooth", "--instance_prompt", "a photo of unqtkn dog")
    assert run(1, model, *subject) == 0
    assert run(1, model, *subject) == 0  # nothing is left
    assert run(2, model, *subject[:-1], "a photo of unqtkn cat") == 2
    Path("data/seventh.png").write_bytes(make_png(40))
    assert run(1, model, *subject) == 2
    assert "1 file was added: seventh.png" in capsys.readouterr().err


def test_a_conversion_goes_on_with_a_repaired_picture_only_where_that_is_accepted(capsys):
    write_folder(Path("data"))
    line = ["data", "--folder", "mds", "--samples_per_shard", "10"]
    Path("data/045.png").write_bytes(b"no picture")
    with pytest.raises(Exception, match="045"):
        convert.main(line)
    Path("data/045.png").write_bytes(make_png(45))
    with refused("--changed_inputs"):
        convert.main(line)
    # Other samples are another job.
    Path("data/000a.png").write_bytes(make_png(3))
    Path("data/000a.txt").write_text("new")
    with refused("--folder"):
        convert.main([*line, "--changed_inputs", "accept"])
    for name in ("000a.png", "000a.txt"):
        Path("data", name).unlink()
    capsys.readouterr()
    assert convert.main([*line, "--changed_inputs", "accept"]) == 0
    told = capsys.readouterr().out
    assert "1 file was written again: 045.png" in told and "resuming: 4 of" in told


@pytest.mark.slow
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
