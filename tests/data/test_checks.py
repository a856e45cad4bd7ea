"""Is each mistake about data found before anything is built, and told by its message?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sdbench import data
from sdbench.base.conditions import Captions, ModelInputs
from sdbench.settings.config import SETTINGS
from sdbench.settings.data import DataSettings
from tests.data.datasets import make_source
from tests.refusals import PLACE_FLAGS, refused

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
        ({"data_format": "mds"}, None, PLACE_FLAGS),
        ({"streams": "x=1", "local": "y"}, "y", "--streams, --remote or --local"),
        ({"streams": "x=1", "data_format": "parquet"}, "parquet", "--data_format or --streams"),
    ],
)
def test_resolve_format_contradictions(given, value, flag):
    with refused(flag, value=value):
        data.resolve_format(DataSettings(**given))


def test_the_folders_of_data_below_a_place_are_named(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "index.json").write_text("{}")
    with refused(value=str(tmp_path)) as caught:
        data.check(make_source("mds", tmp_path))
    assert caught.value.allowed.endswith(f"nearest: {tmp_path}/train")


@pytest.mark.parametrize(
    ("kind", "changes", "flag", "value"),
    [
        ("mds latents", {"crop": "random"}, "--crop", "random"),
        (
            "mds",
            {"inputs": ModelInputs(captions=(Captions(folder=Path("empty")),))},
            "--model_name",
            "empty",
        ),
        ("synthetic latents", {"remote": None, "image_size": 70}, "--image_size", 70),
    ],
)
def test_other_mistakes(kind, changes, flag, value, mds_folder):
    with refused(flag, value=value):
        data.check(make_source(kind, mds_folder, **changes))


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [("shard.00000.mds", "mds"), ("train/index.json", "mds"), ("cats/a.jpg", "folder")],
)
def test_a_folders_format_is_told_from_its_names(name, expected, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert data.resolve_format(DataSettings(remote=str(tmp_path))) == expected


def test_the_flag_knows_every_format():
    assert {*SETTINGS["data_format"].kind.allowed.split(" | ")} == {"auto", *data.SOURCES}
