"""Flags, file, preset and defaults: precedence, provenance, and errors of four facts."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sdbench import engines
from sdbench.base.errors import ConfigError
from sdbench.settings import recipe
from sdbench.settings.config import PRESETS, SETTINGS, SPEED_UPS, parse_request
from sdbench.settings.data import DataSettings
from sdbench.settings.kinds import TEXT
from sdbench.settings.page import make_page
from sdbench.settings.request import parse as parse_settings
from sdbench.settings.setting import REQUIRED, setting, shared
from tests.refusals import refused


def parse(*argv):
    return parse_request(argv, description="", epilog="")


def test_every_flag_of_diffusion_benchmark_keeps_its_spelling():
    texts = {"remote": "r", "local": "l", "model_name": "tiny", "wandb_name": "n"}
    texts |= {"wandb_project": "p"}
    numbers = {"batch_size": 64, "image_size": 256, "device_train_microbatch_size": 8}
    argv = [f"--{name}={value}" for name, value in {**texts, **numbers}.items()]
    config = parse(*argv, "--use_synth_data", "--use_ema").config
    wanted = {**texts, **numbers, "use_synth_data": True, "use_ema": True}
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_defaults_are_below_preset_below_file_below_flags(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "preset: seed\nlr: 0.5\nmemory_format: channels_last\noptimizer: adamw_fused\n"
        "use_ema: true\ndevice_train_microbatch_size: auto\nmax_duration: 5ep\nbatch_size:\n"
    )
    request = parse("--config", str(file), "--optimizer", "adamw", "--lr", "0.25")
    config = request.config
    assert config.weight_decay == 1e-3  # default
    assert config.encoder_dtype == PRESETS["seed"]["encoder_dtype"] == "fp32"  # preset of the file
    assert config.memory_format == "channels_last"  # file over preset
    assert (config.optimizer, config.lr) == ("adamw", 0.25)  # flag over file
    assert (config.use_ema, config.max_duration) == (True, "5ep")
    names = ("weight_decay", "encoder_dtype", "memory_format", "optimizer", "preset", "batch_size")
    assert [request.origin[name] for name in names] == [
        *("default", "preset", "file", "flag", "file", "default")
    ]


def test_every_preset_sets_every_speed_up_but_the_threads_and_nothing_else():
    assert SETTINGS["preset"].kind.allowed == " | ".join(PRESETS)
    for preset in PRESETS.values():
        assert set(preset) == set(SPEED_UPS) - {"num_threads"}


def test_the_choices_of_a_table_are_its_rows(monkeypatch):
    assert parse("--engine", "torch").config.engine == "torch"
    monkeypatch.setattr(engines, "ENGINES", {"composer": "a:b", "another": "a:b"})
    assert parse("--engine", "another").config.engine == "another"
    with refused("--engine", allowed="composer | another"):
        parse("--engine", "torch")


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        (["--bach_size", "8"], "--batch_size", "--bach_size"),
        (["--batch", "8"], "--batch_size", "--batch"),
        (["--random_flip"], "--horizontal_flip_probability", "--random_flip"),  # as in diffusers
        (["--train_batch_size=4"], "--batch_size", "--train_batch_size=4"),
        (["--microbatch", "8"], "--device_train_microbatch_size", "--microbatch"),
        (["tiny"], "--model_name", "tiny"),
        (["use_synth_data"], "--use_synth_data", "use_synth_data"),
        (["--preset", "fsat"], "--preset", "fsat"),
        (["--batch_size", "-3"], "--batch_size", "-3"),
        (["--batch_size", "2.5"], "--batch_size", "2.5"),
        (["--lr", "nan"], "--lr", "nan"),
        (["--lr", "inf"], "--lr", "inf"),
        (["--max_bad_fraction", "nan"], "--max_bad_fraction", "nan"),
        (["--precision", "fp8"], "--precision", "fp8"),
        (["--data_format", "tfds"], "--data_format", "tfds"),
        (["--device_train_microbatch_size", "0"], "--device_train_microbatch_size", "0"),
        (["--target_precision", "100%"], "--target_precision", "100%"),
        (["--filters", "pwatermark"], "--filters", "pwatermark"),
        (["--max_duration", "10"], "--max_duration", "10"),
        (["--config", "no/such.yaml"], "--config", "no/such.yaml"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(argv, flag, value):
    with refused(flag, value=value):
        parse(*argv)


def test_what_is_wrong_with_a_value_is_said():
    with refused("--batch_size", value="0") as caught:
        parse("--batch_size", "0")
    assert caught.value.what == "--batch_size has a value that it does not take"


@pytest.mark.parametrize("name", ["shapes", "shapes.yaml", "configs/shapes.yaml"])
def test_a_recipe_of_the_suite_is_found_by_its_name_in_any_folder(repository, name):
    Path("shapes").mkdir()  # where `python -m sdbench shapes` writes its pictures
    read = functools.partial(recipe.parse_request, description="", epilog="")
    named = read(["--config", name]).config
    assert named == read(["--config", str(repository / "configs/shapes.yaml")]).config
    assert named.remote == "shapes/train"


def test_a_file_of_the_users_comes_before_a_recipe_of_its_name():
    Path("laptop.yaml").write_text("lr: 0.125")
    assert parse("--config", "laptop.yaml").config.lr == 0.125


@pytest.mark.parametrize(
    "name", ["laptob", "cards/laptop", "/configs/laptop.yaml", "shapes/laptop"]
)
def test_a_name_of_no_recipe_is_refused_with_the_nearest(name):
    with pytest.raises(ConfigError) as caught:
        parse("--config", name)
    error = caught.value
    assert error.what == "this is no file, and no recipe of the suite has this name"
    assert (error.value, error.flag) == (name, "--config")
    assert error.allowed.startswith("the path of a file | laptop | ")


def test_the_nearest_value_is_offered():
    for argv, nearest in (
        (("--preset", "fsat"), "fast | seed, the nearest is fast"),
        (("--device_train_microbatch_size", "atuo"), "of at least 1, the nearest is auto"),
        (("fsat",), "what --help_all lists, the nearest is --preset fast"),
        (("--lr", "fast"), "a number above 0"),
        # As many letters agree by chance: convolution, train_text_encoder, sample_steps.
        (("--test", "64"), "the names that --help_all lists"),
        (("--max_steps", "64"), "the names that --help_all lists"),
        (("zebra",), "what --help_all lists"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse(*argv)
        assert caught.value.allowed.endswith(nearest)


@pytest.mark.parametrize(
    ("text", "flag", "value"),
    [
        ("bach_size: 8", "--batch_size", "bach_size"),
        ("batch_size: many", "--batch_size", "many"),
        ("batch_size: true", "--batch_size", True),
        ("batch_size: 2.0", "--batch_size", 2.0),
        ("lr: true", "--lr", True),
        ("use_ema: ja", "--use_ema", "ja"),
        ("- a list", "--config", None),
        ("a: [", "--config", None),
        ("lr: !!python/object:os.system x", "--config", None),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, flag, value):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with refused(flag, value=str(file) if value is None else value):
        parse("--config", str(file))


def test_the_page_of_settings_is_made_from_their_declarations(repository):
    assert all(declared.help for declared in SETTINGS.values())
    # Otherwise: make settings
    assert (repository / "docs/settings.md").read_text() == make_page()


def test_a_command_takes_the_settings_of_others_and_its_own():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Flags:
        place: str = setting(TEXT, REQUIRED, "a place", is_positional=True)
        source: str = setting(TEXT, REQUIRED, "where from", spelling="from")
        crop: str = shared(DataSettings, "crop", default="random")
        shuffle: bool = shared(DataSettings, "shuffle")

    def parse_own(*argv):
        return parse_settings(Flags, argv, description="", epilog="", prog="own")

    request = parse_own("here", "--from", "there", "--no_shuffle")
    assert request.config == Flags(place="here", source="there", crop="random", shuffle=False)
    assert request.origin == {**dict.fromkeys(vars(request.config), "flag"), "crop": "default"}
    for argv, flag in (
        (("here", "--from", "there", "--crop", "none"), "--crop"),
        (("here", "--from", ""), "--from"),
        (("here", "--from", "there", "--scrop", "center"), "--crop"),
        (("here", "--from", "there", "--plac", "a.yaml"), "--plac"),  # nothing is like it
    ):
        with refused(flag):
            parse_own(*argv)
    with pytest.raises(SystemExit) as ended:
        parse_own("here")
    assert ended.value.code == 2


def test_help_answers_at_once(repository):
    # Under a second on an idle machine, which takes that no library of weight is loaded.
    for command in ("generate.py --help", "benchmark.py --help_all"):
        completed = subprocess.run(
            [sys.executable, "-X", "importtime", *command.split()],
            cwd=repository,
            capture_output=True,
            text=True,
            check=True,
        )
        imported = set(re.findall(r"\| +(\S+)$", completed.stderr, re.MULTILINE))
        assert {"argparse", "sdbench.settings.kinds"} <= imported
        assert not imported & {"torch", "numpy", "scipy", "PIL", "diffusers", "transformers"}
    assert "composer benchmark.py --use_synth_data" in completed.stdout
    assert "exit codes" in completed.stdout
    # What each preset has, and how to be without it.
    words = " ".join(completed.stdout.split())
    by_device = "(fast: false on a GPU, true on a CPU, seed: false; --no_flush_denormals)"
    of_ddp = "(fast: true, seed: false; --no_{})"
    assert by_device in words
    assert all(of_ddp.format(it) in words for it in ("gradient_as_bucket_view", "static_graph"))
