"""What does `python -m sdbench render` write, show and refuse?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sdbench.cli import main
from sdbench.launch.render.variables import NAME_IN_TEMPLATE
from tests.debian import find_program
from tests.launch.rendering import (
    FAULTS,
    FOLDER,
    MANIFESTS,
    VALUES,
    documents,
    flags_for,
    plant,
    pod_specs,
    render,
    template_of,
)

NODES_OF_P5 = ("--registry", "r.example.com/", "--tag", "1", "--num_efa_per_node", "32")


def error_of(capsys, *argv):
    assert main(["render", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_pytorchjob_has_a_master_and_the_other_nodes_as_workers():
    (job,) = documents("eks")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: replica["replicas"] for kind, replica in replicas.items()} == {
        "Master": 1,
        "Worker": 2,
    }
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/team/mosaicml-stable-diffusion:0.32.1"
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 29500}]
    assert container["resources"]["limits"] == {
        "nvidia.com/gpu": 8,
        "vpc.amazonaws.com/efa": 32,
    }
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]


def test_what_follows_from_the_nodes_need_not_be_said(capsys):
    assert main(["render", "eks", *NODES_OF_P5, "--num_nodes", "64"]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 63
    (spec,) = pod_specs(job["spec"]["pytorchReplicaSpecs"]["Worker"])
    environment = {entry["name"]: entry.get("value") for entry in spec["containers"][0]["env"]}
    assert environment["NUM_NODES"] == "64"
    assert environment["NUM_RANKS"] == "512"


@pytest.mark.parametrize(
    ("backend", "host", "port"),
    [("c10d", "stable-diffusion-worker-0", 29500), ("etcd", "etcd", 2379)],
)
def test_an_elastic_job_meets_at_its_first_pod_or_at_an_etcd(backend, host, port, capsys):
    flags = [*NODES_OF_P5, "--num_nodes", "2", "--rdzv_backend", backend, "--run_id", "run-7"]
    assert main(["render", "eks-elastic", *flags]) == 0
    policy = yaml.safe_load(capsys.readouterr().out)["spec"]["elasticPolicy"]
    assert policy == {
        "rdzvBackend": backend,
        "rdzvHost": host,
        "rdzvPort": port,
        "rdzvId": "run-7",
        "rdzvConf": [{"key": "read_timeout", "value": "600"}],
        "minReplicas": 2,
        "maxReplicas": 2,
        "maxRestarts": 3,
    }


def test_each_run_gets_an_id_of_its_own(capsys):
    assert main(["render", "eks-elastic", *NODES_OF_P5, "--num_nodes", "2"]) == 0
    policy = yaml.safe_load(capsys.readouterr().out)["spec"]["elasticPolicy"]
    assert policy["rdzvId"].startswith("run-20")


def test_variables_that_are_not_set_are_named_with_what_they_may_be(capsys):
    message = error_of(capsys, "eks", "--tag", "1")
    assert message.startswith("error: not set: REGISTRY, NUM_NODES, NUM_EFA_PER_NODE: got")
    assert "NUM_NODES: a whole number from 1 to 10000; " in message
    assert message.endswith("change it with --registry, --num_nodes, --num_efa_per_node.\n")


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        (
            "--master_port",
            "80",
            "error: MASTER_PORT, port on node 0 where the ranks meet, has a value that it cannot "
            "have: got '80'; allowed: a port from 1024 to 65535; change it with --master_port.\n",
        ),
        (
            "--world_size",
            "500",
            "error: WORLD_SIZE, ranks of the job, has a value that it cannot have: got '500'; "
            "allowed: NUM_NODES times NUM_GPUS_PER_NODE, 32; change it with --world_size.\n",
        ),
        (
            "--num_nodes",
            "0",
            "error: NUM_NODES, nodes, and so pods, of the job, has a value that it cannot have: "
            "got '0'; allowed: a whole number from 1 to 10000; change it with --num_nodes.\n",
        ),
        (
            "--registry",
            "r.example.com",
            "error: REGISTRY, where the image is, with the slash behind it, has a value that it "
            "cannot have: got 'r.example.com'; allowed: a registry that ends with a slash, e.g. "
            "registry.example.com/team/; change it with --registry.\n",
        ),
        (
            "--rdzv_backend",
            "etcd",
            "error: the template has no variable RDZV_BACKEND: got 'etcd'; allowed: REGISTRY, "
            "DOCKER_IMAGE_NAME, TAG, NUM_NODES, NUM_GPUS_PER_NODE, NUM_EFA_PER_NODE, NUM_WORKERS, "
            "WORLD_SIZE, MASTER_PORT, RESULTS_CLAIM; change it with --rdzv_backend.\n",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(flag, value, sentence, capsys):
    argv = ["eks", *NODES_OF_P5, "--num_nodes", "4", flag, value]
    assert error_of(capsys, *argv) == sentence


@pytest.mark.parametrize(
    "value", ["1 ", "01", "1.5", "-1", "eight", "", "\u0661", "1e1", "99999999999"]
)
def test_only_whole_numbers_count(value, capsys):
    assert "NUM_NODES, nodes" in error_of(capsys, "eks", *NODES_OF_P5, f"--num_nodes={value}")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_faults_of_published_manifests_are_found(fault, tmp_path, capsys):
    template = tmp_path / "mine.yaml-template"
    template.write_text(plant(fault))
    argv = ["eks", "--template", str(template), *flags_for(template.read_text())]
    if fault.sentence is None:  # a schema finds it
        assert main(["render", *argv]) == 0
        return
    message = error_of(capsys, *argv)
    assert message.startswith(f"error: {fault.sentence}")
    assert message.endswith(f"change it with the template {template}.\n")


def test_a_variable_that_nobody_knows_is_named(tmp_path, capsys):
    template = tmp_path / "mine.yaml-template"
    template.write_text("image: ${REGISTRY}${IMAGE}\n")
    assert error_of(capsys, "eks", "--template", str(template)).startswith(
        "error: the template has a variable that render does not know: got 'IMAGE'; allowed: "
        "REGISTRY, DOCKER_IMAGE_NAME, TAG, "
    )


def test_a_dollar_sign_without_braces_is_no_variable(tmp_path, capsys):
    template = tmp_path / "mine.yaml-template"
    template.write_text("kind: Pod\nimage: $REGISTRY\n")
    assert error_of(capsys, "eks", "--template", str(template)).startswith(
        "error: line 2 of the template has a dollar sign that begins no variable: "
        "got 'image: $REGISTRY'; allowed: ${NAME}; "
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("kind: Pod\nenv: [{name: A, value: b}, {name: A, value: c}]\n", "Pod.env: the variable A"),
        ("kind: Pod\nenv: [{name: A, value: ''}]\n", "Pod.env.0.value: nothing stands there"),
        ("kind: Pod\nimage: registry.example.com:5000/name\n", "Pod.image: this image has no tag"),
        ("kind: Pod\nport: 1023\n", "Pod.port: this port is for root alone"),
        ("kind: [\n", "the manifest is no YAML (while parsing"),
        ("hello\n", "this is no manifest: got 'str'"),
        ("kind: Pod\nspec: {}\n", "the manifest starts no pods that render knows: got 'Pod'"),
        ("kind: Deployment\nspec: {}\n", "the Deployment has no template, which it needs"),
    ],
)
def test_what_no_schema_sees_is_found(content, sentence, tmp_path, capsys):
    template = tmp_path / "mine.yaml-template"
    template.write_text(content)
    message = error_of(capsys, "etcd", "--template", str(template))
    assert message.startswith(f"error: {sentence}")


def test_arguments_of_the_benchmark_reach_the_pods_as_they_are(capsys):
    arguments = ["--remote", "s3://bucket/{00000..00015}.tar", "--filters", '{punsafe: "<=0.1"}']
    (job,) = documents("eks", "--", *arguments)
    for spec in pod_specs(job):
        assert spec["containers"][0]["args"] == [*arguments, "--results_dir=/results"]
    (_, trainjob) = documents("trainjob", "--", *arguments)
    assert trainjob["spec"]["trainer"]["args"] == [*arguments, "--results_dir=/results"]


@pytest.mark.parametrize(
    ("kind", "arguments", "sentence"),
    [
        ("eks", ["--batchsize", "4"], "error: unknown flag: got '--batchsize'; "),
        ("eks", ["--batch_size", "x"], "error: --batch_size has a value of the wrong kind: "),
        (
            "trainjob",
            ["--remote", "$(HOME)/x"],
            "error: TrainJob.spec.trainer.args.1: a variable was left unfilled: got '$(HOME)/x'; ",
        ),
        ("eks", ["--results_dir=/x"], "error: the results of a pod go to its volume: "),
        (
            "etcd",
            ["--use_ema"],
            "error: the template has no one place for arguments of benchmark.py: got '--use_ema'; ",
        ),
        ("slurm", ["--batchsize", "4"], "error: unknown flag: got '--batchsize'; "),
    ],
)
def test_arguments_that_would_fail_in_the_cluster_fail_here(kind, arguments, sentence, capsys):
    flags = [] if kind == "slurm" else flags_for(template_of(kind).read_text())
    assert error_of(capsys, kind, *flags, "--", *arguments).startswith(sentence)


def test_a_file_is_written_with_what_to_do_next(tmp_path, capsys):
    file = tmp_path / "my job.yaml"
    flags = flags_for(template_of("eks-elastic").read_text())
    assert main(["render", "eks-elastic", *flags, "--out", str(file)]) == 0
    assert file.read_text() == render("eks-elastic")
    assert capsys.readouterr().out == (
        f"written: {file}\n"
        "next:\n"
        "  kubectl apply -f multi-node/4.etcd.yaml\n"
        f"  kubectl apply -f '{file}'\n"
        "  kubectl get pods --watch\n"
        "  kubectl logs -f stable-diffusion-worker-0\n"
        "  multi-node/collect-results.sh stable-diffusion-results\n"
        f"  kubectl delete -f '{file}'\n"
    )


def test_a_file_that_cannot_be_written_is_an_error(tmp_path, capsys):
    argv = ["etcd", "--out", str(tmp_path / "none" / "etcd.yaml")]
    assert error_of(capsys, *argv).startswith("error: the file cannot be written (No such file")


def test_a_dry_run_shows_the_first_pod_and_writes_nothing(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    flags = flags_for(template_of("eks").read_text())
    argv = ["render", "eks", *flags, "--dry_run", "--out", str(file), "--", "--use_synth_data"]
    assert main(argv) == 0
    assert not file.exists()
    assert capsys.readouterr().out.splitlines() == [
        "3 pods with 8 GPUs each, 24 ranks",
        "pod stable-diffusion-master-0 runs:",
        "  /workspace/stable-diffusion/multi-node/start-ranks.sh --use_synth_data "
        "--results_dir=/results",
        "with:",
        "  NUM_NODES=3",
        "  NUM_GPUS_PER_NODE=8",
        "  NUM_RANKS=24",
        "  HOME=/tmp",
        "  USER=sdbench",
        "  FI_EFA_USE_HUGE_PAGE=0",
        "  WANDB_API_KEY: key api_key of the secret wandb",
        "  MASTER_ADDR=stable-diffusion-master-0 (from the operator)",
        "  MASTER_PORT=29500 (from the operator)",
        "  WORLD_SIZE=24 (from the operator)",
        "  RANK=0 (from the operator)",
        "  PET_NPROC_PER_NODE=8 (from the operator)",
        "  PET_NODE_RANK=0 (from the operator)",
        "  PET_NNODES=3 (from the operator)",
        "next:",
        f"  kubectl apply -f {file}",
        "  kubectl get pods --watch",
        "  kubectl logs -f stable-diffusion-master-0",
        "  multi-node/collect-results.sh stable-diffusion-results",
        f"  kubectl delete -f {file}",
    ]


def test_a_dry_run_of_a_trainjob_shows_what_the_trainer_adds(capsys):
    flags = flags_for(template_of("trainjob").read_text())
    assert main(["render", "trainjob", *flags, "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["3 pods with 8 GPUs each, 24 ranks", "pod stable-diffusion-node-0-0 runs:"]
    assert [line.strip() for line in lines if "(from the operator)" in line] == [
        "PET_NNODES=3 (from the operator)",
        "PET_NPROC_PER_NODE=8 (from the operator)",
        "PET_MASTER_ADDR=stable-diffusion-node-0-0.stable-diffusion (from the operator)",
        "PET_MASTER_PORT=29400 (from the operator)",
        "PET_NODE_RANK=0 (from the operator)",
    ]


def test_a_dry_run_of_a_script_shows_its_options(capsys):
    flags = ["--num_nodes", "4", "--time", "30", "--image", "none"]
    assert main(["render", "slurm", *flags, "--dry_run", "--", "--use_synth_data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 nodes with the GPUs that Slurm gives, a rank for each GPU"
    assert "  multi-node/start-ranks.sh --use_synth_data" in lines
    assert "  --nodes=4" in lines
    assert "  --time=30" in lines
    assert "  IMAGE=none" in lines
    assert lines[-3:] == [
        "  sbatch --test-only stable-diffusion.sbatch",
        "  sbatch stable-diffusion.sbatch",
        "  squeue --me",
    ]


def test_a_script_differs_from_the_suites_in_what_was_said(capsys):
    flags = ["--num_nodes", "16", "--num_gpus_per_node", "h100:8", "--time", "1:30:00"]
    flags += ["--partition", "p5,p5e", "--image", "/fsx/sd.sqsh", "--mounts", "/fsx:/fsx"]
    assert main(["render", "slurm", *flags, "--", "--filters", '{a: ">1"}']) == 0
    original = (FOLDER / "2.train.sbatch").read_text().splitlines()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line not in original] == [
        "#SBATCH --nodes=16",
        "#SBATCH --gpus-per-node=h100:8",
        "#SBATCH --time=1:30:00",
        "#SBATCH --partition=p5,p5e",
        "IMAGE=${IMAGE:-/fsx/sd.sqsh}",
        "MOUNTS=${MOUNTS:-/fsx:/fsx}",
        """set -- --filters '{a: ">1"}' "$@\"""",
    ]
    assert [line for line in original if line not in lines] == ["#SBATCH --nodes=2"]
    shellcheck = [str(Path(sys.executable).parent / "shellcheck"), "--shell=bash", "-"]
    checked = subprocess.run(
        shellcheck, input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
    # Slurm reads no option behind the first command.
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])


def test_a_script_sees_its_own_arguments_and_then_those_of_the_command_line(tmp_path, capsys):
    assert main(["render", "slurm", "--mounts", "/a:/b", "--", "--streams", "a=0.5,b=0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("set -euo pipefail")
    script = tmp_path / "head.sh"
    script.write_text("\n".join([*lines[start : start + 3], 'echo "$MOUNTS"', "echo $# $4"]))
    command = ["bash", str(script), "--seed", "5"]
    environment = {**os.environ, "MOUNTS": "/c:/d"}
    output = subprocess.check_output(command, text=True, env=environment)
    assert output == "/c:/d\n4 5\n"


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("--time", "soon", "error: --time, time limit, has a value that it cannot have: got "),
        ("--num_nodes", "0", "error: --num_nodes, nodes of the job, has a value that it cannot"),
        ("--mounts", "/fsx", "error: --mounts, more mounts of the container, has a value that"),
        ("--partition", "a b", "error: --partition, partitions to choose from, has a value that"),
    ],
)
def test_a_script_refuses_what_sbatch_would(flag, value, sentence, capsys):
    assert error_of(capsys, "slurm", flag, value).startswith(sentence)


@pytest.mark.system
@pytest.mark.parametrize("kind", MANIFESTS)
def test_envsubst_writes_the_same_text(kind, tmp_path):
    envsubst = find_program("envsubst", package="gettext-base", folder=tmp_path)
    text = template_of(kind).read_text()
    names = sorted(set(NAME_IN_TEMPLATE.findall(text)))
    substituted = subprocess.run(
        [envsubst, " ".join(f"${name}" for name in names)],
        input=text,
        env={**os.environ, **{name: VALUES[name] for name in names}},
        capture_output=True,
        text=True,
        check=True,
    )
    assert substituted.stdout == render(kind)
