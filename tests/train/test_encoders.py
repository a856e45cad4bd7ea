"""The frozen VAE and text encoder of a run: where an export has them from, and what a run says."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch

import train
from sdbench.cli import main as sdbench
from sdbench.record.store import load_record
from tests.refusals import printed_refusal, refusal_of
from tests.train.written import weights_of

SHORT = ("--use_synth_data", "--engine", "torch", "--batch_size", "2", "--max_duration", "1ba")
UNET = ("--model_parts", "{unet: {pretrained: tiny}}")
LATENTS = ("--latents", "precomputed")


def run(results: Path | str, name: str, *argv: object) -> Path:
    """Train one step in this process, and return the folder of the run."""
    line = [*SHORT, "--results_dir", str(results), "--run_name", name, *map(str, argv)]
    assert train.main(line) == 0
    return Path(results, name)


def export(folder: Path, *argv: object) -> Path:
    assert sdbench(["export", str(folder), *map(str, argv)]) == 0
    return folder / "model"


def has_same(part: str, one: Path, other: Path) -> bool:
    """Whether two folders have the same weights of a part."""
    ours, others = weights_of(one, part), weights_of(other, part)
    assert ours.keys() == others.keys()
    return all(torch.equal(ours[name], others[name]) for name in ours)


def random_parts_in_notes(folder: Path) -> set[str]:
    """The parts that the plan calls random."""
    notes = " ".join(note for note in load_record(folder)["notes"] if "random" in note)
    return {part for part in ("unet", "vae", "text_encoder") if part in notes}


@pytest.fixture(scope="module")
def online(tmp_path_factory) -> Path:
    """A run with frozen encoders from a seed of its own, exported."""
    folder = run(tmp_path_factory.mktemp("runs"), "one", "--model_name=tiny", "--weights_seed=5")
    export(folder)
    return folder


@pytest.mark.slow
def test_a_run_says_which_parts_stay_random(online, tmp_path):
    assert random_parts_in_notes(online) == {"vae", "text_encoder"}
    vae = run(tmp_path, "vae", "--model_name", "tiny", "--train", "vae")
    assert random_parts_in_notes(vae) == set()
    begun = run(tmp_path, "begun", "--model_name", "tiny", "--init_from", vae)
    assert random_parts_in_notes(begun) == {"text_encoder"}
    loaded = run(tmp_path, "loaded", "--model_name", online / "model", *UNET)
    assert random_parts_in_notes(loaded) == set()


@pytest.mark.slow
def test_latents_of_encoders_that_are_not_known_are_exported_with_those_that_made_them(
    online, tmp_path
):
    folder = run(tmp_path, "latents", "--model_name", "tiny", *LATENTS)
    assert random_parts_in_notes(folder) == {"vae", "text_encoder"}
    for argv, value in (((), None), (("--encoders", "tiny"), "tiny")):
        refusal = refusal_of("export", folder, *argv)
        assert (refusal.flag, refusal.value) == ("--encoders", value)
    assert not (folder / "model").exists()
    model = export(folder, "--encoders", online / "model")
    assert has_same("vae", model, online / "model")
    assert has_same("text_encoder", model, online / "model")
    assert not has_same("unet", model, online / "model")

    named = run(tmp_path, "named", "--model_name", online / "model", *UNET, *LATENTS)
    assert random_parts_in_notes(named) == set()
    assert has_same("vae", export(named), online / "model")


def test_a_run_with_encoders_takes_no_others(online):
    refusal = refusal_of("export", online, "--encoders", online / "model")
    assert (refusal.flag, refusal.value) == ("--encoders", str(online / "model"))


@pytest.mark.slow
def test_a_model_that_changes_on_the_hub_is_another_one(online, tmp_path, monkeypatch, capsys):
    commits = {"main": "a" * 40, "a" * 40: "a" * 40}
    snapshot = shutil.copytree(online / "model", tmp_path / commits["main"])
    shutil.copytree(snapshot, tmp_path / ("b" * 40))

    def download(name, *, revision, allow_patterns):
        return str(tmp_path / commits[revision or "main"])

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", Mock())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    argv = ("--model_name", "someone/mine", "--resume", "auto")
    folder = run(tmp_path, "hub", *argv)
    commits["main"] = "b" * 40
    capsys.readouterr()
    line = [*SHORT, *argv, "--results_dir", str(tmp_path), "--run_name", "hub"]
    assert train.main([*line, "--max_duration", "2ba"]) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == ("--model_revision", "b" * 40)
    run(tmp_path, "hub", *argv, "--max_duration", "2ba", "--model_revision", "a" * 40)
    shutil.rmtree(tmp_path / ("b" * 40))
    assert has_same("vae", export(folder), online / "model")  # of the commit that is there
