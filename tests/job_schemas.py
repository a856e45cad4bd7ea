"""Checks job kinds by the models of Kubeflow's own Python packages, and by a table of KubeRay's.

A TrainJob and its runtime are in kubeflow-trainer-api, which also has the parts of Kubernetes that
jobs hold, and a PyTorchJob in kubeflow-training. The models tell names and types; they know no
enumerations.

No package of PyPI, npm or Debian has KubeRay's definitions. The fields that our RayJob uses stand
here as "KubeRay CRD API reference" of Ray's documentation lists them for KubeRay 1.7.0.
"""

from __future__ import annotations

import re
from typing import Any

KINDS = {
    "PyTorchJob": "kubeflow.org/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "RayJob": "ray.io/v1",
}
PLAIN = {"str": str, "bool": bool, "int": int}
PYDANTIC = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "V1ObjectMeta": "IoK8sApimachineryPkgApisMetaV1ObjectMeta",
}
# Types in the words of kubeflow-training's models.
TEXTS = "dict(str, str)"
RAY_TYPES = {
    "RayJob": {
        "apiVersion": "str",
        "kind": "str",
        "metadata": "V1ObjectMeta",
        "spec": "RayJobSpec",
    },
    "RayJobSpec": {
        "backoffLimit": "int",
        "entrypoint": "str",
        "rayClusterSpec": "RayClusterSpec",
        "runtimeEnvYAML": "str",
        "shutdownAfterJobFinishes": "bool",
    },
    "RayClusterSpec": {
        "authOptions": "AuthOptions",
        "headGroupSpec": "HeadGroupSpec",
        "rayVersion": "str",
        "workerGroupSpecs": "list[WorkerGroupSpec]",
    },
    "AuthOptions": {"mode": "str"},
    "HeadGroupSpec": {"rayStartParams": TEXTS, "resources": TEXTS, "template": "V1PodTemplateSpec"},
    "WorkerGroupSpec": {
        "groupName": "str",
        "maxReplicas": "int",
        "minReplicas": "int",
        "rayStartParams": TEXTS,
        "replicas": "int",
        "resources": TEXTS,
        "template": "V1PodTemplateSpec",
    },
    # The pod itself is checked by its own schema.
    "V1PodTemplateSpec": {"metadata": "V1ObjectMeta", "spec": "object"},
}
# Those that KubeRay's Go types do not leave out when they are empty.
REQUIRED_OF_RAY = {
    "RayClusterSpec": ["headGroupSpec"],
    "HeadGroupSpec": ["template"],
    "WorkerGroupSpec": ["groupName", "maxReplicas", "minReplicas", "template"],
}


def validate(document: dict[str, Any]) -> None:
    """Assert that a document is one of its kind, and has no field that its kind does not have."""
    kind = document["kind"]
    assert document["apiVersion"] == KINDS[kind]
    _check(document, "KubeflowOrgV1PyTorchJob" if kind == "PyTorchJob" else kind)


def _check(value: Any, words: str) -> None:
    from kubeflow.training import models
    from kubeflow_trainer_api import models as trainer

    if words in PLAIN:
        assert type(value) is PLAIN[words], (value, words)
    elif inner := re.fullmatch(r"list\[(.*)\]", words):
        assert isinstance(value, list), words
        for one in value:
            _check(one, inner[1])
    elif inner := re.fullmatch(r"dict\(str, (.*)\)", words):
        for one in value.values():
            _check(one, inner[1])
    elif words in PYDANTIC:
        # Such a model drops unknown fields.
        assert getattr(trainer, PYDANTIC[words]).from_dict(value).to_dict() == value
    elif words in RAY_TYPES:
        assert {*REQUIRED_OF_RAY.get(words, ())} <= value.keys() <= RAY_TYPES[words].keys(), words
        for name, one in value.items():
            _check(one, RAY_TYPES[words][name])
    elif words.startswith("KubeflowOrg"):
        model = getattr(models, words)
        types = {model.attribute_map[name]: inner for name, inner in model.openapi_types.items()}
        assert value.keys() <= types.keys(), (words, value.keys() - types.keys())
        for name, one in value.items():
            _check(one, types[name])
    else:
        assert isinstance(value, dict), words
