"""Manifests as `python -m sdbench render` writes them."""

from __future__ import annotations

import contextlib
import io
import string
from pathlib import Path
from typing import Any

import yaml

from sdbench.cli import main
from sdbench.launch.render import ETCD, VARIABLES
from sdbench.launch.render import MANIFESTS as OF_RENDER

FOLDER = Path(__file__).resolve().parents[2] / "multi-node"
MANIFESTS = (*OF_RENDER, "etcd")

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
    "ARGUMENTS": "--use_synth_data --use_ema --device_train_microbatch_size=4",
}


def template_of(kind: str) -> str:
    """The template of a kind."""
    return (FOLDER / OF_RENDER[kind].template).read_text()


def flags_for(kind: str, **changes: str) -> list[str]:
    """The flags that give a template's variables the values above, unless changed."""
    values = {**VALUES, **changes}
    names = string.Template(template_of(kind)).get_identifiers()
    return [f"--{name.lower()}={values[name]}" for name in VARIABLES if name in names]


def render(kind: str, *arguments: str, **changes: str) -> str:
    """A manifest with the values above, unless changed."""
    output = io.StringIO()
    flags = flags_for(kind, **changes)
    with contextlib.redirect_stdout(output):
        assert main(["render", kind, *flags, *arguments]) == 0
    return output.getvalue()


def documents(kind: str, *arguments: str, **changes: str) -> list[dict[str, Any]]:
    """The documents of a manifest; that of the etcd has no variables."""
    is_etcd = kind == "etcd"
    text = (FOLDER / ETCD).read_text() if is_etcd else render(kind, *arguments, **changes)
    return list(yaml.safe_load_all(text))


def pod_specs(value: Any) -> list[dict[str, Any]]:
    """Every description of a pod in a document, wherever its kind keeps it."""
    if isinstance(value, list):
        return [spec for part in value for spec in pod_specs(part)]
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("containers"), list):
        return [value]
    return [spec for part in value.values() for spec in pod_specs(part)]
