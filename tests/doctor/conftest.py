from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sdbench.cli import main

FAKES = Path(__file__).parent / "fakes"
# Tests that run beside these slow a check down. One that outlasts its time, 30 s by default, makes
# the doctor leave by os._exit, which ends the whole process of tests.
PATIENT = ("--timeout_s", "250")
# What would make a machine look other than it is, or this process one of several.
FOREIGN = (
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_API_KEY"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("NCCL_NET_PLUGIN", "TMPDIR", "COLUMNS"),
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path, plain_replay):
    for name in (*FOREIGN, *(name for name in os.environ if name.startswith("SLURM_"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def look(capsys, tmp_path, monkeypatch) -> Callable[..., dict[str, dict]]:
    """A function from flags to the findings of this process by name.

    The exit code has to be the one that the findings ask for.
    """

    # A check that is stuck is a finding, and fails its test alone.
    monkeypatch.setattr("sdbench.doctor.doctor.is_stuck", lambda: False)

    def run(*flags: str) -> dict[str, dict]:
        flags = ("--model_name", "tiny", "--results_dir", str(tmp_path / "runs"), *flags)
        exit_code = main(["doctor", "--json", *PATIENT, *flags])
        report = json.loads(capsys.readouterr().out)
        levels = [finding["level"] for finding in report["findings"]]
        assert exit_code == int("error" in levels)
        assert report["counts"] == {
            level: levels.count(level) for level in ("error", "warning", "ok", "skipped")
        }
        assert (report["num_nodes"], report["num_ranks"]) == (1, 1)
        return {finding["name"]: finding for finding in report["findings"]}

    return run


@pytest.fixture
def set_gpus(monkeypatch) -> Callable[..., None]:
    """A function that puts GPUs into this machine, by what differs from an idle H100."""

    def put(*gpus: dict) -> None:
        monkeypatch.syspath_prepend(str(FAKES))
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        monkeypatch.setenv("FAKE_GPUS", json.dumps(gpus))

    yield put
    # What was imported from the fakes must not outlive the test.
    if str(FAKES) in str(getattr(sys.modules.get("pynvml"), "__file__", "")):
        del sys.modules["pynvml"]
