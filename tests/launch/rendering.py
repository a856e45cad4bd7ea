"""Manifests as `python -m sdbench render` writes them, and what was wrong with published ones."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sdbench.cli import main
from sdbench.launch.render import MANIFESTS as OF_RENDER
from sdbench.launch.render import VARIABLES, find_names

FOLDER = Path(__file__).resolve().parents[2] / "multi-node"
MANIFESTS = tuple(OF_RENDER)

# Three nodes with eight GPUs, and two encoders, as the variables of a template.
VALUES = {
    "REGISTRY": "registry.example.com/team/",
    "DOCKER_IMAGE_NAME": "mosaicml-stable-diffusion",
    "TAG": "0.32.1",
    "NUM_NODES": "3",
    "NUM_GPUS_PER_NODE": "8",
    "NUM_EFA_PER_NODE": "32",
    "NUM_WORKERS": "2",
    "WORLD_SIZE": "24",
    "NUM_ENCODERS": "2",
    "NUM_DECODERS": "8",
    "TRAINER_INSTANCE_TYPE": "p4de.24xlarge",
    "ENCODER_INSTANCE_TYPE": "g5.2xlarge",
    "PROGRAM": "benchmark.py",
    "REMOTE": "s3://bucket/laion",
    "MASTER_PORT": "29500",
    "RDZV_BACKEND": "etcd",
    "RDZV_HOST": "etcd",
    "RDZV_PORT": "2379",
    "RUN_ID": "run-1",
    "RESULTS_CLAIM": "stable-diffusion-results",
}


def template_of(kind: str) -> Path:
    """The template of a kind."""
    return FOLDER / OF_RENDER[kind].template


def flags_for(text: str, **changes: str) -> list[str]:
    """The flags that give a template's variables the values above, unless changed."""
    values = {**VALUES, **changes}
    names = [name for name in VARIABLES if name in find_names(text, path=FOLDER)]
    return [part for name in names for part in (f"--{name.lower()}", values[name])]


def render(kind: str, *arguments: str, **changes: str) -> str:
    """A manifest with the values above, unless changed."""
    output = io.StringIO()
    flags = flags_for(template_of(kind).read_text(), **changes)
    with contextlib.redirect_stdout(output):
        assert main(["render", kind, *flags, *arguments]) == 0
    return output.getvalue()


def documents(kind: str, *arguments: str, **changes: str) -> list[dict[str, Any]]:
    """The documents of a manifest."""
    return list(yaml.safe_load_all(render(kind, *arguments, **changes)))


def pod_specs(value: Any) -> list[dict[str, Any]]:
    """Every description of a pod in a document, wherever its kind keeps it."""
    if isinstance(value, list):
        return [spec for part in value for spec in pod_specs(part)]
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("containers"), list):
        return [value]
    return [spec for part in value.values() for spec in pod_specs(part)]


def as_pod(spec: dict[str, Any]) -> dict[str, Any]:
    """A pod of its own from the description that a job holds."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


class Fault(NamedTuple):
    """A fault of a published manifest, planted into ours, and who finds it.

    Attributes:
        name: For people.
        old: What stands in the template of the PyTorchJob.
        new: What the published one has there.
        place: Where render finds it; None where it cannot know.
        value: What it finds there.
        is_of_schema: Whether the schema of a PyTorchJob or of a Pod finds it.
    """

    name: str
    old: str
    new: str
    place: str | None
    value: object
    is_of_schema: bool


MASTER = "PyTorchJob.spec.pytorchReplicaSpecs.Master.template.spec.containers.0"
WORKER = "PyTorchJob.spec.pytorchReplicaSpecs.Worker"
FAULTS = (
    Fault(
        "a tag without its dollar sign",
        ":${TAG}",
        ":{TAG}",
        f"{MASTER}.image",
        "registry.example.com/team/mosaicml-stable-diffusion:{TAG}",
        is_of_schema=False,
    ),
    Fault(
        "no number of pods, as after a variable that was not set",
        "replicas: ${NUM_WORKERS}",
        "replicas:",
        f"{WORKER}.replicas",
        None,
        is_of_schema=True,
    ),
    Fault(
        "a misspelt field",
        "cleanPodPolicy",
        "cleanPodPolcy",
        None,
        None,
        is_of_schema=True,
    ),
)


def plant(fault: Fault) -> str:
    """The template of the PyTorchJob with a fault in it."""
    text = template_of("eks").read_text()
    assert text.count(fault.old) == 1
    return text.replace(fault.old, fault.new)
