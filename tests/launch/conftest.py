"""Fixtures that several files of these tests share."""

from __future__ import annotations

import pytest

from sdbench.launch import child


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """The file with a line for each start of fake_benchmark.py."""
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    return tmp_path / "starts"


@pytest.fixture
def impatient(monkeypatch):
    """A short grace for what does not end."""
    monkeypatch.setitem(child.run_guarded.__kwdefaults__, "grace_s", 0.2)


@pytest.fixture(scope="session")
def torch_is_imported_once():
    from sdbench.engines import load_engine

    load_engine("torch")
