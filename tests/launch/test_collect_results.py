"""Does multi-node/collect-results.sh bring the runs here, and leave nothing behind?

kubectl is a stand-in that writes down what it is asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

SCRIPT = Path(__file__).resolve().parents[2] / "multi-node" / "collect-results.sh"
KUBECTL = f"""\
#!{sys.executable}
import os, pathlib, shutil, sys
folder = pathlib.Path(os.environ["FAKE_KUBECTL"])
with (folder / "calls.txt").open("a") as calls:
    print(*sys.argv[1:], file=calls)
words = [word for word in sys.argv[1:] if word in ("apply", "wait", "describe", "cp", "delete")]
if words == ["apply"]:
    (folder / "pod.yaml").write_text(sys.stdin.read())
if words == ["cp"] and (folder / "volume").is_dir():
    shutil.copytree(folder / "volume", sys.argv[-1], dirs_exist_ok=True)
if words == ["describe"]:
    print("no such claim")
sys.exit(words == [os.environ.get("FAKE_FAILURE")])
"""


@pytest.fixture
def fake(tmp_path):
    """A folder for the stand-in, with a volume that holds two runs and a table."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    for run in ("run1", "run2"):
        folder = tmp_path / "volume" / run
        folder.mkdir(parents=True)
        (folder / "record.json").write_text("{}")
    (tmp_path / "volume" / "runs.csv").write_text("source\n")
    return tmp_path


def collect(fake, *arguments, failure="", image=""):
    environment = {
        **os.environ,
        "PATH": f"{fake / 'bin'}:{os.environ['PATH']}",
        "FAKE_KUBECTL": str(fake),
        "FAKE_FAILURE": failure,
        "IMAGE": image,
    }
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


def calls(fake):
    return (fake / "calls.txt").read_text().splitlines()


def test_the_runs_of_a_claim_are_copied_by_a_pod_that_only_reads(fake):
    target = fake / "here"
    completed = collect(fake, "my-results", str(target), image="example.com/box:1")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.endswith(f"2 runs in {target}\n")
    assert sorted(path.name for path in target.iterdir()) == ["run1", "run2", "runs.csv"]
    pod = yaml.safe_load((fake / "pod.yaml").read_text())
    kubernetes_validate.validate(pod, "1.37", strict=True)
    name = pod["metadata"]["name"]
    assert calls(fake) == [
        "apply -f -",
        f"wait --for=condition=Ready pod/{name} --timeout=300s",
        f"cp --retries=5 {name}:/results {target}",
        f"delete pod {name} --ignore-not-found --wait=false",
    ]
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert container["image"] == "example.com/box:1"
    mount = {"name": "results", "mountPath": "/results", "readOnly": True}
    claim = {"name": "results", "persistentVolumeClaim": {"claimName": "my-results"}}
    assert (container["volumeMounts"], spec["volumes"]) == ([mount], [claim])
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["activeDeadlineSeconds"] == 3600


def test_a_claim_without_runs_is_a_failure_and_every_call_has_the_namespace(fake):
    (fake / "volume").rename(fake / "gone")
    completed = collect(fake, "--namespace", "team", "my-results", str(fake / "x"))
    assert completed.returncode == 1
    assert completed.stderr == "error: the claim my-results holds no record of a run\n"
    assert calls(fake)[-1].startswith("--namespace team delete pod results-reader-")
    assert all(call.startswith("--namespace team ") for call in calls(fake))


@pytest.mark.parametrize("step", ["apply", "wait", "cp"])
def test_the_reader_is_deleted_whatever_fails(step, fake):
    completed = collect(fake, "my-results", str(fake / "x"), failure=step)
    assert completed.returncode == 1
    assert calls(fake)[-1].startswith("delete pod results-reader-")
    if step == "wait":
        assert completed.stderr.startswith("no such claim\nerror: the pod that reads the claim my-")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--namespace"], "no namespace is given: got ''; allowed: the namespace of the job; "),
        (["My_Claim"], "this is not the name of a claim: got 'My_Claim'; "),
    ],
)
def test_bad_arguments_reach_no_cluster(arguments, sentence, fake):
    completed = collect(fake, *arguments)
    assert completed.returncode == 2
    assert completed.stderr.startswith(f"error: {sentence}")
    assert not (fake / "calls.txt").exists()
