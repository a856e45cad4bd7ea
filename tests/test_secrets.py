"""Passwords, signed URLs and tokens stay out of all that a run writes and prints."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

import pytest

import benchmark
import data
from sdbench import cli
from sdbench.base.secrets import redact
from sdbench.data.places import remote
from sdbench.results.submissions import secrets_in
from tests.data import datasets
from tests.report.results_folder import RESULTS, make_record, make_results

SECRET = "SuperSecret123"
RUN = (
    *("--model_name", "tiny", "--image_size", "64", "--batch_size", "2", "--num_workers", "0"),
    *("--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "0"),
    "--no_measure_peak",
)
FEED = ("--image_size", "64", "--batch_size", "2", "--num_workers", "0", "--num_batches", "2")
# Where a password may stand in the place of data, and what is left of the place.
PLACES = {
    "user": (f"http://me:{SECRET}@{{host}}/tars/00001.tar", "http://{host}/tars/00001.tar"),
    "signed": (
        "http://{host}/tars/00001.tar?X-Amz-Credential=a/b/aws4_request"
        f"&X-Amz-Signature={SECRET}#{SECRET}",
        "http://{host}/tars/00001.tar",
    ),
    "pipe": (
        f"pipe:cat {{folder}}/tars/00001.tar # -H \"Authorization: Bearer {SECRET}\" -H 'it'",
        "pipe:cat",
    ),
}


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def copyfile(self, source, outputfile) -> None:
        with contextlib.suppress(BrokenPipeError):  # who asks for the version takes no content
            super().copyfile(source, outputfile)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch, plain_replay):
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    monkeypatch.setattr(remote, "NUM_ATTEMPTS", 0)


@pytest.fixture
def served(tmp_path):
    """A folder and the host that serves it: tars/0000N.tar, and MDS without its shards."""
    datasets.write_tars(tmp_path / "data" / "tars")
    datasets.write_mds(tmp_path / "data" / "pairs")
    handler = functools.partial(_Handler, directory=str(tmp_path / "data"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"folder": tmp_path / "data", "host": f"127.0.0.1:{server.server_port}"}
        server.shutdown()


def files_with_secret(*folders: Path) -> list[Path]:
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert paths
    return [path for path in paths if SECRET.encode() in path.read_bytes()]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs in this process, as from the command line; returns the exit code and the record."""

    def run(main, *argv):
        command = [*argv, "--results_dir", str(tmp_path / "runs")]
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *command])
        exit_code = main(command)
        found = list((tmp_path / "runs").glob("*/record.json"))
        return exit_code, json.loads(found[0].read_text()) if found else None

    return run


@pytest.mark.parametrize(
    ("program", "kind"), [("benchmark", "user"), ("data", "signed"), ("data", "pipe")]
)
def test_no_output_of_a_run_holds_the_secret_of_its_place(
    program, kind, tmp_path, run, served, capfd
):
    place, kept = (text.format(**served) for text in PLACES[kind])
    main, argv = (benchmark.main, RUN) if program == "benchmark" else (data.main, FEED)
    # What W&B keeps of the command line and of the output lies in the run's folder.
    has_wandb = program == "benchmark" and kind == "user"
    argv += ("--wandb_project", "p") * has_wandb
    place_flags = ("--data_format", "webdataset", f"--remote={place}")
    exit_code, record = run(main, *argv, *place_flags)
    assert exit_code == 0
    assert record["config"]["remote"] == kept
    assert f"--remote={kept}" in record["command"]
    assert bool(list((tmp_path / "runs").glob("*/wandb/offline-run-*/*.wandb"))) == has_wandb

    results = make_results(tmp_path / "results", quoted=False)
    folder = tmp_path / "runs" / record["run_id"]
    assert cli.main(["publish", str(folder), "--folder", str(results)]) == 0
    assert files_with_secret(tmp_path / "runs", results) == []
    assert SECRET not in "".join(capfd.readouterr())
    published = results / "runs" / record["run_id"]
    assert json.loads((published / "record.json").read_text())["config"]["remote"] == kept
    assert all(str(tmp_path) not in path.read_text() for path in published.iterdir())
    names = {"record.json", "stdout.log"} | ({"steps.csv"} if program == "benchmark" else set())
    assert {path.name for path in published.iterdir()} == names


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (f"http://me:{SECRET}@127.0.0.1:1/0.tar", "http://127.0.0.1:1/0.tar"),
        (f"http://127.0.0.1:1/0.tar?X-Amz-Signature={SECRET}", "http://127.0.0.1:1/0.tar"),
        (
            f"pipe:cat none-here -H 'Authorization: Bearer {SECRET}'",
            " ended with exit code 1: cat: ",
        ),
    ],
)
@pytest.mark.parametrize("program", ["data", "verify-data"])
def test_no_error_holds_the_secret_of_a_place_that_cannot_be_read(
    program, place, named, tmp_path, run, capfd
):
    flags = ("--data_format", "webdataset")
    if program == "verify-data":
        assert cli.main(["verify-data", place, *flags]) == 1
    else:
        exit_code, record = run(data.main, *FEED, *flags, "--remote", place)
        assert exit_code == 1 and named in record["reason"]
        assert files_with_secret(tmp_path / "runs") == []
    printed = "".join(capfd.readouterr())
    assert named in printed and SECRET not in printed


def test_a_wrong_value_and_the_config_are_printed_without_it(run, capfd):
    streams = f"http://me:{SECRET}@host/a=0.7,http://me:{SECRET}@host/b=0.3"
    flags = ("--data_format", "webdataset", "--streams", streams)
    assert run(benchmark.main, *RUN, *flags)[0] == 2
    flags = ("--use_synth_data", "--class_prompts", f"pipe:a {'b ' * 60}{SECRET}")
    assert run(benchmark.main, *RUN, *flags, "--print_config")[0] == 0
    assert benchmark.main([f"http://me:{SECRET}@host"]) == 2
    out, err = capfd.readouterr()
    assert SECRET not in out + err
    assert "class_prompts: pipe:a\n" in out


def test_an_unfinished_conversion_keeps_no_secret_and_knows_its_source(tmp_path, served, capfd):
    with tarfile.open(served["folder"] / "tars" / "bad.tar", "w") as tar:
        for name in ("a.png", "a.txt"):
            tar.addfile(tarfile.TarInfo(name))

    def convert(password, name="bad"):
        source = f"http://me:{password}@{served['host']}/tars/{name}.tar"
        return cli.main(
            ["convert", source, "--folder", str(tmp_path / "mds"), "--num_workers", "0"]
        )

    shutil.copy(served["folder"] / "tars" / "bad.tar", served["folder"] / "tars" / "other.tar")
    assert convert(SECRET) == 1
    assert files_with_secret(tmp_path / "mds.partial") == []
    for password in (SECRET, "another"):
        assert convert(password) == 1  # goes on, as far as the bad sample
    assert convert(SECRET, "other") == 2
    output = "".join(capfd.readouterr())
    assert "with another source" in output and SECRET not in output


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("s3://bucket/{00000..00127}.tar", "s3://bucket/{00000..00127}.tar"),
        ("a 'http://me:p/w@h:80/a', b", "a 'http://h:80/a', b"),
        ("http://h:80/data@v2/x.tar", "http://h:80/data@v2/x.tar"),
        ("oci://bucket@namespace/a", "oci://bucket@namespace/a"),
        ("http://h/a?b=c=0.7,s3://d/e=0.3", "http://h/a,s3://d/e=0.3"),
        ("with url: /0.tar?sig=secret (Caused by", "with url: /0.tar (Caused by"),
        ("> Authorization: Basic c2VjcmV0 <", "> Authorization: <secret> <"),
        ("pipe:curl -H 'a: secret' \"b\" it's\nnext", "pipe:curl\nnext"),
        ("got " + repr("pipe:c 'a' \"secret\"") + "; allowed: x", "got 'pipe:c'; allowed: x"),
        (json.dumps({"a": 'pipe:c -H "secret"', "b": 1}), '{"a": "pipe:c", "b": 1}'),
        ("x '--remote=pipe:c '\"'\"'secret'\"'\"' b' --y", "x '--remote=pipe:c' --y"),
        ("pipe:TOKEN=secret /bin/curl http://h", "pipe:"),
        ("Broken pipe: the reader is gone", "Broken pipe: the reader is gone"),
    ],
)
def test_what_is_left_of_a_text(text, kept):
    assert redact(text) == kept
    assert redact(kept) == kept


# Each kind of secret, and each place of a text.
@pytest.mark.parametrize(
    ("field", "text", "kind"),
    [
        ("config.remote", f"http://me:{SECRET}@host/a", "user info"),
        ("command[1]", f"http://host/a?x=1&X-Amz-Signature={SECRET}", "signature"),
        ("line 2", f"curl -H 'Authorization: Bearer {SECRET}'", "Authorization"),
        ("line 2", f"AKIA{'A1' * 8}", "access key id"),
        ("line 2", "-----BEGIN RSA PRIVATE KEY-----", "private key"),
        ("config.remote", f"hf_{'aB3' * 12}", "token"),
        ("command[1]", f"ghp_{'aB3' * 12}", "token"),
    ],
)
def test_a_run_with_a_secret_is_not_published(text, kind, field, tmp_path, capsys):
    record = make_record()
    if field == "config.remote":
        record["config"]["remote"] = text
    elif field == "command[1]":
        record["command"] = ["benchmark.py", text]
    folder = make_results(tmp_path / "of", record, quoted=False) / "runs"
    (run_folder,) = folder.iterdir()
    (run_folder / "stdout.log").write_text(f"first\n{text if field == 'line 2' else ''}\n")
    results = make_results(tmp_path / "results", quoted=False)
    assert cli.main(["publish", str(run_folder), "--folder", str(results)]) == 2
    error = capsys.readouterr().err
    file = "stdout.log" if field == "line 2" else "record.json"
    assert f"{file}, {field}: " in error and kind in error
    assert SECRET not in error
    assert not (results / "runs").exists()


@pytest.mark.slow
def test_no_committed_result_looks_like_a_secret():
    """The patterns are those of the test above, which finds each of them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", str(RESULTS)], cwd=RESULTS, check=True, capture_output=True
    )
    paths = [RESULTS / name for name in listed.stdout.decode().split("\0") if name]
    texts = [path for path in paths if path.suffix not in (".png", ".pdf")]
    assert len(texts) > 300
    assert [f"{path}: {found}" for path in texts for found in secrets_in(path)] == []
