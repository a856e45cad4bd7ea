"""Schemas of job kinds, from the models of Kubeflow's own Python packages, and of KubeRay.

The schemas are structural ones, as a CustomResourceDefinition takes them: a PyTorchJob from
kubeflow-training, a TrainJob and its runtime from kubeflow-trainer-api, which also has the parts of
Kubernetes that they hold. The models tell names and types; they know no enumerations.

No package of PyPI, npm or Debian has KubeRay's definitions. The fields that our RayJob uses stand
here as "KubeRay CRD API reference" of Ray's documentation lists them for KubeRay 1.7.0.
"""

from __future__ import annotations

import copy
import datetime
import re
import types
import typing
from typing import Any

import jsonschema
import pydantic

TEXT_OR_NUMBER = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
}
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    datetime.datetime: {"type": "string", "format": "date-time"},
}
WORDS = {"str": str, "bool": bool, "int": int, "datetime": datetime.datetime}

TEXTS = dict[str, str]
# Names stand for types of this table or of Kubernetes, [name] for a list of them.
RAY_TYPES: dict[str, dict[str, Any]] = {
    "RayJob": {"apiVersion": str, "kind": str, "metadata": Any, "spec": "RayJobSpec"},
    "RayJobSpec": {
        "backoffLimit": int,
        "entrypoint": str,
        "rayClusterSpec": "RayClusterSpec",
        "runtimeEnvYAML": str,
        "shutdownAfterJobFinishes": bool,
    },
    "RayClusterSpec": {
        "authOptions": "AuthOptions",
        "headGroupSpec": "HeadGroupSpec",
        "rayVersion": str,
        "workerGroupSpecs": ["WorkerGroupSpec"],
    },
    "AuthOptions": {"mode": str},
    "HeadGroupSpec": {
        "rayStartParams": TEXTS,
        "resources": TEXTS,
        "template": "V1PodTemplateSpec",
    },
    "WorkerGroupSpec": {
        "groupName": str,
        "maxReplicas": int,
        "minReplicas": int,
        "rayStartParams": TEXTS,
        "replicas": int,
        "resources": TEXTS,
        "template": "V1PodTemplateSpec",
    },
}
# Those that KubeRay's Go types do not leave out when they are empty.
REQUIRED_OF_RAY = {
    "RayClusterSpec": ["headGroupSpec"],
    "HeadGroupSpec": ["template"],
    "WorkerGroupSpec": ["groupName", "maxReplicas", "minReplicas", "template"],
}


KINDS = {
    "PyTorchJob": "kubeflow.org/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "RayJob": "ray.io/v1",
}


def make_schema(kind: str) -> dict[str, Any]:
    """The structural schema of a kind."""
    if kind == "PyTorchJob":
        return _from_words("KubeflowOrgV1PyTorchJob")
    if kind == "RayJob":
        return _from_ray("RayJob")
    from kubeflow_trainer_api import models

    return _from_annotation(getattr(models, f"TrainerV1alpha1{kind}"))


def validate(document: dict[str, Any]) -> None:
    """Check a document of one of the kinds; a field that its kind does not have is an error.

    Raises:
        jsonschema.ValidationError: It does not match.
    """
    assert document["apiVersion"] == KINDS[document["kind"]]
    schema = make_schema(document["kind"])
    jsonschema.Draft202012Validator(_without_unknown_fields(schema)).validate(document)


def _from_annotation(annotation: Any) -> dict[str, Any]:
    """The schema of a type, as pydantic's models are annotated."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _from_annotation(parts[0])
    if origin in (typing.Union, types.UnionType):
        kept = [part for part in parts if part is not type(None)]
        return _from_annotation(kept[0]) if len(kept) == 1 else TEXT_OR_NUMBER
    if origin is list:
        return {"type": "array", "items": _from_annotation(parts[0])}
    if origin is dict:
        if parts[1] is Any:
            return ANYTHING
        return {"type": "object", "additionalProperties": _from_annotation(parts[1])}
    if annotation in PLAIN:
        return PLAIN[annotation]
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return _from_model(annotation)
    return ANYTHING


def _from_model(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    if "actual_instance" in model.model_fields:  # a quantity, or a number or a name
        return TEXT_OR_NUMBER
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    schema = {
        "type": "object",
        "properties": {name: _from_annotation(field.annotation) for name, field in fields.items()},
    }
    required = [name for name, field in fields.items() if field.is_required()]
    return schema | ({"required": required} if required else {})


def _from_words(words: str) -> dict[str, Any]:
    """The schema of a type, as kubeflow-training's models name it in words."""
    from kubeflow.training import models

    if words in WORDS:
        return PLAIN[WORDS[words]]
    if inner := re.fullmatch(r"list\[(.*)\]", words):
        return {"type": "array", "items": _from_words(inner[1])}
    if inner := re.fullmatch(r"dict\(str, (.*)\)", words):
        return {"type": "object", "additionalProperties": _from_words(inner[1])}
    if words.startswith("KubeflowOrg"):
        model = getattr(models, words)
        properties = {
            model.attribute_map[name]: _from_words(type_words)
            for name, type_words in model.openapi_types.items()
        }
        return {"type": "object", "properties": properties}
    from kubeflow_trainer_api import models as kubernetes

    if words == "V1PodTemplateSpec":
        return _from_annotation(kubernetes.IoK8sApiCoreV1PodTemplateSpec)
    return ANYTHING


def _from_ray(part: Any) -> dict[str, Any]:
    """The schema of a type in the table of KubeRay's."""
    if isinstance(part, str) and part in RAY_TYPES:
        properties = {name: _from_ray(one) for name, one in RAY_TYPES[part].items()}
        required = REQUIRED_OF_RAY.get(part)
        schema = {"type": "object", "properties": properties}
        return schema | ({"required": required} if required else {})
    if isinstance(part, list):
        return {"type": "array", "items": _from_ray(part[0])}
    return _from_words(part) if isinstance(part, str) else _from_annotation(part)


def _without_unknown_fields(schema: Any) -> Any:
    """The same schema for a validator that is to refuse what it does not name."""
    if isinstance(schema, list):
        return [_without_unknown_fields(part) for part in schema]
    if not isinstance(schema, dict):
        return copy.copy(schema)
    strict = {name: _without_unknown_fields(part) for name, part in schema.items()}
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    return strict | ({"additionalProperties": False} if is_object else {})
