"""Small image-caption data sets, made anew for each test that asks for one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.data import datasets
from tests.data.s3_server import impatient, running_s3, s3  # noqa: F401


@pytest.fixture
def temporary_folder(monkeypatch):
    """A folder for temporary files and caches of the test alone, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        yield Path(folder)


@pytest.fixture
def mds_folder(tmp_path):
    """49 samples, number i grey of value 5 i, in four shards."""
    folder = tmp_path / "pairs"
    datasets.write_mds(folder)
    return folder
