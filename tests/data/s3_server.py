"""A real S3 server in this process, which misbehaves on request."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sdbench.data.places import remote

BUCKET = "pictures"


class S3Server:
    """Moto's server, its data in memory: at `port`, and at `url`, where it may misbehave."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._answer = DomainDispatcherApplication(create_backend_app)
        self._servers = [
            make_server("127.0.0.1", 0, answer, threaded=True)
            for answer in (self._answer, self._misbehave)
        ]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self.port, port = (server.server_port for server in self._servers)
        self.url = f"http://127.0.0.1:{port}"
        self.behave()

    def behave(self) -> None:
        """Stop misbehaving."""
        self.num_busy = 0  # so many of the next requests are answered by 503
        self.pause_s = 0.0  # before each answer
        self.cut_after: int | None = None  # so many bytes of a body its answer breaks off
        self.num_cuts: int | None = None  # so many of the next bodies break off; None: all
        self.num_requests = self.num_bytes = 0  # that came, and of the bodies that were sent

    def die(self) -> None:
        """Answer no more."""
        for server in self._servers:
            with contextlib.suppress(OSError):  # it is dead already
                server.socket.shutdown(socket.SHUT_RDWR)  # forked workers hold it too
            server.shutdown()
            server.server_close()

    def client(self):
        """A client that it does not misbehave for."""
        import boto3

        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}")

    def upload(self, folder: Path, prefix: str) -> str:
        """Put a folder's files into the bucket; returns its URL."""
        client = self.client()
        for path in sorted(folder.iterdir()):
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def _misbehave(self, environment: dict, start_response: Callable) -> list[bytes]:
        self.num_requests += 1
        if self.num_busy > 0:
            self.num_busy -= 1
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return []
        time.sleep(self.pause_s)
        body = b"".join(self._answer(environment, start_response))
        if body and self.cut_after is not None and self.num_cuts != 0:
            body = body[: self.cut_after]
            self.num_cuts = self.num_cuts and self.num_cuts - 1
        self.num_bytes += len(body)
        return [body]


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
        patch.setenv("S3_ENDPOINT_URL", server.url)
        server.client().create_bucket(Bucket=BUCKET)
        yield server
        server.die()


@pytest.fixture
def s3(running_s3: S3Server) -> S3Server:
    """The module's server, on its best behaviour."""
    running_s3.behave()
    return running_s3
