"""The manifests are what a cluster takes, and their pods run what they should.

The schemas of Kubernetes 1.37 are those of kubernetes-validate. A PyTorchJob is read and written
again by kubeflow-training, a TrainJob and its runtime by kubeflow-trainer-api: a field that their
models do not have is lost on the way. The models tell names and types; they know no enumerations.

No package of PyPI, npm or Debian has KubeRay's definitions. The fields that our RayJob uses stand
here as "KubeRay CRD API reference" of Ray's documentation lists them for KubeRay 1.7.0; those that
KubeRay's Go types do not leave out when they are empty are required.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from types import SimpleNamespace

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow.training import ApiClient
from kubeflow_trainer_api import models

from sdbench.settings.config import parse_request
from tests.launch.pods import list_pods
from tests.launch.rendering import FOLDER, MANIFESTS, documents, pod_specs

KUBERNETES = "1.37"
SBATCH = FOLDER / "2.train.sbatch"
JOBS = ("eks", "eks-elastic", "trainjob")


def fields_of(*required, **fields):
    """The schema of an object that has no other fields."""
    closed = {"type": "object", "additionalProperties": False}
    return {**closed, "properties": fields, "required": list(required)}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
OBJECT = {"type": "object"}
GROUP = {
    "rayStartParams": TEXTS,
    "resources": TEXTS,
    "template": fields_of(metadata=OBJECT, spec=OBJECT),
}
WORKER_GROUP = fields_of(
    *("groupName", "maxReplicas", "minReplicas", "template"),
    groupName=TEXT,
    maxReplicas=NUMBER,
    minReplicas=NUMBER,
    replicas=NUMBER,
    **GROUP,
)
RAY_JOB = fields_of(
    apiVersion=TEXT,
    kind=TEXT,
    metadata=OBJECT,
    spec=fields_of(
        backoffLimit=NUMBER,
        entrypoint=TEXT,
        rayClusterSpec=fields_of(
            "headGroupSpec",
            authOptions=fields_of(mode=TEXT),
            headGroupSpec=fields_of("template", **GROUP),
            rayVersion=TEXT,
            workerGroupSpecs={"type": "array", "items": WORKER_GROUP},
        ),
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
    ),
)
KINDS = {
    "PyTorchJob": "kubeflow.org/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "RayJob": "ray.io/v1",
}


def validate_job(document):
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
        client = ApiClient()
        response = SimpleNamespace(data=json.dumps(document))
        job = client.deserialize(response, "KubeflowOrgV1PyTorchJob")
        assert client.sanitize_for_serialization(job) == document
    else:
        model = getattr(models, f"TrainerV1alpha1{kind}")
        assert model.from_dict(document).to_dict() == document


def validate(document):
    """Check a document, and what a job says of its pods as pods of their own."""
    if document["kind"] in KINDS:
        validate_job(document)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    for spec in pod_specs(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def only_pod_spec(kind):
    """The one description of a pod that all pods of a job share."""
    first, *others = [spec for document in documents(kind) for spec in pod_specs(document)]
    assert others == [first] * len(others)
    return first


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_is_what_its_schemas_say(kind):
    rendered = documents(kind)
    assert rendered
    for document in rendered:
        validate(document)


@pytest.mark.parametrize("kind", (*JOBS, "rayjob"))
def test_a_pod_has_no_more_rights_than_it_needs(kind):
    for spec in [spec for document in documents(kind) for spec in pod_specs(document)]:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 1000
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("hostPath" in volume for volume in spec["volumes"])
        assert "hostNetwork" not in spec


@pytest.mark.parametrize("kind", JOBS)
def test_a_pod_has_its_devices_its_shared_memory_and_the_volume_of_the_results(kind):
    spec = only_pod_spec(kind)
    (container,) = spec["containers"]
    devices = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}
    assert container["resources"] == {"requests": devices, "limits": devices}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    claim = volumes[mounts["/results"]]["persistentVolumeClaim"]
    assert claim == {"claimName": "stable-diffusion-results"}
    assert container["image"] == "registry.example.com/team/mosaicml-stable-diffusion:0.32.1"
    pods = list_pods(documents(kind))
    assert len(pods) == 3
    for pod in pods:
        assert pod.command[-1].endswith(" --results_dir=/results")


@pytest.mark.parametrize("kind", JOBS)
def test_secrets_are_named_and_never_there(kind):
    (container,) = only_pod_spec(kind)["containers"]
    (secret,) = (entry for entry in container["env"] if "valueFrom" in entry)
    reference = {"secretKeyRef": {"name": "wandb", "key": "api_key", "optional": True}}
    assert secret == {"name": "WANDB_API_KEY", "valueFrom": reference}


def test_a_job_that_is_stopped_has_longer_than_its_ranks_take_for_themselves():
    script = (FOLDER / "start-ranks.sh").read_text()
    grace_s = int(re.search(r"^GRACE_S=(\d+)$", script, flags=re.MULTILINE)[1])
    graces_s = [only_pod_spec(kind)["terminationGracePeriodSeconds"] for kind in JOBS]
    slurm = re.search(r"^#SBATCH --signal=TERM@(\d+)$", SBATCH.read_text(), flags=re.MULTILINE)
    assert min(*graces_s, int(slurm[1])) > grace_s > 100
    (job,) = documents("rayjob")
    words = shlex.split(job["spec"]["entrypoint"])
    stop_grace_s = parse_request(words[2:], description="", epilog="").config.stop_grace_s
    ray = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    _, specs = ray_cluster()
    graces_s = [specs[name]["terminationGracePeriodSeconds"] for name in ("head", "trainers")]
    assert min(*graces_s, int(ray["RAY_JOB_STOP_WAIT_TIME_S"])) > stop_grace_s > 100


def ray_cluster():
    """The Ray cluster of a RayJob, and the description of a pod of each of its groups."""
    (job,) = documents("rayjob")
    cluster = job["spec"]["rayClusterSpec"]
    head, trainers, encoders = pod_specs(cluster)
    return cluster, {"head": head, "trainers": trainers, "encoders": encoders}


def test_ray_itself_reads_what_each_group_offers():
    # Ray's autoscaler is the one reader of these fields outside of the operator.
    from ray.autoscaler._private.kuberay import autoscaling_config

    cluster, _ = ray_cluster()
    groups = autoscaling_config._generate_available_node_types_from_ray_cr_spec(cluster)
    assert {name: group["resources"] for name, group in groups.items()} == {
        "headgroup": {"CPU": 0, "memory": 8 * 2**30},
        "trainers": {"CPU": 8, "GPU": 8, "trainer": 8},
        "encoders": {"CPU": 7, "GPU": 1, "encoder": 1, "memory": 24 * 2**30},
    }
    bounds = [(group["min_workers"], group["max_workers"]) for group in groups.values()]
    assert bounds == [(0, 0), (3, 3), (2, 2)]  # the head is not counted


def test_trainers_and_encoders_are_other_machines_with_one_environment():
    cluster, specs = ray_cluster()
    selectors = {name: spec.get("nodeSelector") for name, spec in specs.items()}
    assert selectors == {
        "head": None,
        "trainers": {"node.kubernetes.io/instance-type": "p4de.24xlarge"},
        "encoders": {"node.kubernetes.io/instance-type": "g5.2xlarge"},
    }
    containers = {name: spec["containers"][0] for name, spec in specs.items()}
    for key in ("image", "env", "workingDir"):
        assert containers["head"][key] == containers["trainers"][key] == containers["encoders"][key]
    devices = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}
    assert containers["trainers"]["resources"] == {"requests": devices, "limits": devices}
    # The program runs on the head, and rank 0 writes on a trainer.
    claims = {
        name: [volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
        for name, spec in specs.items()
    }
    assert claims["head"] == claims["trainers"]
    assert claims["head"][0]["persistentVolumeClaim"]["claimName"] == "stable-diffusion-results"
    assert claims["encoders"] == []
    pins = (FOLDER.parent / "requirements-all.txt").read_text()
    assert re.search(r"^ray==(\S+)", pins, re.MULTILINE)[1] == cluster["rayVersion"]
