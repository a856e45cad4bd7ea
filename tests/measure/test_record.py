"""Records are whole, exclusive, and match their schema."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from sdbench.base.errors import ConfigError
from sdbench.base.files import replace_file
from sdbench.base.secrets import is_secret_name, redact
from sdbench.measure.hardware import as_dict
from sdbench.record.formulas import of_processes
from sdbench.record.history import cost_of_stops, read_history
from sdbench.record.provenance import speed_environment
from sdbench.record.store import FEED, OutputLog, RunFolder, load_record
from sdbench.run.outcome import RunRecord, explain
from tests.machines import make_cpu_machine, make_machine
from tests.refusals import refused
from tests.report.results_folder import RESULTS
from tests.report.test_feed_table import PUBLISHED


@pytest.mark.slow
def test_a_reader_never_sees_half_a_record(tmp_path):
    def write(num_times):
        for value in range(num_times):
            RunFolder(tmp_path).write_record({"value": value, "filler": "x" * 100_000})

    write(1)
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write, 50)
        while not writing.done():
            assert json.loads((tmp_path / "record.json").read_text())["value"] < 50
    writing.result()
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_writer_killed_half_way_leaves_the_old_record(tmp_path):
    RunFolder(tmp_path).write_record({"value": "old"})
    script = (
        "import os, pathlib, sdbench.record.store as r\n"
        "os.fsync = lambda fd: os._exit(9)\n"
        f"r.RunFolder(pathlib.Path({str(tmp_path)!r})).write_record({{'value': 'new'}})\n"
    )
    completed = subprocess.run([sys.executable, "-c", script], cwd=RESULTS.parent, check=False)
    assert completed.returncode == 9
    with pytest.raises(ValueError):
        RunFolder(tmp_path).write_record({"loss": float("nan")})
    assert json.loads((tmp_path / "record.json").read_text()) == {"value": "old"}


@pytest.mark.parametrize(
    ("content", "value", "known"),
    [
        ('{"schema_version": 1}', "schema_version 1", "reads 2"),
        ('{"schema_version": 2, "kind": "dream"}', "'dream'", "reads benchmark, feed, precompute"),
    ],
)
def test_a_record_that_this_version_does_not_know_is_refused(tmp_path, content, value, known):
    replace_file(tmp_path / "record.json", content)
    with pytest.raises(ValueError, match=f"{value}.* {known}"):
        load_record(tmp_path)


def test_a_record_of_another_kind_says_so_from_start_to_end(tmp_path):
    path = RunFolder.create(str(tmp_path), machine="2-core-cpu", name="feed-mds-512px")
    described = {"config": PUBLISHED["config"], "machine": as_dict(make_cpu_machine())}
    described["data"] = None
    task = SimpleNamespace(
        kind=FEED,
        program="data.py",
        record_name="record.json",
        folder_flag="--results_dir",
        for_record=lambda num_restarts: described,
    )
    record = RunRecord(task, path, command=["--seed", "1"], num_restarts=0)
    record.write_unfinished()
    content = load_record(path)
    assert (content["kind"], content["status"]) == ("feed", "failed")
    assert content["command"] == ["data.py", "--seed", "1"]
    assert "still running, or it was killed" in content["reason"]

    # The window is no longer than the run.
    summary = PUBLISHED["summary"] | {"window_s": 1e-6, "images_per_second": 1920e6}
    summary |= {"images_per_second_interval": None}
    summary |= of_processes(1920e6, num_processes=1, num_cores=2, target=None)
    ended = record.end_well({"summary": summary})
    content = load_record(path)
    assert content == json.loads(json.dumps(ended))
    assert (content["status"], content["reason"]) == ("ok", None)
    assert content["duration_s"] > 0
    for change in ({"dream": 1}, {"reason": "why"}, {"kind": "benchmark"}):
        (path / "record.json").write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=r"record.json: \$"):
            load_record(path)


def test_bad_input_that_only_the_work_finds_ends_with_2():
    failure = explain(ConfigError("short", value=1, allowed="2", flag="--x"), rank=3)
    assert (failure.status, failure.exit_code) == ("failed", 2)
    assert failure.reason.startswith("rank 3: short: got 1")


def test_the_events_of_a_run_are_read_without_damaged_lines_and_refused_if_they_are_strange(
    tmp_path,
):
    begin = {"event": "begin", "step": 0, "time_utc": "2026-11-21T05:00:00+00:00"}
    begin |= {"num_lost_steps": 0, "lost_s": 0.0, "down_s": 0.0, "passed_over": []}
    restart = begin | {"step": 3, "num_lost_steps": 2, "lost_s": 1.5, "down_s": 4.0}
    file = tmp_path / "history.jsonl"
    assert read_history(tmp_path) == []
    file.write_text(f"{json.dumps(begin)}\n{{cut off\n[]\n")
    assert read_history(tmp_path) == [begin]
    file.write_text('{"event": 7}\n')
    with refused("the folder of the run", value=str(file)):
        read_history(tmp_path)
    costs = {"num_restarts": 2, "num_lost_steps": 4, "lost_s": 3.0, "down_s": 8.0}
    assert cost_of_stops([begin, restart, {"event": "validation"}, restart]) == costs


@pytest.mark.parametrize(
    ("device", "bf16"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("AMD Instinct MI250X", 191.5),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA X9000", None),
    ],
)
def test_the_peaks_are_dense_and_of_one_device(device, bf16):
    machine = make_machine(device_name=device)
    assert machine.peak_tflops("amp_bf16") == machine.peak_tflops("bf16") == bf16


@pytest.mark.parametrize(
    ("machine", "slug", "precisions"),
    [
        (make_machine(), "8x-nvidia-h100-80gb-hbm3", "fp32 amp_fp16 tf32 amp_bf16 bf16"),
        (make_machine(compute_capability="7.0", device_name="V100"), "8x-v100", "fp32 amp_fp16"),
        (make_cpu_machine(device_name="Xeon(R)"), "2-core-xeon-r", "fp32 amp_bf16 bf16"),
    ],
)
def test_name_and_precisions_follow_from_the_device(machine, slug, precisions):
    assert (machine.slug, machine.supported_precisions()) == (slug, tuple(precisions.split()))


def test_every_published_record_has_the_form_of_today():
    """A new setting or key needs a new version, and the records the value that it had before."""
    paths = sorted(RESULTS.rglob("record.json"))
    assert len(paths) > 200
    for path in paths:
        load_record(path)


@pytest.mark.parametrize("pattern", ["*_sd2-base-256px-seed", "*_feed-*", "*-dreambooth"])
def test_a_record_with_a_setting_more_or_less_than_its_program_is_refused(tmp_path, pattern):
    published = json.loads((min(RESULTS.glob(f"runs/{pattern}")) / "record.json").read_text())
    for name, what in (("crop", "lacks settings: crop"), ("krop", "has unknown settings: krop")):
        record = copy.deepcopy(published)
        if name in record["config"]:
            del record["config"][name]
        else:
            record["config"][name] = None
        (tmp_path / "record.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match=what):
            load_record(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*_sd2-base-256px-seed", "summary.flags"),
        ("*_sd2-base-256px-seed", "workload.drawing"),
        ("*_sd2-base-256px-seed", "ranks.launcher"),
        ("*_feed-*", "data"),
        ("*_precompute-*", "config.buckets"),
        ("*-dreambooth", "other_versions"),
    ],
)
def test_a_record_that_lacks_a_key_that_is_always_written_is_refused(tmp_path, pattern, path):
    record = json.loads((min(RESULTS.glob(f"runs/{pattern}")) / "record.json").read_text())
    *parents, name = path.split(".")
    del functools.reduce(dict.__getitem__, parents, record)[name]
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"'{name}' is a required property"):
        load_record(tmp_path)


def test_the_environment_in_a_record_is_what_changes_speed_without_secrets(monkeypatch):
    recorded = (
        *("NCCL_DEBUG", "LD_PRELOAD", "ONEDNN_MAX_CPU_ISA", "DNNL_VERBOSE", "OMP_NUM_THREADS"),
        *("ATEN_CPU_CAPABILITY", "GLOO_SOCKET_IFNAME", "GLIBC_TUNABLES"),
    )
    for name in recorded:
        monkeypatch.setenv(name, "value")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NCCL_AUTH_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "secret")  # names a folder of the machine
    environment = speed_environment()
    assert {name: environment[name] for name in recorded} == dict.fromkeys(recorded, "value")
    assert "secret" not in environment.values()


def test_a_secret_is_known_by_its_name():
    secret = ["WANDB_API_KEY", "PGPASSWORD", "MYSQL_PWD", "GITHUB_PAT", "SSH_PASSPHRASE"]
    secret += ["hf_token", "AZURE_STORAGE_CONNECTION_STRING", "DOCKER_AUTH_CONFIG"]
    others = ["PWD", "OLDPWD", "PATH", "KEYBOARD", "OMP_NUM_THREADS"]
    assert [name for name in secret + others if is_secret_name(name)] == secret


def test_passwords_in_urls_and_lines_of_keys_are_secrets(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:pass-word-1@proxy:3128")
    assert redact("user me, pass-word-1") == "user me, <HTTPS_PROXY>"
    monkeypatch.setenv("TLS_PRIVATE_KEY", "-----BEGIN-----\nAAAABBBBCCCC\n-----END-----")
    assert redact("to http://me:pass-word-1@proxy:3128") == "to http://proxy:3128"
    assert redact("line AAAABBBBCCCC of it") == "line <TLS_PRIVATE_KEY> of it"


def test_secrets_of_the_environment_stay_out_of_records_and_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", 'abc"def-12345')
    monkeypatch.setenv("NCCL_AUTH_TOKEN", "nccl-token-value")
    monkeypatch.setenv("HF_TOKEN", "short")
    # With a byte of a name that is not UTF-8, as Python reads it from the command line.
    RunFolder(tmp_path).write_record({"command": ["caf\udce9", 'abc"def-12345/short'], "n": 1})
    written = json.loads((tmp_path / "record.json").read_text())
    assert written == {"command": ["caf\\udce9", "<WANDB_API_KEY>/short"], "n": 1}
    log = OutputLog()
    with log.capture():
        print('refused: abc"def-12345')
        log.move_to(tmp_path)
        sys.stderr.write("\r 50% of a bar")
        print("and nccl-token-value again", file=sys.stderr)
    kept = (tmp_path / "stdout.log").read_text()
    assert kept == "refused: <WANDB_API_KEY>\nand <NCCL_AUTH_TOKEN> again\n"
    assert capsys.readouterr().out.startswith("refused: ")


@pytest.mark.parametrize(
    ("machine", "device_type", "on_ray", "dtype"),
    [
        (make_cpu_machine(), "cpu", True, "bf16"),  # precompute with Ray and without it alike
        (make_cpu_machine(cpu_flags=()), "cpu", True, "fp32"),
        (make_cpu_machine(), "cuda", True, "fp16"),  # a GPU elsewhere, of whatever kind
        (make_machine(), "cuda", False, "bf16"),
        (make_machine(compute_capability="7.5"), "cuda", False, "fp16"),
        (make_machine(), "cuda", True, "fp16"),
    ],
)
def test_the_type_that_encoders_are_fast_in(machine, device_type, on_ray, dtype):
    assert machine.fast_dtype(device_type, on_ray=on_ray) == dtype


def test_steps_that_are_a_pipe_do_not_keep_a_reader_waiting(tmp_path):
    published = next(RESULTS.glob("runs/20261121T055223Z_*"))
    run = shutil.copytree(published, tmp_path / published.name)
    (run / "steps.csv").unlink()
    os.mkfifo(run / "steps.csv")
    assert load_record(run) == load_record(published)
