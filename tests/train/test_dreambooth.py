"""The task dreambooth in train.py and benchmark.py: its loss, what it changes, what it keeps."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from torch._subclasses import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import CLIPTextModel, CLIPTokenizer

import benchmark
import generate
import train
from sdbench.record.row import make_row
from sdbench.record.store import load_record
from sdbench.settings.setting import SAME_FP32
from tests.refusals import printed_refusal, refusal_of
from tests.runs import only_record
from tests.train.in_turn import train_in_turn
from tests.train.smallest_model import write_model
from tests.train.written import exported, has_same, read_losses, trained, weights_of

SEED = 17
PROMPTS = {"subject": "a photo of unqtkn dog", "class": "a photo of a dog"}
FP32 = ("--engine", "torch", "--precision", "fp32", "--encoder_dtype", "fp32")
SUBJECT = ("--remote", "subject", "--instance_prompt", PROMPTS["subject"])
CLASS = ("--class_remote", "class", "--class_prompt", PROMPTS["class"])
HELD_OUT = ("--validate_every_batches", "1", "--validation_remote", "class")
TOKEN = ("--learned_token", "<dog>", "--initial_token", "dog")
DREAMBOOTH = ("--task", "dreambooth", *SUBJECT, *CLASS, *FP32, "--log_every_batches", "1")


def write_pictures(**counts: int) -> None:
    """Folders of square pictures, each half of one colour, in the working folder; made once."""
    for row, (name, count) in enumerate(counts.items()):
        Path(name).mkdir(exist_ok=True)
        for number in range(count):
            colour = (40 * number, 100 * row, 255 - 30 * number)
            if not Path(name, f"{number}.png").exists():
                picture = Image.new("RGB", (64, 64), colour)
                picture.paste((90, 90, 90), (0, 0, 32, 64))
                picture.save(f"{name}/{number}.png")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A miniature model in a folder, as diffusers has it."""
    folder = tmp_path_factory.mktemp("model") / "nano"
    write_model(folder)
    return folder


def run(name: str, num_steps: int, *argv: object) -> Path:
    """Train on the subject, and return the folder of the run."""
    return trained(name, num_steps, *DREAMBOOTH, *argv)


def loss_by_hand(
    model: Path, *, microbatch: int, prior_loss_weight: float, mirrored: bool, has_captions: bool
) -> float:
    """Of the first step on two pictures of the subject and two of its class, in turns.

    As train_dreambooth.py of diffusers has it, and Ray's train.py.
    """
    unet, vae, text_encoder = (
        kind.from_pretrained(model, subfolder=folder)
        for kind, folder in (
            (UNet2DConditionModel, "unet"),
            (AutoencoderKL, "vae"),
            (CLIPTextModel, "text_encoder"),
        )
    )
    scheduler = DDPMScheduler.from_pretrained(model, subfolder="scheduler")
    tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer")
    kinds = ["subject", "class"] * 2
    files = [f"{kind}/{position // 2}.png" for position, kind in enumerate(kinds)]
    pixels = np.stack([np.asarray(Image.open(file)) for file in files]) / 127.5 - 1.0
    if mirrored:
        pixels = pixels[:, :, ::-1].copy()
    captions = [PROMPTS[kind] if has_captions else "" for kind in kinds]
    ids = tokenizer(captions, padding="max_length", return_tensors="pt")
    with torch.no_grad():
        moments = vae.encode(torch.tensor(pixels).permute(0, 3, 1, 2).float()).latent_dist
        torch.manual_seed(SEED)
        drawn = []
        for part in moments.mean.split(microbatch):  # in the order in which the program draws
            of_latents = torch.randn(part.shape)
            timesteps = torch.randint(0, 1000, part.shape[:1])
            drawn.append((of_latents, timesteps, torch.randn(part.shape)))
        of_latents, timesteps, noise = map(torch.cat, zip(*drawn, strict=True))
        latents = (moments.mean + moments.std * of_latents) * vae.config.scaling_factor
        noised = scheduler.add_noise(latents, noise, timesteps)
        predicted = unet(noised, timesteps, text_encoder(ids.input_ids)[0]).sample
    of_subject, of_class = (
        torch.nn.functional.mse_loss(predicted[first::2], noise[first::2]) for first in (0, 1)
    )
    return float(of_subject + prior_loss_weight * of_class)


MIRRORED, NO_CAPTIONS = ("--horizontal_flip_probability", 1), ("--caption_drop_probability", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        (),
        (*MIRRORED, *NO_CAPTIONS),
        (*NO_CAPTIONS, "--train_text_encoder"),
        MIRRORED,
    ],
    ids=["plain", "both", "no_captions", "mirrored"],
)
def test_the_loss_is_that_of_the_subject_and_the_weighted_one_of_the_class(model, changed):
    microbatch = 3
    write_pictures(subject=2, **{"class": 2})
    argv = ("--model_name", model, "--batch_size", 4, "--no_shuffle", "--allow_uneven_batch")
    argv += ("--device_train_microbatch_size", microbatch, "--prior_loss_weight", 0.25)
    expected = loss_by_hand(
        model,
        microbatch=microbatch,
        prior_loss_weight=0.25,
        mirrored="--horizontal_flip_probability" in changed,
        has_captions="--caption_drop_probability" not in changed,
    )
    (loss,) = read_losses(run("one", 1, *argv, *changed))
    assert float(loss) == pytest.approx(expected, rel=SAME_FP32)


def loss_of_sdxl_by_hand(model: Path) -> float:
    """Of the first step on a picture of the subject and one of its class, 80 x 64 pixels each.

    As train_dreambooth_lora_sdxl.py of diffusers has it.
    """
    pipeline = StableDiffusionXLPipeline.from_pretrained(model)
    captions, files = [PROMPTS["subject"], PROMPTS["class"]], ["subject/0.png", "class/0.png"]
    pixels = np.stack([np.asarray(Image.open(file)) for file in files]) / 127.5 - 1.0
    squares = torch.tensor(pixels[:, :, 8:72]).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        states, _, pooled, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False)
        moments = pipeline.vae.encode(squares).latent_dist
        torch.manual_seed(SEED)
        of_latents = torch.randn(moments.mean.shape)
        timesteps = torch.randint(0, 1000, (2,))
        noise = torch.randn(moments.mean.shape)
        latents = moments.mean + moments.std * of_latents
        latents *= pipeline.vae.config.scaling_factor
        scheduler = DDPMScheduler.from_pretrained(model, subfolder="scheduler")
        sizes = torch.tensor([[64, 80, 0, 8, 64, 64]] * 2)
        predicted = pipeline.unet(
            scheduler.add_noise(latents, noise, timesteps),
            timesteps,
            states,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes},
        ).sample
    errors = torch.nn.functional.mse_loss(predicted, noise, reduction="none")
    return float(errors[0].mean() + 0.25 * errors[1].mean())


@pytest.mark.slow
def test_the_loss_of_sdxl_is_told_the_sizes_of_pictures(tmp_path):
    write_model(tmp_path / "sdxl", name="tiny-sdxl")
    for name, colour in (("subject", "orange"), ("class", "navy")):
        Path(name).mkdir()
        picture = Image.new("RGB", (80, 64), colour)
        picture.paste((90, 90, 90), (0, 0, 30, 40))
        picture.save(f"{name}/0.png")
    argv = ("--model_name", tmp_path / "sdxl", "--batch_size", 2, "--prior_loss_weight", 0.25)
    (loss,) = read_losses(run("one", 1, *argv))
    assert float(loss) == pytest.approx(loss_of_sdxl_by_hand(tmp_path / "sdxl"), rel=SAME_FP32)


def spy_on_job(monkeypatch, look):
    """Have a function look at the job before and after the training."""
    engine = importlib.import_module("sdbench.engines.torch")
    fit = engine.fit

    def spied(job, *args):
        look(job)
        measurements = fit(job, *args)
        look(job)
        return measurements

    monkeypatch.setattr(engine, "fit", spied)


@pytest.mark.slow
def test_gradients_of_all_trained_parts_are_clipped_to_one_norm(model):
    write_pictures(subject=2, **{"class": 2})
    norms, num_tensors = [], []

    def listen(optimizer, args, kwargs):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        num_tensors.append(len(gradients))
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    argv = ("--model_name", model, "--batch_size", 4, "--train_text_encoder")
    handle = register_optimizer_step_pre_hook(listen)
    try:
        run("clipped", 2, *argv, "--clip_norm", 0.01)
    finally:
        handle.remove()
    assert norms[-2:] == pytest.approx([0.01, 0.01], rel=1e-3)
    assert num_tensors[-1] == len(weights_of(model, "unet")) + len(
        weights_of(model, "text_encoder")
    )


@pytest.mark.slow
def test_encoders_leave_the_memory_unless_the_model_is_looked_at(model, monkeypatch):
    write_pictures(subject=2, **{"class": 2})
    there = []
    spy_on_job(
        monkeypatch,
        lambda job: there.append(
            [name for name, _ in job.model.named_children() if name != "objective"]
        ),
    )
    argv = ("--model_name", model, "--batch_size", 4)
    run("frozen", 1, *argv)
    run("trained", 1, *argv, "--train_text_encoder")
    Path("prompts.txt").write_text(PROMPTS["subject"])
    drawing = ("--sample_every_batches", 1, "--sample_prompts", "prompts.txt", "--sample_steps", 1)
    folder = run("looked_at", 1, *argv, *drawing)
    assert there[::2] == [["unet"], ["unet", "text_encoder"], ["unet", "vae", "text_encoder"]]
    assert len(list((folder / "samples").glob("*.png"))) == 1


@pytest.mark.slow
def test_pictures_are_encoded_once_and_ranks_share_them(model, monkeypatch):
    write_pictures(subject=3, **{"class": 4})
    encode, encoded = AutoencoderKL.encode, []

    def count(vae, images):
        # A step without numbers is counted, or replayed for the memory estimate.
        if images.device.type != "meta" and not isinstance(images, FakeTensor):
            encoded.append(len(images))
        return encode(vae, images)

    def keep_tables(job):
        (tables,) = job.prepare.args
        torch.save(tables, "tables{WORLD_SIZE}{RANK}.pt".format_map(os.environ))

    monkeypatch.setattr(AutoencoderKL, "encode", count)
    spy_on_job(monkeypatch, keep_tables)
    argv = ("--model_name", model, "--batch_size", 4, "--device_train_microbatch_size", 2)
    argv += ("--resume", "auto")
    run("alone", 2, *argv)
    assert sum(encoded) == 7
    for num_steps in (2, 3):
        line = ("--run_name", "two", "--max_duration", f"{num_steps}ba", *DREAMBOOTH, *argv)
        train_in_turn("torch", Path(), line)
    alone = torch.load("tables10.pt")
    for rank in range(2):
        together = torch.load(f"tables2{rank}.pt")
        assert all(torch.equal(table, together[name]) for name, table in alone.items())
    assert len(read_losses(Path("runs", "two"))) == 3


@pytest.mark.slow
def test_a_measurement_says_what_it_is_of(tmp_path):
    argv = ["--model_name", "nano", "--use_synth_data", "--task", "dreambooth", *FP32]
    argv += ["--train_text_encoder", "--no_measure_peak", "--profile_batches", "1"]
    argv += ["--warmup_batches", "0", "--measure_batches", "2", "--results_dir", "runs"]
    assert benchmark.main(argv) == 0
    record = only_record(Path("runs"))
    assert record["config"]["task"] == "dreambooth"
    # Two measured steps, one profiled, and one in which the attention kernels are looked at.
    assert (record["config"]["batch_size"], record["workload"]["num_images"]) == (4, 4 * 4)
    assert make_row(record)["latents"] == "subject"
    seconds = record["summary"]["breakdown"]["seconds"]
    assert seconds["vae_encode"] == 0 < seconds["text_encode"]


TINY = ("--model_name", "nano", "--max_duration", "1ba")
KNOWN_TOKEN = ("--remote", "subject", "--instance_prompt", "my <dog>, a dog")


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ((*SUBJECT, *CLASS, *HELD_OUT), "--validation_remote"),
        ((*SUBJECT, *CLASS, "--batch_size", "3"), "--batch_size"),
        (SUBJECT[:2], "--remote or --instance_prompt"),
        # Its class pictures would teach nothing: all that is trained is the token.
        ((*KNOWN_TOKEN, *TOKEN, *CLASS), "--learned_token or --class_remote or --lora_rank"),
        ((*KNOWN_TOKEN, "--learned_token", "dog", "--initial_token", "cat"), "--learned_token"),
        ((*KNOWN_TOKEN, *TOKEN[:2], "--initial_token", "unqtkn"), "--initial_token"),
    ],
)
def test_what_pictures_and_tokens_cannot_be_is_refused(argv, flag, capsys):
    write_pictures(subject=2, **{"class": 2})
    assert train.main([*TINY, "--task", "dreambooth", *argv]) == 2
    assert printed_refusal(capsys.readouterr().err).flag == flag


@pytest.mark.slow
@pytest.mark.parametrize(("num_pictures", "exit_code"), [(2, 2), (11, 1)])
def test_a_picture_that_cannot_be_read_ends_the_run(capsys, num_pictures, exit_code):
    """One of ten and less before it begins; none of them may be skipped, and no error says so."""
    write_pictures(subject=num_pictures)
    bad = sorted(Path("subject").iterdir())[-1]
    bad.write_bytes(b"no picture")
    argv = ("--task", "dreambooth", *SUBJECT, "--run_name", "one", *FP32)
    assert train.main([*TINY, *argv]) == exit_code
    assert Path("runs/one/record.json").exists() == (exit_code == 1)
    error = capsys.readouterr().err
    assert str(bad) in error and "--on_bad_sample" not in error


@pytest.mark.slow
def test_a_bad_held_out_picture_of_a_subject_is_not_advised_to_be_skipped(capsys):
    write_pictures(subject=2)
    Path("held-out").mkdir()
    Path("held-out/1.png").write_bytes(b"no picture")
    Path("held-out/1.txt").write_text("a cat")
    argv = ("--task", "dreambooth", *SUBJECT, "--run_name", "one", *FP32)
    argv += ("--validate_every_batches", "1", "--validation_remote", "held-out")
    assert train.main([*TINY, *argv]) == 1
    error = capsys.readouterr().err
    assert "held-out/1.png" in error and "--on_bad_sample" not in error


def learn_token(model: Path, *argv: object) -> Path:
    """Learn a token for two steps, and return the folder of the run."""
    write_pictures(subject=3)
    line = ("--task", "dreambooth", "--remote", "subject", "--instance_prompt", "my <dog>")
    line += (*TOKEN, *FP32, "--model_name", model, "--batch_size", 2, *argv)
    return trained("token", 2, *line)


@pytest.mark.slow
def test_a_token_is_learned_alone_and_loaded_by_diffusers(model, monkeypatch):
    states = []
    spy_on_job(
        monkeypatch,
        lambda job: states.append({n: one.clone() for n, one in job.model.state_dict().items()}),
    )
    folder = learn_token(model, "--lr", 0.01, "--weight_decay", 0)
    before, after = states
    changed = [name for name, weight in before.items() if not torch.equal(weight, after[name])]
    assert [name.split(".")[-2:] for name in changed] == [["token_embedding", "learned"]]
    (name,) = changed
    rows = before[name.replace("learned", "weight")]
    tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer")
    assert torch.equal(before[name], rows[tokenizer("dog").input_ids[1]])
    assert load_record(folder)["workload"]["num_trainable_parameters"] == len(before[name])

    export = exported(folder)
    assert "<dog>" in (export / "README.md").read_text()
    pipelines = [
        StableDiffusionPipeline.from_pretrained(place, safety_checker=None)
        for place in (export, model)
    ]
    loaded = pipelines[1]
    loaded.load_textual_inversion(str(export))
    states = []
    for pipeline in pipelines:
        ids = pipeline.tokenizer("a photo of a <dog>", return_tensors="pt").input_ids
        assert ids[0, -2] == 49408
        states.append(pipeline.text_encoder(ids)[0])
    embedding = loaded.text_encoder.get_input_embeddings().weight
    assert torch.equal(embedding[49408], after[name])
    torch.testing.assert_close(*states)

    line = ["--model_name", str(export), "--prompts", "a <dog>", "--folder", "drawn"]
    assert generate.main([*line, "--num_steps", "1"]) == 0


@pytest.mark.slow
def test_a_token_is_learned_beside_lora_and_with_class_pictures(model):
    write_pictures(**{"class": 2})
    recipe = ("--lora_rank", 2, "--lr", 0.01, *CLASS, "--batch_size", 4, "--train_text_encoder")
    folder = learn_token(model, *recipe)
    export = exported(folder)
    rows, before = (
        weights_of(place, "text_encoder")["text_model.embeddings.token_embedding.weight"]
        for place in (export, model)
    )
    tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer")
    assert torch.equal(rows[:-1], before)
    assert not torch.equal(rows[-1], before[tokenizer("dog").input_ids[1]])
    assert not has_same("unet", export, model)
    changed = [
        name
        for name, weight in weights_of(export, "text_encoder").items()
        if "token_embedding" not in name
        and not torch.equal(weight, weights_of(model, "text_encoder")[name])
    ]
    assert changed and all("_proj." in name for name in changed)
    refusal = refusal_of("export", folder, "--lora_format", "diffusers", "--folder", "lora")
    assert (refusal.flag, "with the token <dog>" in refusal.what) == ("--lora_format", True)


@pytest.mark.slow
def test_a_token_goes_on_and_gets_the_same_losses(model):
    learn_token(model, "--max_duration", "3ba", "--run_name", "whole")
    whole = read_losses(Path("runs/whole"))
    learn_token(model)
    assert read_losses(learn_token(model, "--resume", "auto", "--max_duration", "3ba")) == whole
