"""The pods that a manifest starts, with what the operators of Kubeflow add to it.

What they add, the place of each pod in the job, is written here as their sources have it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Kubeflow Trainer v2 has one port for all jobs.
TRAINER_PORT = 29400
# Names that the operators look for.
PYTORCHJOB_PORT = "pytorchjob-port"
PYTORCHJOB_CONTAINER = "pytorch"
TRAINER_NODE = "node"
Document = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Pod:
    """One pod as it starts, with the variables of the manifest that have a value there."""

    name: str  # as kubectl shows it, for a TrainJob without the random letters behind it
    command: tuple[str, ...]
    environment: Mapping[str, str]
    from_operator: Mapping[str, str]  # they replace variables of the same name


def list_pods(documents: Sequence[Document]) -> list[Pod]:
    """The pods that the documents of a manifest start, that of node 0 first."""
    pods = []
    for document in documents:
        if document["kind"] in _FINDERS:
            pods += _FINDERS[document["kind"]](document, documents)
    return pods


def _pods_of_pytorchjob(document: Document, _: Sequence[Document]) -> list[Pod]:
    job, spec = document["metadata"]["name"], document["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    num_pods = sum(replica["replicas"] for replica in replicas.values())
    num_ranks = num_pods * int(spec["nprocPerNode"])
    pods = []
    for kind in ("Master", "Worker"):
        for index in range(replicas[kind]["replicas"] if kind in replicas else 0):
            template = replicas[kind]["template"]
            container = _find_named(template["spec"]["containers"], PYTORCHJOB_CONTAINER)
            environment: dict[str, str] = {}
            if "Master" in replicas:
                rank = index + (kind == "Worker")
                environment |= {
                    "MASTER_ADDR": f"{job}-master-0",
                    "MASTER_PORT": str(_find_port(container)),
                    "WORLD_SIZE": str(num_ranks),
                    "RANK": str(rank),
                    "PET_NPROC_PER_NODE": spec["nprocPerNode"],
                    "PET_NODE_RANK": str(rank),
                }
            if "elasticPolicy" in spec:
                environment |= _elastic_environment(spec["elasticPolicy"])
            else:
                environment["PET_NNODES"] = str(num_pods)
            pods.append(_make_pod(f"{job}-{kind.lower()}-{index}", container, environment))
    return pods


def _elastic_environment(policy: Document) -> dict[str, str]:
    return {
        "PET_RDZV_ENDPOINT": f"{policy['rdzvHost']}:{policy['rdzvPort']}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_CONF": ",".join(f"{one['key']}={one['value']}" for one in policy["rdzvConf"]),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_ID": policy["rdzvId"],
    }


def _pods_of_trainjob(document: Document, documents: Sequence[Document]) -> list[Pod]:
    job, spec = document["metadata"]["name"], document["spec"]
    (runtime,) = (one for one in documents if one["kind"] == spec["runtimeRef"]["kind"])
    node = _find_named(runtime["spec"]["template"]["spec"]["replicatedJobs"], TRAINER_NODE)
    containers = node["template"]["spec"]["template"]["spec"]["containers"]
    container = dict(_find_named(containers, TRAINER_NODE))
    trainer = spec["trainer"]
    container |= {key: trainer[key] for key in ("args", "command", "image") if key in trainer}
    container["env"] = [*container.get("env", []), *trainer.get("env", [])]
    common = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{job}-{TRAINER_NODE}-0-0.{job}",
        "PET_MASTER_PORT": str(TRAINER_PORT),
    }
    pods = []
    for index in range(trainer["numNodes"]):
        environment = common | {"PET_NODE_RANK": str(index)}
        pods.append(_make_pod(f"{job}-{TRAINER_NODE}-0-{index}", container, environment))
    return pods


def _pods_of_deployment(document: Document, _: Sequence[Document]) -> list[Pod]:
    container = document["spec"]["template"]["spec"]["containers"][0]
    name = document["metadata"]["name"]
    return [_make_pod(name, container, {}) for _ in range(document["spec"]["replicas"])]


_FINDERS: dict[str, Callable[[Document, Sequence[Document]], list[Pod]]] = {
    "PyTorchJob": _pods_of_pytorchjob,
    "TrainJob": _pods_of_trainjob,
    "Deployment": _pods_of_deployment,
}


def _find_named(parts: Sequence[Document], name: str) -> Document:
    (part,) = (part for part in parts if part.get("name") == name)
    return part


def _find_port(container: Document) -> int:
    return _find_named(container["ports"], PYTORCHJOB_PORT)["containerPort"]


def _make_pod(name: str, container: Document, from_operator: Mapping[str, str]) -> Pod:
    variables = [one for one in container.get("env", []) if "value" in one]
    return Pod(
        name=name,
        command=(*container["command"], *container.get("args", [])),
        environment={one["name"]: one["value"] for one in variables},
        from_operator=from_operator,
    )
