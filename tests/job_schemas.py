"""Checks of job kinds against the models of Kubeflow's own Python packages, and of KubeRay.

A PyTorchJob is read and written again by kubeflow-training, a TrainJob and its runtime by
kubeflow-trainer-api: a field that their models do not have is lost on the way. The models tell
names and types; they know no enumerations.

No package of PyPI, npm or Debian has KubeRay's definitions. The fields that our RayJob uses stand
here as "KubeRay CRD API reference" of Ray's documentation lists them for KubeRay 1.7.0; those that
KubeRay's Go types do not leave out when they are empty are required.
"""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import jsonschema

from tests.launch.rendering import pod_specs

KINDS = {
    "PyTorchJob": "kubeflow.org/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "RayJob": "ray.io/v1",
}


def validate(document: dict[str, Any]) -> None:
    """Check a document of one of the kinds, but for its descriptions of pods."""
    kind = document["kind"]
    assert document["apiVersion"] == KINDS[kind]
    if kind == "RayJob":
        jsonschema.Draft202012Validator(RAY_JOB).validate(document)
        return
    document = copy.deepcopy(document)
    for spec in pod_specs(document):
        spec.clear()
        spec["containers"] = []
    if kind == "PyTorchJob":
        from kubeflow.training import ApiClient

        client = ApiClient()
        response = SimpleNamespace(data=json.dumps(document))
        job = client.deserialize(response, "KubeflowOrgV1PyTorchJob")
        assert client.sanitize_for_serialization(job) == document
    else:
        from kubeflow_trainer_api import models

        model = getattr(models, f"TrainerV1alpha1{kind}")
        assert model.from_dict(document).to_dict() == document


def _fields(*required: str, **fields: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has no other fields."""
    closed = {"type": "object", "additionalProperties": False}
    return {**closed, "properties": fields, "required": list(required)}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
OBJECT = {"type": "object"}
GROUP = {
    "rayStartParams": TEXTS,
    "resources": TEXTS,
    "template": _fields(metadata=OBJECT, spec=OBJECT),
}
WORKER_GROUP = _fields(
    *("groupName", "maxReplicas", "minReplicas", "template"),
    groupName=TEXT,
    maxReplicas=NUMBER,
    minReplicas=NUMBER,
    replicas=NUMBER,
    **GROUP,
)
RAY_JOB = _fields(
    apiVersion=TEXT,
    kind=TEXT,
    metadata=OBJECT,
    spec=_fields(
        backoffLimit=NUMBER,
        entrypoint=TEXT,
        rayClusterSpec=_fields(
            "headGroupSpec",
            authOptions=_fields(mode=TEXT),
            headGroupSpec=_fields("template", **GROUP),
            rayVersion=TEXT,
            workerGroupSpecs={"type": "array", "items": WORKER_GROUP},
        ),
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
    ),
)
