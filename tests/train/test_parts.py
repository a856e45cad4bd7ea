"""train.py for the VAE and the text encoder, runs that begin with another's, frozen encoders."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest

from sdbench.cli import main as sdbench
from sdbench.models import memory, replay
from sdbench.record.store import load_record
from sdbench.state.checkpoint_files import Checkpoint
from tests.data.datasets import write_folder
from tests.refusals import printed_refusal, refusal_of
from tests.state.states import flip_byte
from tests.train.written import exported, has_same, read_events, read_tensors, trained

SHORT = ("--use_synth_data", "--engine", "torch", "--batch_size", "2", "--log_every_batches", "1")
FP32 = ("--precision", "fp32", "--encoder_dtype", "fp32")
MINI = ("--model_name", "mini", *SHORT, *FP32)
TINY = ("--model_name", "nano", *SHORT)
VAE, TEXT = ("--train", "vae"), ("--train_text_encoder",)
UNET = ("--model_parts", "{unet: {pretrained: nano}}")
LATENTS = ("--latents", "precomputed")


@pytest.fixture(scope="module")
def online(tmp_path_factory) -> Path:
    """A run with frozen encoders from a seed of its own, exported."""
    folder = trained("one", 1, *TINY, "--weights_seed=5", results=tmp_path_factory.mktemp("runs"))
    exported(folder)
    return folder


LORA = ("--lora_rank", "4")
FAMILIES = [("--model_name", f"tiny-{family}") for family in ("sdxl", "sd3", "flux")]


@pytest.mark.slow
@pytest.mark.parametrize("part", [VAE, (*TEXT, *LORA), *FAMILIES], ids=str)
def test_the_memory_estimate_is_of_what_is_kept(part, monkeypatch):
    monkeypatch.setattr(memory, "profile_step", replay.profile_step)
    folder = trained("one", 1, *MINI, *part, "--use_ema")
    saved = Checkpoint.open(folder / "checkpoints" / "step_00000001").tensors()
    estimate_gib = load_record(folder)["memory_estimate_gib"]
    for name, prefixes in (
        ("trained_weights", ("model.",)),
        ("optimizer_state", ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")),
        ("ema", ("ema.",)),
    ):
        num_bytes = sum(one.nbytes for key, one in saved.items() if key.startswith(prefixes))
        assert estimate_gib[name] * 2**30 == pytest.approx(num_bytes)


COPIES = ("--precision", "bf16", "--master_weights", "fp32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "weights", "argv"),
    [
        ("torch", "fp32", COPIES),
        ("composer", "model", ("--lora_rank", "2")),
    ],
)
def test_the_text_encoder_learns_at_its_own_rate_also_after_a_resume(engine, weights, argv):
    argv = (*TINY, *FP32, *TEXT, "--weight_decay", "0", *argv, "--engine", engine)
    argv += ("--lr", "1e-3", "--text_encoder_lr", "1e-5", "--resume", "auto")
    trained("run", 1, *argv)
    folder = trained("run", 2, *argv)
    first, second = (
        read_tensors(Checkpoint.open(folder / f"checkpoints/step_0000000{step}")) for step in (1, 2)
    )
    for part, rate in (("unet", 1e-3), ("text_encoder", 1e-5)):
        moved, expected = 0.0, 0.0  # by the formula of Adam, from its own moments
        for name in (key.removeprefix("model.") for key in first if key.startswith("model.")):
            if name.startswith(f"{part}."):
                mean = second[f"optimizer.exp_avg.{name}"] / (1 - 0.9**2)
                square = second[f"optimizer.exp_avg_sq.{name}"] / (1 - 0.999**2)
                key = f"{weights}.{name}"
                moved += (first[key] - second[key]).double().square().sum()
                expected += (rate * mean / (square.sqrt() + 1e-8)).double().square().sum()
        assert expected > 0 and moved.sqrt() == pytest.approx(float(expected.sqrt()), rel=1e-3)


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another_and_keeps_them(capsys):
    first = trained("vae", 1, *MINI, *VAE, "--lr", "0.01", "--use_ema")
    model = Path(shutil.copytree(exported(first), "model"))
    assert not has_same("vae", model, exported(trained("plain", 1, *MINI)))
    argv = (*MINI, "--init_from", first, "--resume", "auto", *TEXT)
    capsys.readouterr()
    second = trained("second", 1, *argv, "--encoder_dtype", "bf16")
    assert "vae (" in capsys.readouterr().out
    assert has_same("vae", exported(second), model)  # nothing was rounded to bf16
    shutil.rmtree(first)
    second = trained("second", 2, *argv)  # the checkpoint has all of it
    assert has_same("vae", exported(second), model)
    begun = ("--init_from", second / "checkpoints" / "step_00000002", "--lr", "1e-9")
    third = trained("third", 1, *MINI, *begun)
    assert has_same("text_encoder", exported(third), second / "model")


@pytest.mark.slow
def test_the_reconstruction_is_validated(tmp_path):
    write_folder(tmp_path / "held-out")
    look = ("--validate_every_batches", 2, "--validation_remote", tmp_path / "held-out")
    folder = trained("vae", 4, *TINY, *VAE, *look, "--num_validation_images", 5)
    found = read_events(folder, "validation")
    assert [event["num_samples"] for event in found] == [5, 5]
    assert found[0]["loss"] != found[1]["loss"] and all(event["loss"] > 0 for event in found)
    assert sdbench(["report", str(folder)]) == 0
    assert f"{found[1]['loss']:.4f} at step 4" in (folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv", [MINI, (*TINY, *VAE), None], ids=["another size", "another part", "no checkpoint"]
)
def test_weights_that_cannot_be_taken_are_refused_before_there_is_a_folder(online, argv, capsys):
    source = online if argv else Path("nowhere")
    second = trained("second", 1, *(argv or TINY), "--init_from", source, code=2)
    refusal = printed_refusal(capsys.readouterr().err)
    value = source / "checkpoints" / "step_00000001" if argv else source
    assert (refusal.flag, refusal.value) == ("--init_from", str(value))
    assert not second.exists()


def random_parts_in_notes(folder: Path) -> set[str]:
    """The parts that the plan calls random."""
    notes = " ".join(note for note in load_record(folder)["notes"] if "random" in note)
    return {part for part in ("unet", "vae", "text_encoder") if part in notes}


@pytest.mark.slow
def test_a_run_says_which_parts_stay_random(online):
    assert random_parts_in_notes(online) == {"vae", "text_encoder"}
    vae = trained("vae", 1, *TINY, *VAE)
    assert random_parts_in_notes(vae) == set()
    begun = trained("begun", 1, *TINY, "--init_from", vae)
    assert random_parts_in_notes(begun) == {"text_encoder"}


@pytest.mark.slow
def test_latents_of_encoders_that_are_not_known_are_exported_with_those_that_made_them(online):
    folder = trained("latents", 1, *TINY, *LATENTS)
    assert random_parts_in_notes(folder) == {"vae", "text_encoder"}
    for argv, value in (((), None), (("--encoders", "nano"), "nano")):
        refusal = refusal_of("export", folder, *argv)
        assert (refusal.flag, refusal.value) == ("--encoders", value)
    assert not (folder / "model").exists()
    model = exported(folder, "--encoders", online / "model")
    for part in ("unet", "vae", "text_encoder"):
        assert has_same(part, model, online / "model") == (part != "unet")

    named = trained("named", 1, "--model_name", online / "model", *SHORT, *UNET, *LATENTS)
    assert random_parts_in_notes(named) == set()
    assert has_same("vae", exported(named), online / "model")


@pytest.mark.slow
def test_a_run_with_encoders_takes_no_others(online):
    refusal = refusal_of("export", online, "--encoders", online / "model")
    assert (refusal.flag, refusal.value) == ("--encoders", str(online / "model"))


@pytest.mark.slow
def test_an_export_has_a_sampler_for_its_kind_of_model(online):
    refusal = refusal_of("export", online, "--scheduler", "flow_euler", "--folder", "other")
    assert (refusal.flag, refusal.value) == ("--scheduler", "flow_euler")
    assert refusal.allowed == "ddim | pndm | euler | dpm"
    assert not Path("other").exists()


@pytest.mark.slow
def test_the_export_of_a_damaged_run_names_the_file_and_an_older_checkpoint(capsys):
    folder = trained("damaged", 2, *TINY, "--save_every_batches", 1)
    first, second = sorted((folder / "checkpoints").glob("step_*"))
    file = second / "__0_0.distcp"
    flip_byte(file)
    damage = "A file of the checkpoint is damaged: its checksum is not the one that was saved"
    told = f"\nIts model for diffusers: python -m sdbench export {folder}\n"
    assert told in capsys.readouterr().out
    exported(folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"A checkpoint is passed over. {damage} ({file})"
    assert f"The model of step 1 is in {folder / 'model'}." in lines
    assert lines[-1] == (
        f"Draw with it: python -m sdbench generate --model_name {folder / 'model'} "
        "--prompts 'a red circle|a blue square' --folder pictures"
    )
    refusal = refusal_of("export", second, "--folder", "other")
    assert (refusal.what, refusal.value, refusal.flag) == (damage, str(file), "RUN")
    allowed = f"a whole checkpoint: the next older one is {first.resolve()}"
    assert refusal.allowed == allowed
    (second / "checkpoint.json").unlink()
    assert refusal_of("export", second, "--folder", "other").allowed == allowed
    flip_byte(first / file.name)
    refusal = refusal_of("export", second, "--folder", "other")
    assert refusal.allowed == "a whole checkpoint; the run has no older one that is whole"
    assert refusal_of("export", folder, "--folder", "other").flag == "RUN"
    assert not Path("other").exists()


@pytest.mark.slow
def test_a_model_that_changes_on_the_hub_is_another_one(online, tmp_path, monkeypatch, capsys):
    commits = {"main": "a" * 40, "a" * 40: "a" * 40}
    snapshot = shutil.copytree(online / "model", tmp_path / commits["main"])
    shutil.copytree(snapshot, tmp_path / ("b" * 40))

    def download(name, *, revision, allow_patterns):
        return str(tmp_path / commits[revision or "main"])

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", Mock())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    argv = ("--model_name", "someone/mine", *SHORT, "--resume", "auto")
    folder = trained("hub", 1, *argv)
    commits["main"] = "b" * 40
    capsys.readouterr()
    trained("hub", 2, *argv, code=2)
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == ("--model_revision", "b" * 40)
    trained("hub", 2, *argv, "--model_revision", "a" * 40)
    shutil.rmtree(tmp_path / ("b" * 40))
    assert has_same("vae", exported(folder), online / "model")  # of the commit that is there
