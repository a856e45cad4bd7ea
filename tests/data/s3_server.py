"""A real S3 server on this machine, and a gateway in front of it that misbehaves on request."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sdbench.data import remote
from tests.ports import free_port

BUCKET = "pictures"
START_TIMEOUT_S = 30


class S3Server:
    """Moto's server, its data in memory, reached through a gateway.

    Attributes:
        url: Of the gateway.
        num_busy: So many of the next requests are answered by 503.
        pause_s: Each answer is delayed by so long.
        cut_after: Answers break off after so many bytes of their body.
        num_cuts: So many of the next bodies break off so; None for all.
        num_requests: Requests that came to the gateway.
        num_bytes: Bytes of the bodies that it sent.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._gateway = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(self))
        threading.Thread(target=self._gateway.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._gateway.server_port}"
        self.behave()

    def behave(self) -> None:
        """Stop misbehaving."""
        self.num_busy = 0
        self.pause_s = 0.0
        self.cut_after: int | None = None
        self.num_cuts: int | None = None
        self.num_requests = self.num_bytes = 0

    def wait(self) -> None:
        """Wait until the server answers."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.1)
        raise TimeoutError("moto's server did not start")

    def die(self) -> None:
        """Kill the server, as a machine that is switched off."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End both."""
        self._gateway.shutdown()
        self._gateway.server_close()
        self.die()

    def client(self):
        """A client that goes past the gateway."""
        import boto3

        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}")

    def upload(self, folder: Path, prefix: str) -> str:
        """Put a folder's files into the bucket; returns its URL."""
        client = self.client()
        for path in sorted(folder.iterdir()):
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"


def _make_handler(server: S3Server) -> type[BaseHTTPRequestHandler]:
    class Gateway(BaseHTTPRequestHandler):
        """Passes requests on, or not."""

        def do_GET(self) -> None:
            server.num_requests += 1
            if server.num_busy > 0:
                server.num_busy -= 1
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            time.sleep(server.pause_s)
            behind = http.client.HTTPConnection("127.0.0.1", server.port)
            try:
                behind.request(self.command, self.path, headers=dict(self.headers))
                answer = behind.getresponse()
                body = answer.read()
            except OSError:
                self.close_connection = True
                return
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            cut_after = server.cut_after if body and server.num_cuts != 0 else None
            if cut_after is not None and server.num_cuts is not None:
                server.num_cuts -= 1
            body = body[:cut_after]
            server.num_bytes += len(body)
            self.wfile.write(body)
            self.close_connection = cut_after is not None

        do_HEAD = do_GET

        def log_message(self, *arguments) -> None:
            """Say nothing."""

    return Gateway


@pytest.fixture
def impatient(monkeypatch) -> Iterator[None]:
    """A server that is silent for a second is given up, and is asked three times."""
    monkeypatch.setattr(remote, "SILENCE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(remote, "NUM_ATTEMPTS", 3)
    remote._make_s3_client.cache_clear()
    yield
    remote._make_s3_client.cache_clear()


@pytest.fixture(scope="module")
def running_s3() -> Iterator[S3Server]:
    """One server for the tests of a module, with an empty bucket."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        server = S3Server()
        try:
            server.wait()
            patch.setenv("S3_ENDPOINT_URL", server.url)
            server.client().create_bucket(Bucket=BUCKET)
            yield server
        finally:
            server.close()


@pytest.fixture
def s3(running_s3: S3Server) -> S3Server:
    """The module's server, on its best behaviour."""
    running_s3.behave()
    return running_s3
