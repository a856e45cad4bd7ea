"""What a run goes on with has changed between two starts: data, frozen weights, prompts.

Nothing of it is taken silently: it is refused, and taken by a flag where it is legal.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import train
from sdbench.cli import main as sdbench
from sdbench.data.convert import convert
from sdbench.data.places import listing
from sdbench.encoding import precompute
from sdbench.record.store import load_record
from sdbench.state.checkpoint_files import write_description
from tests.data.datasets import flip_a_bit, make_png, write_folder, write_tar
from tests.opened import opened_below
from tests.refusals import printed_refusal, refused
from tests.score_networks import OnRequest, write_clip, write_fid_network
from tests.train.smallest_model import write_model


@pytest.fixture
def model():
    """The model in a folder."""
    write_model(Path("model"))
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


def predict_velocity(model):
    """As another model of the same name has it."""
    path = model / "scheduler" / "scheduler_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "prediction_type": "v_prediction"}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            rename_picture,
            "2 files were added: 900.png, 900.txt, 2 files were taken away: 010.png, 010",
        ),
        (change_caption, "1 file was written again: 010.txt"),
        (
            lambda model: change_weights(model, "vae"),
            "model: 1 file was written again: vae/diffusion_pytorch_model.safetensors (",
        ),
        (
            predict_velocity,
            "scheduler_config.json (prediction_type epsilon before, v_prediction now)",
        ),
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
    assert run(1, "nano") == 0
    (note,) = Path("runs/run").rglob("checkpoint.json")
    content = json.loads(note.read_text())
    config = content["facts"]["config"]
    if name in config:
        del config[name]
    else:
        config[name] = 1
    kept = {part: content[part] for part in ("step", "facts", "files")}
    write_description(note.parent, **kept)
    assert run(2, "nano") == 2
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
    assert "again: unet/diffusion_pytorch_model.safetensors (" in capsys.readouterr().err


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
@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("vae", "model: 1 file was written again: vae/diffusion_pytorch_model.safetensors ("),
        ("tokenizer", "model: 1 file was written again: tokenizer/tokenizer_config.json ("),
    ],
)
def test_a_data_set_has_latents_of_one_model(model, part, told, capsys):
    write_folder(Path("data"))
    line = ["--folder", "latents", "--remote", "data", "--model_name", str(model)]
    line += ["--device_batch_size", "2", "--samples_per_shard", "10", "--num_workers", "0"]
    Path("data/045.png").write_bytes(b"no picture")
    assert precompute.main(line) == 1
    if part == "vae":
        change_weights(model, part)
    else:
        change(model / part / "tokenizer_config.json")
    capsys.readouterr()
    for accept in ((), ("--changed_inputs", "accept")):  # which is for pictures alone
        assert precompute.main([*line, *accept]) == 2
        error = capsys.readouterr().err
        assert told in error and "--folder" in error


# What messages call the files at a place.
NAMES = {
    "data": ("data", "what belongs to the data"),
    "classes.json": ("what belongs to the data", "what belongs to the held-out samples"),
    "held-out": ("held-out samples",),
    "class": ("class pictures",),
    "model": ("model",),
    "fid.pt": ("--fid_network",),
    "clip": ("--clip_network",),
    "prompts.txt": ("--sample_prompts",),
}
# Files that a run opens although they decide nothing in it when it is resumed.
DECIDE_NOTHING = {
    "model/unet/diffusion_pytorch_model.safetensors": "the checkpoint has the trained weights",
    "data/.picture_sizes.npz": "each is compared with that of the decoded picture",
    "data/.made_by.json": "the record quotes it; of latents it is compared (tests/data)",
}
OF_LATENTS = {
    "model/vae/diffusion_pytorch_model.safetensors": "compared with the VAE that made the latents",
    "model/text_encoder/model.safetensors": "its header is checked, and nothing is loaded",
}


def change(path: Path) -> None:
    """Change what a file says, or its time, so that it can be read as before."""
    if path.name in ("prompts.txt", "merges.txt", "tokenizer.json"):
        path.write_text(path.read_text() + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps({**json.loads(path.read_text()), "999": "changed"}))
    elif path.suffix == ".safetensors":
        flip_a_bit(path, position=-1)
    elif path.suffix == ".pt":
        write_fid_network(path, OnRequest())
    elif path.suffix == ".npz":
        stored = dict(np.load(path))
        numbers = {name for name, values in stored.items() if values.dtype.kind != "U"}
        np.savez(path, **stored | {name: stored[name] + 1 for name in numbers})
    else:
        os.utime(path)  # as it is when a file was copied into its place


def write_classes(folder, indices) -> None:
    """Pictures in a tar, each with the number of its class."""
    members = [
        (f"{index}.{kind}", content)
        for index in indices
        for kind, content in (("png", make_png(index)), ("cls", b"%d" % (index % 2)))
    ]
    write_tar(folder / "0.tar", members)


def prepare_pictures(inputs) -> str:
    """Tars whose captions are in a file, held-out ones, and whatever evaluations read."""
    write_classes(inputs / "data", range(8))
    write_classes(inputs / "held-out", range(8, 12))
    (inputs / "classes.json").write_text(json.dumps({"0": "a circle", "1": "a square"}))
    (inputs / "prompts.txt").write_text("a red circle\n")
    write_fid_network(inputs / "fid.pt")
    write_clip(inputs / "clip")
    return f"""--class_prompts {inputs}/classes.json --validation_remote {inputs}/held-out
        --validate_every_batches 1 --num_validation_images 2 --score_every_batches 1
        --num_score_images 2 --sample_steps 1 --fid_network {inputs}/fid.pt
        --clip_network {inputs}/clip --sample_every_batches 1
        --sample_prompts {inputs}/prompts.txt"""


def prepare_latents(inputs) -> str:
    """Latents in shards whose index has no hash that is checked, and an encoded empty caption."""
    write_folder(Path("pictures"), num_samples=8)
    line = f"""--remote pictures --model_name {inputs}/model --folder {inputs}/data --image_size 64
        --samples_per_shard 4 --num_workers 0"""
    assert precompute.main(line.split()) == 0
    return "--latents precomputed --validate_hash none --caption_drop_probability 0.5"


def prepare_buckets(inputs) -> str:
    """Rows of parquet, with the sizes of the pictures beside them."""
    write_folder(Path("pictures"), num_samples=8)
    line = f"pictures --folder {inputs}/data --out_format parquet"
    assert convert.main(line.split()) == 0
    return "--buckets --small_pictures enlarge"


def prepare_subject(inputs) -> str:
    """Pictures of a subject and of its class."""
    write_folder(inputs / "data", num_samples=4, has_captions=False)
    write_folder(inputs / "class", num_samples=4, has_captions=False)
    return f"""--task dreambooth --instance_prompt dog --class_remote {inputs}/class
        --class_prompt animal --lora_rank 2"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "prepare", [prepare_pictures, prepare_latents, prepare_buckets, prepare_subject]
)
def test_each_file_that_a_run_opens_is_named_if_it_changes_before_the_resume(
    tmp_path, prepare, monkeypatch, capsys
):
    inputs = tmp_path / "inputs"
    write_model(inputs / "model")
    line = f"""--remote {inputs}/data --model_name {inputs}/model --engine torch --batch_size 4
        --run_name run --resume auto {prepare(inputs)} --max_duration"""
    with opened_below(inputs) as opened:
        assert train.main([*line.split(), "1ba"]) == 0
    argv = [*line.split(), "2ba", "--dry_run"]
    assert train.main(argv) == 0
    assert {"model/scheduler/scheduler_config.json", "model/model_index.json"} < opened
    decide_nothing = {} if prepare is prepare_subject else {**DECIDE_NOTHING}  # it has LoRA
    if prepare is prepare_latents:
        decide_nothing |= OF_LATENTS
    deciding = opened - decide_nothing.keys()
    for name in deciding:
        change(inputs / name)
    monkeypatch.setattr(listing, "NUM_NAMES_TOLD", 1000)
    capsys.readouterr()
    assert train.main(argv) == 2
    error = printed_refusal(capsys.readouterr().err)
    assert error.flag == "--changed_inputs"
    told = dict(one.split(": ", 1) for one in error.what.split("other inputs: ")[1].split("; "))
    unseen = set()
    for name in deciding:
        place, _, inner = name.partition("/")
        shown = "--class_prompts" if place == "classes.json" else inner or place
        sentences = " ".join(told.get(group, "") for group in NAMES[place])
        if f" {shown} (" not in sentences:
            unseen.add(name)
    assert unseen == set()


@pytest.mark.slow
def test_a_loss_on_other_held_out_samples_reaches_no_target(tmp_path, capsys):
    """Losses of before count again once the samples are those of before."""
    write_folder(Path("data"), num_samples=8)
    write_folder(Path("held-out"), num_samples=4)
    look = ("--validation_remote", "held-out", "--validate_every_batches", 1, "--target_loss", 1000)
    assert run(1, "nano", *look) == 0
    before = Path("held-out/002.txt").stat()
    Path("held-out/002.txt").write_text("a word")
    assert run(1, "nano", *look) == 2
    assert "held-out samples: 1 file was written again: 002.txt (" in capsys.readouterr().err
    accept = ("--changed_inputs", "accept")
    assert run(1, "nano", *look, *accept) == 0
    assert load_record(Path("runs/run"))["summary"]["samples_to_target"] is None
    assert run(1, "nano", *look, *accept, "--num_validation_images", 2) == 0
    assert load_record(Path("runs/run"))["summary"]["samples_to_target"] is None
    Path("held-out/002.txt").write_text("picture 2")
    os.utime("held-out/002.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run(1, "nano", *look) == 0
    assert load_record(Path("runs/run"))["summary"]["samples_to_target"] == 4


@pytest.mark.slow
def test_a_run_is_not_exported_with_another_scheduler_or_vae(model, capsys):
    write_folder(Path("data"), num_samples=8)
    assert run(1, model) == 0
    predict_velocity(model)
    assert sdbench(["export", "runs/run"]) == 2
    told = capsys.readouterr().err
    assert "prediction_type epsilon before, v_prediction now" in told and "--changed_inputs" in told
    assert not Path("runs/run/model").exists()
    assert sdbench(["export", "runs/run", "--changed_inputs", "accept"]) == 0
