"""Model, data and W&B: each line sees what is missing, damaged, refused or out of reach."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sdbench.data import remote
from tests.data import datasets

KEY = "0123456789abcdef0123456789abcdef01234567"


def closed_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# --- The model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory) -> Path:
    """The tiny model as diffusers saves it."""
    from diffusers import DDPMScheduler

    from sdbench.models.architecture import resolve_architecture
    from sdbench.models.components import make_text_encoder, make_unet, make_vae
    from sdbench.models.weights import Weights

    architecture, _ = resolve_architecture("tiny")
    folder = tmp_path_factory.mktemp("models") / "mine"
    parts = {"unet": make_unet, "vae": make_vae, "text_encoder": make_text_encoder}
    for part, make in parts.items():
        make(architecture, weights=Weights(seed=1)).save_pretrained(folder / part)
    DDPMScheduler.from_config(architecture.scheduler).save_pretrained(folder / "scheduler")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"pad_token": "!"}')
    return folder


@pytest.fixture
def model(saved_model, tmp_path) -> Path:
    """A copy of it to break."""
    import shutil

    return Path(shutil.copytree(saved_model, tmp_path / "mine"))


WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


def test_weights_of_a_folder_are_opened(look, model):
    finding = look("--model_name", str(model))["model"]
    assert finding["level"] == "ok"
    assert finding["found"].startswith("mine, ")
    assert finding["found"].endswith(f" parameters trained, weights in 3 files of {model}")


def test_a_folder_without_weights_is_an_error(look, model):
    (model / WEIGHTS).unlink()
    findings = look("--model_name", str(model))
    assert findings["model"]["level"] == "error"
    assert findings["model"]["found"] == (
        "the model folder has no safetensors weights, and other formats can carry code: got "
        f"'{model / 'unet'}'"
    )
    assert findings["model"]["advice"].endswith("set --model_name")


def test_truncated_weights_are_an_error(look, model):
    whole = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    finding = look("--model_name", str(model))["model"]
    assert finding["level"] == "error"
    assert finding["found"].startswith("SafetensorError: ")


def test_a_hub_model_out_of_reach_is_an_error(look, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    finding = look("--model_name", "someone/no-such-model-of-ours")["model"]
    assert finding["level"] == "error"
    assert "the hub cannot be reached" in finding["found"]


def test_random_weights_of_a_known_hub_model_need_no_hub(look, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = ("--model_name", "stabilityai/stable-diffusion-2-base")
    assert look(*model)["model"]["level"] == "error"
    finding = look(*model, "--random_weights")["model"]
    assert finding["level"] == "ok"
    assert finding["found"] == (
        "sd2-base, 865,910,724 of 1,289,952,427 parameters trained, random weights"
    )


# --- The data ------------------------------------------------------------------------------------


def test_without_data_there_is_nothing_to_read(look):
    finding = look()["data"]
    assert finding["level"] == "skipped"


@pytest.mark.parametrize("kind", ["mds", "webdataset", "parquet", "folder"])
def test_the_first_sample_is_read(look, tmp_path, kind):
    folder = tmp_path / "data"
    datasets.WRITERS[kind](folder)
    finding = look("--remote", str(folder))["data"]
    assert finding["level"] == "ok", finding
    place = folder / "00000.tar" if kind == "webdataset" else folder
    num_samples = 5 if kind == "webdataset" else datasets.NUM_SAMPLES
    pattern = rf"the first of {num_samples} samples of {re.escape(str(place))} read in \d\.\d\d s"
    assert re.fullmatch(pattern, finding["found"])


def test_latents_of_another_model_are_an_error(look, tmp_path):
    datasets.write_mds_latents(tmp_path / "latents")
    finding = look("--remote", str(tmp_path / "latents"))["data"]
    assert finding["level"] == "error"
    assert "is of another model" in finding["found"]


def test_a_missing_first_shard_is_an_error(look, tmp_path):
    folder = tmp_path / "pairs"
    datasets.write_mds(folder)
    (folder / "shard.00000.mds").unlink()
    finding = look("--remote", str(folder))["data"]
    assert finding["level"] == "error"
    assert finding["found"] == (
        f"A shard that index.json names is missing from {folder}: got 'shard.00000.mds'"
    )
    assert "--remote" in finding["advice"]


def test_an_undecodable_first_sample_is_an_error(look, picture_folder):
    (picture_folder / "0.png").write_bytes(b"no picture")
    finding = look("--remote", str(picture_folder))["data"]
    assert finding["level"] == "error"
    assert "the image cannot be decoded" in finding["found"]


@pytest.fixture
def impatient(monkeypatch) -> Iterator[None]:
    """A store is asked once, for a second."""
    monkeypatch.setattr(remote, "SILENCE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(remote, "NUM_ATTEMPTS", 1)
    remote._make_s3_client.cache_clear()
    yield
    remote._make_s3_client.cache_clear()


def test_a_bucket_out_of_reach_is_an_error(look, monkeypatch, impatient):
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-length")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    finding = look("--remote", "s3://pictures/{00000..00127}.tar")["data"]
    assert finding["level"] == "error"
    assert finding["found"].startswith(
        "'s3://pictures/00000.tar' cannot be read: EndpointConnectionError: "
    )


class Files(BaseHTTPRequestHandler):
    """Serves the files of a folder by name, and remembers which were asked for."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        content = (self.folder / self.path.lstrip("/")).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments) -> None:
        """Say nothing."""


@pytest.fixture
def serve() -> Iterator:
    """A function from a handler to the URL of its server."""
    servers = []

    def start(handler: type[BaseHTTPRequestHandler]) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_of_many_tars_behind_a_url_only_the_first_is_copied(look, serve, tmp_path):
    datasets.write_tars(tmp_path / "tars")
    handler = type("Handler", (Files,), {"folder": tmp_path / "tars", "asked": []})
    place = f"{serve(handler)}/{{00000..00002}}.tar"
    finding = look("--remote", place, "--data_format", "webdataset")["data"]
    assert finding["level"] == "ok", finding
    assert "MB copied at " in finding["found"]
    assert set(handler.asked) == {"/00000.tar"}


# --- W&B -----------------------------------------------------------------------------------------


@pytest.fixture
def wandb(serve, monkeypatch):
    """A function that starts a server which gives one answer; returns what it was asked."""

    def start(code: int, body: str = "{}") -> list[dict]:
        requests: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                requests.append(
                    {
                        "path": self.path,
                        "authorization": self.headers["Authorization"],
                        "query": json.loads(self.rfile.read(length))["query"],
                    }
                )
                self.send_response(code)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *arguments) -> None:
                """Say nothing."""

        monkeypatch.setenv("WANDB_BASE_URL", serve(Handler))
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        return requests

    return start


def look_at_wandb(look) -> dict:
    finding = look("--wandb_project", "mine")["W&B"]
    assert KEY not in json.dumps(finding)
    return finding


def test_nothing_is_asked_unless_a_project_is_named(look, wandb):
    requests = wandb(200)
    assert look()["W&B"]["level"] == "skipped"
    assert requests == []


def test_a_server_that_knows_the_key_is_fine(look, wandb):
    requests = wandb(200, '{"data": {"viewer": {"id": "me"}}}')
    finding = look_at_wandb(look)
    assert finding["level"] == "ok", finding
    token = base64.b64encode(f"api:{KEY}".encode()).decode()
    assert requests == [
        {
            "path": "/graphql",
            "authorization": f"Basic {token}",
            "query": "query Viewer { viewer { id } }",
        }
    ]


@pytest.mark.parametrize(
    ("code", "body", "found"),
    [
        (401, "{}", "does not accept the key (401)"),
        (200, '{"data": {"viewer": null}}', "does not accept the key"),
        (502, "{}", "answers 502"),
        # The key must not follow it.
        (302, "{}", "answers 302"),
        (200, "<html>", "does not answer as W&B does"),
    ],
)
def test_any_other_answer_is_an_error(look, wandb, code, body, found):
    wandb(code, body)
    finding = look_at_wandb(look)
    assert finding["level"] == "error"
    assert found in finding["found"]


def test_a_server_out_of_reach_is_an_error(look, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    finding = look_at_wandb(look)
    assert finding["level"] == "error"
    assert "Connection refused" in finding["found"]


def test_the_key_of_a_netrc_file_is_used(look, wandb, monkeypatch, tmp_path):
    requests = wandb(200, '{"data": {"viewer": {"id": "me"}}}')
    monkeypatch.delenv("WANDB_API_KEY")
    assert look_at_wandb(look)["level"] == "warning"
    file = tmp_path / "netrc"
    file.write_text(f"machine 127.0.0.1\n  login user\n  password {KEY}\n")
    monkeypatch.setenv("NETRC", str(file))
    assert look_at_wandb(look)["level"] == "ok"
    assert len(requests) == 1
    file.write_text(f"machine 127.0.0.1\n  login user\n  passwort {KEY}\n")
    finding = look_at_wandb(look)
    assert (finding["level"], finding["found"]) == (
        "error",
        f"{file} cannot be understood, line 3",
    )


def test_offline_nothing_is_asked(look, wandb, monkeypatch):
    requests = wandb(401)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert look_at_wandb(look)["level"] == "skipped"
    assert requests == []
