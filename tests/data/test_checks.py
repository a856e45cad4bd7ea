"""Is each mistake about data found before anything is built, and told by its message?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sdbench import data
from sdbench.settings.config import SETTINGS
from sdbench.settings.data import DataSettings
from tests.refusals import refused

SYNTHETIC_FLAGS = "--use_synth_data, --data_format, --remote or --local"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "synthetic"),
        ({"data_format": "synthetic", "use_synth_data": True}, "synthetic"),
        ({"remote": "x"}, "mds"),
        ({"local": "x"}, "mds"),
        # Longer than a name of a file can be.
        ({"remote": f"https://h/0.tar?X-Amz-Signature={'0' * 300}"}, "webdataset"),
        ({"remote": f"https://h/0?X-Amz-Signature={'0' * 300}"}, "mds"),
        ({"remote": "s3://b/why?#1.tar"}, "webdataset"),
        ({"remote": "s3://bucket/{00000..00009}.tar"}, "webdataset"),
        ({"remote": "pipe:aws s3 cp s3://bucket/a.tar -"}, "webdataset"),
        ({"remote": "s3://bucket/{0..3}.parquet"}, "parquet"),
        ({"remote": "s3://bucket/data"}, "mds"),
        ({"streams": "a.tar=1"}, "mds"),
    ],
)
def test_resolve_format(given, expected):
    assert data.resolve_format(DataSettings(**given)) == expected


@pytest.mark.parametrize(
    ("given", "value", "flag"),
    [
        ({"data_format": "mds", "use_synth_data": True}, "mds", "--data_format"),
        ({"remote": "x", "use_synth_data": True}, "x", SYNTHETIC_FLAGS),
        ({"local": "x", "data_format": "synthetic"}, "x", SYNTHETIC_FLAGS),
        ({"data_format": "mds"}, None, "--remote or --local"),
        ({"streams": "x=1", "local": "y"}, "y", "--streams, --remote or --local"),
        ({"streams": "x=1", "data_format": "parquet"}, "parquet", "--data_format or --streams"),
    ],
)
def test_resolve_format_contradictions(given, value, flag):
    with refused(flag, value=value):
        data.resolve_format(DataSettings(**given))


def test_the_folders_of_data_below_a_place_are_named(make_config, mds_folder):
    place = mds_folder.parent
    with refused(value=str(place)) as caught:
        data.check(make_config("mds", local=str(place), remote=None))
    assert caught.value.allowed.endswith(f"nearest: {mds_folder}")


def test_other_mistakes(make_config, tmp_path):
    with refused(value="columns caption, jpg"):
        data.check(make_config("mds", latents="precomputed"))
    with refused("--caption_drop_probability", value=0.1):
        data.check(make_config("mds", latents="precomputed", caption_drop_probability=0.1))
    with refused("--model_name", value=str(tmp_path)):
        data.check(make_config("mds", tokenizer_folder=Path(tmp_path)))
    with refused("--image_size", value=70, allowed="a multiple of 8, e.g. 64"):
        data.check(make_config("synthetic", latents="precomputed", image_size=70))


def test_checks_import_neither_torch_nor_streaming(mds_folder, repository):
    script = (
        "import sys\n"
        "import data\n"
        "from sdbench import data as room\n"
        "from sdbench.data.source import SourceConfig\n"
        "room.check(SourceConfig(data_format='mds', image_size=64, device_batch_size=2, "
        f"seed=1, remote={str(mds_folder)!r}))\n"
        "assert not {'torch', 'streaming', 'transformers', 'PIL'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=repository, check=True)


def test_a_folders_format_is_told_from_its_names(tmp_path):
    for name, expected in (
        ("1/index.json", "mds"),
        ("2/shard.00000.mds", "mds"),
        ("3/train/index.json", "mds"),
        ("4/00000.tar", "webdataset"),
        ("5/part-0.parquet", "parquet"),
        ("6/cats/a.jpg", "folder"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
        place = tmp_path / name.split("/")[0]
        assert data.resolve_format(DataSettings(remote=str(place))) == expected


def test_the_flag_knows_every_format():
    assert set(SETTINGS["data_format"].kind.allowed.split(" | ")) == {
        "auto",
        *data.SOURCES,
    }
