"""Flags, file, preset and defaults: precedence, provenance, and errors of four facts."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from sdbench.base.errors import ConfigError
from sdbench.settings.config import FIELDS, parse_request
from sdbench.settings.presets import PRESETS


def parse(*argv):
    return parse_request(argv, description="", epilog="")


def test_every_flag_of_diffusion_benchmark_keeps_its_spelling():
    config = parse(
        *("--batch_size", "64", "--image_size", "256", "--remote", "r", "--local", "l"),
        *("--use_synth_data", "--model_name", "tiny", "--use_ema", "--wandb_name", "n"),
        *("--wandb_project", "p", "--device_train_microbatch_size", "8"),
    ).config
    assert (config.batch_size, config.image_size, config.remote, config.local) == (
        64,
        256,
        "r",
        "l",
    )
    assert (config.use_synth_data, config.model_name, config.use_ema) == (True, "tiny", True)
    assert (config.wandb_name, config.wandb_project) == ("n", "p")
    assert config.device_train_microbatch_size == 8
    assert parse().config.device_train_microbatch_size == "auto"


def test_defaults_are_below_preset_below_file_below_flags(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: seed\nlr: 0.5\nmemory_format: channels_last\noptimizer: adamw_fused\n")
    request = parse("--config", str(file), "--optimizer", "adamw", "--lr", "0.25")
    config = request.config
    assert config.weight_decay == 1e-3  # default
    assert config.encoder_dtype == PRESETS["seed"]["encoder_dtype"] == "fp32"  # preset of the file
    assert config.memory_format == "channels_last"  # file over preset
    assert (config.optimizer, config.lr) == ("adamw", 0.25)  # flag over file
    names = ("weight_decay", "encoder_dtype", "memory_format", "optimizer", "preset")
    assert [request.origin[name] for name in names] == [
        *("default", "preset", "file", "flag", "file")
    ]


def test_a_preset_sets_nothing_that_is_not_a_field():
    for preset in PRESETS.values():
        assert set(preset) == set(PRESETS["seed"]) <= set(FIELDS)


def test_switches_go_on_and_off():
    assert parse("--use_ema").config.use_ema is True
    assert parse("--no_use_ema").config.use_ema is False
    assert parse("--no_check_memory").config.check_memory is False


def test_yaml_keys_and_flags_take_the_same_values(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "use_ema: true\ndevice_train_microbatch_size: auto\nmax_duration: 5ep\nbatch_size:\n"
    )
    request = parse("--config", str(file))
    assert request.config.use_ema is True
    assert request.config.max_duration == "5ep"
    assert request.origin["batch_size"] == "default"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bach_size", "8"], "unknown flag: got '--bach_size'.*nearest is --batch_size"),
        (["--batch", "8"], "unknown flag: got '--batch'.*nearest is --batch_size"),
        (["--batch_size", "-3"], "got '-3'; allowed: a whole number of at least 1.*--batch_size"),
        (["--batch_size", "2.5"], "got '2.5'; allowed: a whole number"),
        (["--lr", "nan"], "got 'nan'; allowed: a number above 0; change it with --lr"),
        (
            ["--precision", "fp8"],
            r"got 'fp8'; allowed: fp32 \| tf32 \| amp_fp16 \| amp_bf16 \| bf16",
        ),
        (["--device_train_microbatch_size", "0"], "allowed: auto, or a whole number of at least 1"),
        (["--max_duration", "10"], "got '10'; allowed: a number of batches or epochs"),
        (["--config", "no/such.yaml"], "No such file.*got 'no/such.yaml'.*--config"),
    ],
)
def test_a_wrong_flag_is_told_in_four_facts(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bach_size: 8", "unknown key in the config file: got 'bach_size'.*nearest is batch_size"),
        ("batch_size: many", "got 'many'; allowed: a whole number"),
        ("batch_size: true", "got True; allowed: a whole number"),
        ("use_ema: ja", "got 'ja'; allowed: true | false"),
        ("- a list", "does not hold keys and values: got 'list'"),
        ("a: [", "cannot be read"),
        ("lr: !!python/object:os.system x", "cannot be read"),
    ],
)
def test_a_wrong_file_is_told_in_four_facts(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(file))


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_flag_has_help_and_a_kind(name):
    metadata = FIELDS[name].metadata
    assert metadata["help"] and metadata["kind"].allowed


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().config.seed = 1


def test_help_answers_at_once(repository):
    # Under a second on an idle machine, which takes that no library of weight is loaded.
    completed = subprocess.run(
        [sys.executable, "-X", "importtime", "benchmark.py", "--help"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(re.findall(r"\| +(\S+)$", completed.stderr, re.MULTILINE))
    assert {"argparse", "sdbench.settings.config"} <= imported
    assert not imported & {"torch", "numpy", "scipy", "composer", "diffusers", "transformers"}
    assert "composer benchmark.py --use_synth_data" in completed.stdout
    assert "exit codes" in completed.stdout
