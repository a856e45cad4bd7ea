"""What `python -m sdbench render` writes, shows and refuses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

import pytest
import yaml

from sdbench.cli import main
from sdbench.launch.render import MANIFESTS
from sdbench.settings.config import parse_request
from tests.debian import find_program
from tests.launch.pods import list_pods
from tests.launch.rendering import (
    FOLDER,
    VALUES,
    documents,
    flags_for,
    render,
    template_of,
)
from tests.refusals import refusal_of

NODES_OF_P5 = ("--registry", "r.example.com/", "--tag", "1", "--num_efa_per_node", "32")


@pytest.mark.parametrize(
    ("backend", "host", "port"),
    [("c10d", "stable-diffusion-worker-0", 29500), ("etcd", "etcd", 2379)],
)
def test_an_elastic_job_meets_at_its_first_pod_or_at_an_etcd(backend, host, port, capsys):
    flags = [*NODES_OF_P5, "--num_nodes", "2", "--rdzv_backend", backend]
    assert main(["render", "eks-elastic", *flags]) == 0
    policy = yaml.safe_load(capsys.readouterr().out)["spec"]["elasticPolicy"]
    assert policy.pop("rdzvId").startswith("run-20")  # each run gets an id of its own
    assert policy == {
        "rdzvBackend": backend,
        "rdzvHost": host,
        "rdzvPort": port,
        "rdzvConf": [{"key": "read_timeout", "value": "600"}],
        "minReplicas": 2,
        "maxReplicas": 2,
        "maxRestarts": 3,
    }


def test_variables_that_are_not_set_are_named():
    refusal = refusal_of("render", "eks", "--tag", "1")
    assert refusal.flag == "--registry, --num_nodes, --num_efa_per_node"


@pytest.mark.parametrize(
    ("kind", "flag", "value"),
    [
        ("eks", "--master_port", "80"),
        ("eks", "--registry", "r.example.com"),
        ("eks", "--rdzv_backend", "etcd"),  # not in this template
        ("eks", "--num_nodes", "99999999999"),
    ],
)
def test_a_wrong_value_is_refused_with_its_flag(kind, flag, value):
    error = refusal_of("render", kind, *NODES_OF_P5, "--num_nodes=4", f"{flag}={value}")
    assert (error.flag, error.value) == (flag, value)


def test_arguments_of_the_benchmark_reach_the_pods_as_they_are():
    arguments = ["--remote", "s3://bucket/{00000..00015}.tar", "--filters", '{punsafe: "<=0.1"}']
    arguments += ["--class_prompts", "a 'b' $HOME # c.json"]
    for kind in ("eks", "eks-elastic", "trainjob"):
        for pod in list_pods(documents(kind, "--", *arguments)):
            shell, option, line = pod.command
            assert (shell, option) == ("sh", "-c")
            program = "exec /workspace/stable-diffusion/multi-node/start-ranks.sh "
            assert line.startswith(program)
            printing = line.replace(program, r"printf '%s\n' ")
            shown = subprocess.check_output([shell, option, printing], text=True)
            assert shown.splitlines() == [*arguments, "--results_dir=/results"]


def test_arguments_of_a_rayjob_come_through_its_shells_as_they_are():
    arguments = ["--filters", '{punsafe: "<=0.1"}', "--class_prompts", "a 'b' $HOME.json"]
    arguments.append("lr=1e-4")
    (job,) = documents("rayjob", "--", *arguments)
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["python", "/workspace/stable-diffusion/benchmark.py"]
    assert words[-len(arguments) - 1 :] == ["--results_dir=/results", *arguments]
    config = parse_request(words[2:], description="", epilog="").config
    assert (config.engine, config.num_ray_workers, config.num_encoders) == ("ray", 24, 2)
    assert config.ray_worker_resources == {"CPU": 1, "GPU": 1, "trainer": 1}
    assert config.encoder_resources == {"CPU": 1, "GPU": 1, "encoder": 1}
    assert (config.remote, config.filters) == ("s3://bucket/laion", {"punsafe": "<=0.1"})
    # It runs the recipes of training, too.
    recipe = FOLDER.parent / "configs" / "anyscale_sd2_256.yaml"
    arguments = ["--config", str(recipe), "--latents", "online", "--model_name", "sd2-base"]
    (job,) = documents("rayjob", "--", *arguments, PROGRAM="train.py")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["python", "/workspace/stable-diffusion/train.py"]
    assert words[-len(arguments) :] == arguments


@pytest.mark.parametrize(
    ("kind", "arguments", "value"),
    [
        ("rayjob", ["--batchsize", "4"], "--batchsize"),
        ("rayjob", ["--results_dir=/x"], "--results_dir"),
        ("rayjob", ["--num_workers", "2"], 2),  # beside --online_preprocessing
        ("rayjob", ["--remote", "a\nb"], "a\nb"),
        ("eks", ["--batch_size", "x"], "x"),
        ("trainjob", ["--remote", "$(HOME)/x"], "$(HOME)/x"),
        ("eks", ["--remote", "a$$b"], "a$$b"),
        ("eks", ["--use_synth_data", "--num_ray_workers", "2"], 2),  # of another engine
        ("eks", ["--results_dir=/x"], "--results_dir"),
    ],
)
def test_arguments_that_would_fail_in_the_cluster_fail_here(kind, arguments, value):
    assert refusal_of("render", kind, *flags_for(kind), "--", *arguments).value == value


def test_a_file_is_written_with_what_to_do_next(tmp_path, capsys):
    file = tmp_path / "my job.yaml"
    flags = flags_for("eks-elastic")
    assert main(["render", "eks-elastic", *flags, "--out", str(file)]) == 0
    assert without_run_id(file.read_text()) == without_run_id(render("eks-elastic"))
    assert capsys.readouterr().out.splitlines()[-7:] == [
        "  kubectl apply -f multi-node/4.etcd.yaml",
        "  kubectl rollout status deployment/etcd",
        f"  kubectl apply -f '{file}'",
        "  kubectl get pods --watch",
        "  kubectl logs -f stable-diffusion-worker-0",
        "  multi-node/collect-results.sh stable-diffusion-results",
        f"  kubectl delete -f '{file}'",
    ]


def test_a_dry_run_shows_what_runs_and_writes_nothing(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    flags = flags_for("eks")
    argv = ["render", "eks", *flags, "--dry_run", "--out", str(file), "--", "--use_synth_data"]
    assert main(argv) == 0
    assert not file.exists()
    assert capsys.readouterr().out == (
        "exec /workspace/stable-diffusion/multi-node/start-ranks.sh --use_synth_data "
        "--results_dir=/results\n"
    )


@pytest.mark.system
@pytest.mark.parametrize("kind", MANIFESTS)
def test_envsubst_writes_the_same_text(kind, tmp_path):
    envsubst = find_program("envsubst", package="gettext-base", folder=tmp_path)
    substituted = subprocess.check_output(
        [envsubst], input=template_of(kind), env={**os.environ, **VALUES}, text=True
    )
    rendered = render(kind, "--", *VALUES["ARGUMENTS"].split())
    assert without_run_id(substituted) == without_run_id(rendered)


def without_run_id(text):
    """A manifest without the name of its run, which tells the second."""
    return re.sub(r'rdzvId: "run-\w+"', "rdzvId", text)
