"""Machines with another user's checkout, without one, or with an ASCII terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

import data
from sdbench.record.provenance import git_state
from tests.runs import only_record

SMALL = ("--use_synth_data", "--image_size", "64", "--batch_size", "4", "--num_workers", "0")
SMALL += ("--num_batches", "3")


def test_the_commit_of_another_user_s_checkout_is_told(repository, monkeypatch):
    if not (repository / ".git").exists():
        pytest.skip("not a git checkout")
    before = git_state()
    # Whatever the user allows git; its own tests have the last of these variables.
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    refused = subprocess.run(["git", "-C", repository, "status"], capture_output=True, text=True)
    assert "dubious ownership" in refused.stderr
    assert git_state() == before
    assert len(before["commit"]) == 40


def test_code_that_git_does_not_know_makes_a_checkout_dirty(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.org"]
    subprocess.run(
        ["git", "-C", tmp_path, *who, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True
    )
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    (tmp_path / "notes.txt").touch()
    assert git_state()["dirty"] is False
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "sitecustomize.py").touch()
    assert git_state()["dirty"] is True


def test_a_record_that_names_no_commit_is_announced(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    monkeypatch.delenv("SDBENCH_GIT_COMMIT", raising=False)
    assert data.main([*SMALL, "--results_dir", str(tmp_path / "runs")]) == 0
    assert only_record(tmp_path / "runs")["git"] == {"commit": None, "dirty": None}
    assert "warning: the commit of the suite is not known: " in capsys.readouterr().err


def test_a_path_that_the_terminal_cannot_show_costs_no_run(tmp_path, monkeypatch):
    # An accent, and a byte that is no character in UTF-8.
    results = tmp_path / "\u00e9\udcff"
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert data.main([*SMALL, "--results_dir", str(results)]) == 0
    record = only_record(results)
    assert record["status"] == "ok"
    shown = rf"record: {tmp_path}/\xe9\udcff/{record['run_id']}"
    assert terminal.buffer.getvalue().decode("ascii").endswith(f"{shown}\n")
    log = (results / record["run_id"] / "stdout.log").read_text(encoding="utf-8")
    assert log.endswith(shown.replace(r"\xe9", "\u00e9") + "\n")
