"""Config files of train.py: OmegaConf's forms, open-diffusion's, and the recipes of configs/."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from unittest.mock import ANY

import pytest
import yaml
from omegaconf import OmegaConf

import train
from sdbench.cli import main as sdbench
from sdbench.models.architecture import resolve_architecture
from sdbench.record.store import load_record
from sdbench.settings.recipe import parse_request
from tests.data.datasets import write_folder, write_tars
from tests.refusals import printed_refusal, refused

CONFIGS = Path(__file__).parents[2] / "configs"
ASSETS = Path(__file__).parents[1] / "assets"
TEMPLATE = ASSETS / "open-diffusion-template.yaml"
FILE = object()  # stands for the path of the file


def parse(*argv: object):
    return parse_request([str(argument) for argument in argv], description="", epilog="")


@pytest.fixture
def file(tmp_path: Path):
    """Writes a config file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture(autouse=True)
def no_wandb(monkeypatch):
    """No variable but those that a file sets, and no W&B run.

    W&B's service does not outlive a run that is opened again in the same process.
    """
    for name in ("WANDB_API_KEY", "WANDB_ENTITY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("WANDB_MODE", "disabled")


def test_values_refer_to_each_other_and_to_what_the_command_line_says(file):
    path = file("lr: 1e-3\nweight_decay: ${lr}\nsave_every_batches: ???\n")
    request = parse(f"config={path}", "--lr", 0.5, "save_every_batches=7")
    config = request.config
    assert (config.lr, config.weight_decay, config.save_every_batches) == (0.5, 0.5, 7)
    names = ("lr", "weight_decay", "save_every_batches", "keep")
    assert [request.origin[name] for name in names] == ["flag", "file", "flag", "default"]
    assert parse("lr=0.25", "lr_warmup_batches=3").config.lr == 0.25  # without a file
    assert parse("--lr", 2, "lr=1").config.lr == 2  # a flag is above an assignment


def test_a_mapping_is_replaced_by_its_setting_and_changed_by_its_keys(file):
    path = file("filters: {a: '<1'}\n")
    for assignment, filters in (
        ("filters={b: '>2'}", {"b": ">2"}),
        ("filters.b='>2'", {"a": "<1", "b": ">2"}),
        ("filters=null", None),
    ):
        assert parse("--config", path, assignment).config.filters == filters
    assert parse("--config", path, "--filters", "{b: '>2'}").config.filters == {"b": ">2"}


@pytest.mark.parametrize(
    ("text", "argv", "flag", "value"),
    [
        ("lr: ???", (), "--lr", "???"),
        ("lr: ${rate}", (), "--config", FILE),
        ("lr: 1\nlr: 2", (), "--config", FILE),
        ("lr: 1", ("remote=[a",), "--config", ANY),
        ("lr: 1", ("bach_size=3",), "--batch_size", "bach_size"),
        ("lr: 1", ("batch_size=many",), "--batch_size", "many"),
        ("model: {ema: {path: a}}", (), "model.ema.path=VALUE", "a"),
        ("dataset: {typ: a}", (), "dataset.type=VALUE", "dataset.typ"),
        ("experiment: {zebra: a}", (), "experiment.zebra=VALUE", "experiment.zebra"),
        ("wandb:\n  api_key: ???", (), "wandb.api_key=VALUE", "???"),
        ("model: {mixed_precision: fp8}", (), "model.mixed_precision=VALUE", "fp8"),
        ("distributed: {dist_url: 'tcp://a:1'}", (), "distributed.dist_url=VALUE", "tcp://a:1"),
        ("system: {batch_size: 0}", (), "system.batch_size=VALUE", 0),
        ("system: {gradient_accumulation: 2}", (), "system.batch_size=VALUE", None),
        ("model_parts: {unet: {random: nano}}", (), "--model_parts", {"unet": {"random": "nano"}}),
        ("lora_layers: [to_q, '']", (), "--lora_layers", ["to_q", ""]),
        ("lora_layers: 5", (), "--lora_layers", 5),
    ],
)
def test_a_wrong_file_is_refused_by_name(file, text, argv, flag, value):
    path = file(text)
    with refused(flag, value=str(path) if value is FILE else value):
        parse("--config", path, *argv)


def test_the_template_of_open_diffusion_in_our_settings(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    request = parse(
        f"config={TEMPLATE}",
        "wandb.api_key=0123456789abcdef",
        "experiment.log_dir=logs",
        "experiment.project=cats",
        "experiment.name=first",
        "experiment.num_examples_to_see=1000",
        "system.gradient_accumulation=2",
        *(f"model.{part}.pretrained=nano" for part in ("vae", "text_encoder", "tokenizer")),
        "model.scheduler.pretrained=sd2-768-v",
        "dataset.params.path=pipe:aws s3 cp s3://bucket/{00000..00009}.tar -",
        "--keep=3",
    )
    config = request.config
    template = yaml.safe_load(TEMPLATE.read_text())
    expected = {
        "batch_size": 32 * 2 * 4,
        "device_train_microbatch_size": 32,
        "num_workers": 6,
        "results_dir": "logs/cats",
        "run_name": "first",
        "wandb_name": "first",
        "wandb_project": "cats",
        "max_duration": "1000sp",
        "save_every_batches": 1000,  # every 2000 passes
        "num_sample_images": 1000,
        "resume": "auto",
        "keep": 3,
        "keep_every_batches": None,
        "lr": 1e-4,
        "lr_schedule": "constant",
        "lr_warmup_batches": 500,
        "beta1": 0.9,
        "beta2": 0.98,
        "weight_decay": 0.01,
        "adam_eps": 1e-8,
        "model_name": "nano",
        "model_parts": {
            "unet": {"params": template["model"]["unet"]["params"] | {"norm_eps": 1e-5}},
            "scheduler": {"pretrained": "sd2-768-v"},
        },
        "use_ema": False,
        "precision": "amp_bf16",
        "activation_checkpointing": "full",
        "data_format": "webdataset",
        "remote": "pipe:aws s3 cp s3://bucket/{00000..00009}.tar -",
        "image_size": 512,
        "filters": {"pwatermark": "<=0.5"},
    }
    assert {name: getattr(config, name) for name in expected} == expected
    users = {name for name in request.origin if request.is_users(name)}
    assert users - {"keep_every_batches"} == expected.keys() - {"keep_every_batches"}
    assert request.origin["lr"] == "file"
    assert request.translation.keys["beta2"] == "optimizer.params.beta2"
    assert [note.split()[0] for note in request.translation.notes] == [
        "distributed.dist_backend",
        "model.xformers",
        "experiment.eval_caption_file",
        "model.scheduler",
    ]
    assert os.environ["WANDB_API_KEY"] == "0123456789abcdef"


def test_the_other_keys_of_open_diffusion(file):
    path = file(
        "experiment: {save_only_most_recent: false, requeue: false, save_every: 5,"
        " eval_caption_file: a.csv, num_eval_images: 10}\n"
        "model: {pretrained: nano, use_ema: true, max_grad_norm: 1.5,"
        " gradient_checkpointing: false}\n"
        "dataset: {type: ClassificationWebDataset, params: {idx_to_prompt: classes.json}}\n"
        "lr_scheduler: {scheduler: CosineWithWarmup}\n"
        "optimizer: {params: {learning_rate: 0.5}}\n"
        "optimizer_params: trainable\n"
    )
    config = parse("--config", path, "optimizer=adamw_fused").config
    expected = {
        "keep": 1,
        "keep_every_batches": 1,
        "resume": "never",
        "sample_prompts": "a.csv",
        "sample_every_batches": 5,
        "num_sample_images": 10,
        "model_name": "nano",
        "model_parts": None,
        "ema_half_life_batches": 138,
        "ema_warmup": True,
        "clip_norm": 1.5,
        "activation_checkpointing": "none",
        "class_prompts": "classes.json",
        "lr_schedule": "cosine",
        "lr": 0.5,
        "optimizer": "adamw_fused",  # also the name of a mapping
        "optimizer_params": "trainable",
    }
    assert {name: getattr(config, name) for name in expected} == expected
    notes = parse("--config", path, "model.unet.pretrained=nano").translation.notes
    assert [note.split()[0] for note in notes] == ["model.unet.pretrained", "model.scheduler"]
    assert parse("dataset.params.workers=3").config.num_workers == 3
    with refused("--wandb_project", value=2024):
        parse("experiment.log_dir=logs", "experiment.project=2024")
    with refused("dataset.params.batch_size=VALUE or system.batch_size=VALUE", value=4):
        parse("system.batch_size=8", "dataset.params.batch_size=4")


DRAWN = "eval_caption_file: a.csv, num_eval_images: 5"
THREE_PASSES = "system: {batch_size: 2, gradient_accumulation: 3}"


@pytest.mark.parametrize(
    ("text", "expected", "notes"),
    [
        # Nothing is said: its defaults.
        (
            "experiment: {name: a}",
            {"save_every_batches": 1000, "keep": 1, "keep_every_batches": 1},
            ["experiment.eval_caption_file"],
        ),
        (
            f"experiment: {{eval_caption_file: a.csv}}\n{THREE_PASSES}",
            {"save_every_batches": 333, "sample_every_batches": 333, "num_sample_images": 1000},
            ["experiment.save_every"],
        ),
        (
            f"experiment: {{save_every: 6, {DRAWN}}}\n{THREE_PASSES}",
            {"save_every_batches": 2, "sample_every_batches": 2, "num_sample_images": 5},
            [],
        ),
        (
            f"experiment: {{save_every: 2, {DRAWN}}}\n{THREE_PASSES}",
            *({"save_every_batches": 1}, ["experiment.save_every"]),
        ),
        # Another group alone says nothing of saving, and noise is what it trains on.
        ("dataset: {params: {workers: 3}}", {"save_every_batches": None, "keep": 2}, []),
        ("model: {scheduler: {params: {}}}", {"prediction_type": None}, []),
        (
            "model: {scheduler: {params: {prediction_type: v_prediction}}}",
            {"prediction_type": None},
            ["model.scheduler"],
        ),
    ],
)
def test_what_open_diffusion_does_otherwise_is_set_or_told(file, text, expected, notes):
    request = parse("--config", file(text))
    assert {name: getattr(request.config, name) for name in expected} == expected
    assert [note.split()[0].rstrip(",") for note in request.translation.notes] == notes


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A diffusers folder of `nano`, whose weights are those of its own seed."""
    argv = "--model_name nano --use_synth_data --batch_size 2 --max_duration 1ba --run_name source"
    assert train.main([*argv.split(), "--seed", "3", "--engine", "torch"]) == 0
    assert sdbench(["export", "runs/source"]) == 0
    return (tmp_path / "runs" / "source" / "model").rename(tmp_path / "pipeline")


def unet_of(model: str) -> list[str]:
    """Overrides that make the U-Net of the template that of a built-in model."""
    unet = resolve_architecture(model).parts["unet"]
    params = yaml.safe_load(TEMPLATE.read_text())["model"]["unet"]["params"]
    wanted = {name: value for name, value in unet.items() if params.get(name) != value}
    return [f"model.unet.params.{name}={value}" for name, value in wanted.items()]


@pytest.mark.slow
def test_the_template_of_open_diffusion_trains_and_goes_on(tmp_path, pipeline, capsys):
    """Its command line, on a miniature: a U-Net by numbers, the other parts from a folder."""
    import torch
    from safetensors.torch import load_file

    write_tars(tmp_path / "tars")
    argv = [
        f"config={TEMPLATE}",
        *("wandb.api_key=0123456789abcdef", "experiment.log_dir=logs", "experiment.project=cats"),
        *("experiment.name=first", "system.batch_size=2", "system.workers=0"),
        *(f"model.{part}.pretrained={pipeline}" for part in ("vae", "text_encoder", "tokenizer")),
        *(f"model.scheduler.pretrained={pipeline}", f"dataset.params.path={tmp_path / 'tars'}"),
        *("dataset.params.resolution=64", "dataset.params.filters=null"),
        *unet_of("nano"),
        *("model.unet.params.layers_per_block=2", "--engine=torch", "--log_every_batches=1"),
    ]
    assert train.main([*argv, "experiment.num_examples_to_see=4", "--print_config"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "beta2: 0.98  # file: optimizer.params.beta2" in printed
    assert printed[1].startswith("# model.xformers has no effect")
    assert train.main([*argv, "experiment.num_examples_to_see=4"]) == 0
    assert train.main([*argv, "experiment.num_examples_to_see=6"]) == 0
    run = tmp_path / "logs" / "cats" / "first"
    record = load_record(run)
    assert record["summary"]["first_step"] == 2
    assert record["workload"]["num_steps"] == 3
    assert record["config"]["lr_warmup_batches"] == 500
    assert "0123456789abcdef" not in (run / "record.json").read_text()

    assert sdbench(["export", str(run)]) == 0
    config = json.loads((run / "model" / "unet" / "config.json").read_text())
    assert (config["layers_per_block"], config["block_out_channels"]) == (2, [16, 32])
    for part, name in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        ours, theirs = (
            load_file(folder / part / f"{name}.safetensors") for folder in (run / "model", pipeline)
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        ("{unet: {params: {cross_attention_dims: 32}}}", {"cross_attention_dims": 32}),
        ("{unet: {params: {block_out_channels: [8]}}}", {"block_out_channels": [8]}),
        ("{unet: {pretrained: sd2-base}}", 1024),
        ("{u-net: {pretrained: nano}}", "u-net"),
        ("{tokenizer: {params: {vocab_file: a}}}", {"vocab_file": "a"}),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, value, capsys):
    argv = ("--model_name=nano", "--use_synth_data", "--max_duration=1ba", f"model_parts={parts}")
    assert train.main([*argv, "--print_config"]) == 2
    error = printed_refusal(capsys.readouterr().err)
    assert (error.flag, error.value) == ("--model_parts", value)


# What makes a recipe one that can be planned here; the rest of it stays.
TINY = {
    "model_name": "nano",
    "model_parts": "{unet: {pretrained: nano}}",
    "image_size": 64,
    "batch_size": 2,
    "device_train_microbatch_size": 1,
    "sharding": "none",
    # No cluster is started for a plan; tests/ray/ trains with the engine.
    "engine": "torch",
    "num_ray_workers": "null",
    "max_failures": "0",
    "init_from": "null",
    "class_prompts": "classes.json",
    "sample_prompts": "prompts.txt",
    "sample_shapes": "64x64",
    "instance_prompt": "a photo of unqtkn dog",
    "class_prompt": "a photo of a dog",
    "filters": "{original_width: '>=100'}",
}


@pytest.mark.parametrize(
    "recipe",
    [
        # The step of a LoRA has to be replayed.
        pytest.param(path.name, marks=pytest.mark.slow if "lora" in path.name else ())
        for path in sorted(CONFIGS.glob("*.yaml"))
    ],
)
def test_a_recipe_is_a_plan(recipe, tmp_path, capsys):
    content = OmegaConf.to_container(OmegaConf.load(CONFIGS / recipe))
    changes = {name: value for name, value in TINY.items() if name in content}
    if content.get("latents") == "precomputed":
        assert content["model_name"] == "???"  # what made the latents is the user's
        changes |= {"data_format": "synthetic", "remote": "null"}
    if "transformer" in content.get("model_parts", {}):
        # On pictures, as there is no folder of held-out latents.
        changes |= {"model_name": "tiny-flux", "model_parts": "null", "latents": "online"}
        del changes["data_format"]
    if changes.get("data_format") != "synthetic":
        write = write_tars if content.get("data_format") == "webdataset" else write_folder
        for name in {"remote", "validation_remote", "class_remote"} & content.keys():
            write(tmp_path / name)
            changes[name] = name
    (tmp_path / "classes.json").write_text('{"0": "a tench"}')
    (tmp_path / "prompts.txt").write_text("a red circle")
    argv = [f"config={CONFIGS / recipe}", *(f"{name}={changes[name]}" for name in changes)]
    assert train.main([*argv, "--print_config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    printed = OmegaConf.to_container(OmegaConf.load("printed.yaml"))
    kept = content.keys() - changes.keys()
    assert {name: printed[name] for name in kept} == {name: content[name] for name in kept}
    again = dataclasses.asdict(parse("--config", "printed.yaml").config)
    assert {name: again[name] for name in printed} == printed


def test_what_is_printed_refers_to_nothing(tmp_path, capsys):
    place = "tars-${NAME}"
    argv = ("--model_name=nano", "--max_duration=1ba", "--use_synth_data", "--run_name", place)
    assert train.main([*argv, "--print_config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parse("--config", "printed.yaml").config.run_name == place


@pytest.mark.parametrize("shapes", ["64x192, 128x64", "[64x192, 128x64]"])
def test_shapes_of_a_file_are_printed_as_a_flag_takes_them(tmp_path, capsys, shapes):
    (tmp_path / "run.yaml").write_text(f"sample_shapes: {shapes}\n")
    argv = ("--model_name=nano", "--max_duration=1ba", "--use_synth_data", "--config=run.yaml")
    argv += ("--sample_every_batches=1", "--sample_prompts=a", "--print_config")
    assert train.main(argv) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    for given in (("--config", "printed.yaml"), ("--sample_shapes", "64x192,128x64")):
        assert parse(*given).config.sample_shapes == "64x192,128x64"


@pytest.mark.parametrize("shapes", ["64", "64x", "64x0", "64x-64", "64x64x64", "64x64,", "1.5x2"])
def test_what_is_no_shape_is_refused(shapes):
    allowed = "WIDTHxHEIGHT in pixels, e.g. 640x384; several with commas between them"
    with refused("--sample_shapes", value=shapes, allowed=allowed):
        parse("--sample_shapes", shapes)


@pytest.mark.parametrize("name", ["../../elsewhere", "/elsewhere", "my run/1", "."])
def test_a_run_name_that_leads_out_of_the_results_is_refused(name):
    with refused("--run_name", value=name):
        parse("--run_name", name, "--max_duration", "1ba")
