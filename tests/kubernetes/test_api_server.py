"""What does a real API server say to the manifests, and to what was wrong with published ones?

`make test-kubernetes` builds it. It is Kubernetes 1.20, the newest that Debian 12 has in source,
with neither a scheduler nor a kubelet: objects are accepted or refused, and no container starts.
Kubeflow's kinds are made known to it from the models of its packages.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import job_schemas
from tests.launch.rendering import (
    FAULTS,
    FOLDER,
    MANIFESTS,
    VALUES,
    as_pod,
    documents,
    plant,
    pod_specs,
    render,
)
from tests.ports import free_port

pytestmark = pytest.mark.cluster

BUILD = Path(__file__).with_name("build-api-server.sh")
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "build" / "kubernetes"
TOKEN = "only-for-this-test"
READY_WITHIN_S = 60


class Server:
    """An API server of this machine's alone."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs, self.folder = programs, folder
        self.port, self.etcd_port, self.peer_port = (free_port() for _ in range(3))
        self.processes: list[subprocess.Popen] = []

    def start(self) -> None:
        """Start it, and come back when it answers."""
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.etcd_port, self.peer_port))
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        key = self.folder / "key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens = self.folder / "tokens.csv"
        tokens.write_text(f"{TOKEN},admin,admin,system:masters\n")
        self._run(
            "kube-apiserver",
            f"--etcd-servers={client}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=AlwaysAllow",
            "--service-account-issuer=https://test",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
        )
        self._wait_for("/readyz", "ok")
        self._write_config()
        for kind in job_schemas.KINDS:
            completed = self.apply(job_schemas.make_definition(kind))
            assert completed.returncode == 0, completed.stderr
        for kind in job_schemas.KINDS:  # kubectl checks what it sends by what is published there
            self._wait_for("/openapi/v2", f'"kind":"{kind}"')

    def stop(self) -> None:
        """End it."""
        for process in reversed(self.processes):
            process.terminate()
            process.wait(30)

    def kubectl(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess:
        """Run kubectl."""
        return subprocess.run(
            [str(self.programs / "kubectl"), *arguments],
            env=self.environment(),
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def apply(self, *manifest: str | dict[str, Any]) -> subprocess.CompletedProcess:
        """Give a manifest to the server, as a text or as documents."""
        texts = [part if isinstance(part, str) else json.dumps(part) for part in manifest]
        return self.kubectl("apply", "-f", "-", text="\n---\n".join(texts))

    def environment(self) -> dict[str, str]:
        """The variables by which kubectl finds the server."""
        return {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "KUBECONFIG": str(self.folder / "config.json"),
        }

    def _run(self, program: str, *arguments: str) -> None:
        log = (self.folder / f"{program}.log").open("wb")
        command = [str(self.programs / program), *arguments]
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    def _wait_for(self, place: str, content: str) -> None:
        address = f"https://127.0.0.1:{self.port}{place}"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {TOKEN}"})
        end_s = time.monotonic() + READY_WITHIN_S
        answer = ""
        while content not in answer:
            assert time.monotonic() < end_s, f"{address} does not give {content}: {self._tail()}"
            assert all(process.poll() is None for process in self.processes), self._tail()
            time.sleep(0.2)
            try:
                context = ssl._create_unverified_context()
                with urllib.request.urlopen(request, context=context, timeout=10) as opened:
                    answer = opened.read().decode()
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                continue

    def _tail(self) -> str:
        return "\n".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))

    def _write_config(self) -> None:
        address = f"https://127.0.0.1:{self.port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": address, "insecure-skip-tls-verify": True}}
            ],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        (self.folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = Path(os.environ.get("KUBERNETES", DEFAULT_FOLDER))
    if os.geteuid() != 0 or not Path("/etc/debian_version").exists():
        pytest.skip("the API server is built from Debian's source package, by root")
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the server's key, is not installed")
    subprocess.run([str(BUILD), str(folder)], check=True)
    one = Server(folder / "bin", tmp_path_factory.mktemp("kubernetes"))
    try:
        one.start()
        yield one
    finally:
        one.stop()


@pytest.mark.parametrize("kind", MANIFESTS)
def test_the_server_takes_every_manifest(kind, server):
    completed = server.apply(render(kind))
    assert completed.returncode == 0, completed.stderr
    for document in documents(kind):
        found = server.kubectl("get", document["kind"], document["metadata"]["name"], "-o", "json")
        assert found.returncode == 0, found.stderr
        # Nothing that we wrote was left out as unknown.
        assert_holds(json.loads(found.stdout)["spec"], document["spec"])
    assert server.kubectl("delete", "-f", "-", text=render(kind)).returncode == 0


def assert_holds(kept: Any, written: Any) -> None:
    """What was written is there, beside what the server has added."""
    if isinstance(written, dict):
        for key, value in written.items():
            assert_holds(kept[key], value)
    elif isinstance(written, list):
        assert len(kept) == len(written)
        for one, other in zip(kept, written, strict=True):
            assert_holds(one, other)
    else:
        assert str(kept) == str(written)  # the server writes quantities as texts


@pytest.mark.parametrize("kind", MANIFESTS)
def test_the_server_takes_the_pods(kind, server):
    for spec in [spec for document in documents(kind) for spec in pod_specs(document)]:
        completed = server.apply(as_pod(spec))
        assert completed.returncode == 0, completed.stderr
        assert server.kubectl("delete", "pod", "pod", "--force", "--wait=true").returncode == 0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_server_sees_some_of_the_faults_and_not_others(fault, server):
    text = plant(fault)
    for name, value in VALUES.items():
        text = text.replace(f"${{{name}}}", value)
    refused = server.apply(text).returncode != 0
    server.kubectl("delete", "-f", "-", "--ignore-not-found", text=text)
    assert refused == fault.is_of_server


def test_the_server_refuses_a_pod_with_other_limits_than_requests(server):
    (spec, *_) = pod_specs(documents("eks"))
    spec["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": 4}
    completed = server.apply(as_pod(spec))
    assert completed.returncode != 0
    assert "must be equal to nvidia.com/gpu limit" in completed.stderr


def test_the_server_takes_the_reader_of_the_results_and_forgets_it(server, tmp_path):
    # No kubelet is there to start it, so that it is waited for in vain.
    script = tmp_path / "multi-node" / "collect-results.sh"
    script.parent.mkdir()
    text = (FOLDER / "collect-results.sh").read_text()
    assert "READY_WITHIN_S=300" in text
    script.write_text(text.replace("READY_WITHIN_S=300", "READY_WITHIN_S=2"))
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "my-results"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    assert server.apply(claim).returncode == 0
    completed = subprocess.run(
        ["bash", str(script), "my-results"],
        env=server.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "created" in completed.stdout
    assert completed.returncode == 1
    assert "error: the pod that reads the claim my-results does not start" in completed.stderr
    left = yaml.safe_load(server.kubectl("get", "pods", "-o", "yaml").stdout)["items"]
    assert left == []
