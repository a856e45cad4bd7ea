"""The command `python -m sdbench render`: fills in the manifest of a job and checks it."""

from __future__ import annotations

import dataclasses
import datetime
import re
import shlex
import string
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.launch.child import ROOT, check_suite_is_here, refuse_flag
from sdbench.settings import config, recipe
from sdbench.settings.kinds import PATH, SWITCH, Kind, one_of, whole_number
from sdbench.settings.request import choose_command, parse
from sdbench.settings.rules import check
from sdbench.settings.setting import declarations, setting

FOLDER = "multi-node"
JOB_NAME = "stable-diffusion"
# Where the pods mount the volume that collect-results.sh reads; what runs the program has it.
RESULTS = "--results_dir=/results"

EPILOG = """\
examples:
  python -m sdbench render eks --registry registry.example.com/ --tag 0.32.1 --num_nodes 64 \\
      --num_efa_per_node 32 --out job.yaml -- --use_synth_data --use_ema \\
      --device_train_microbatch_size 4
  python -m sdbench render rayjob --registry registry.example.com/ --tag 0.32.1 --num_nodes 4 \\
      --num_efa_per_node 4 --num_encoders 48 --remote s3://bucket/laion --program train.py \\
      --out job.yaml -- --config configs/anyscale_sd2_256.yaml --latents online --model_name FOLDER
  python -m sdbench render eks-elastic --help
"""


class Manifest(NamedTuple):
    """A manifest of a job."""

    template: str  # in multi-node/
    meaning: str
    logs: str  # what `kubectl logs -f` follows
    arguments: str = "--use_synth_data --use_ema --device_train_microbatch_size=4"


MANIFESTS: dict[str, Manifest] = {
    "eks": Manifest(
        "3.stable-diffusion-eks.yaml-template",
        "PyTorchJob of Kubeflow's training operator v1, by composer",
        f"{JOB_NAME}-master-0",
    ),
    "eks-elastic": Manifest(
        "5.stable-diffusion-eks-elastic.yaml-template",
        "the same by torchrun, which starts the ranks again after a loss",
        f"{JOB_NAME}-worker-0",
    ),
    "trainjob": Manifest(
        "6.stable-diffusion-trainjob.yaml-template",
        "TrainJob of Kubeflow Trainer v2 with its runtime, by composer",
        f"--tail=-1 -l jobset.sigs.k8s.io/jobset-name={JOB_NAME},"
        "batch.kubernetes.io/job-completion-index=0",
    ),
    "rayjob": Manifest(
        "7.stable-diffusion-rayjob.yaml-template",
        "RayJob of KubeRay: a Ray cluster of pods that train and pods that encode",
        f"job/{JOB_NAME}",
        "--use_ema --device_train_microbatch_size=4",
    ),
}
ETCD = "4.etcd.yaml"


def _matching(allowed: str, pattern: str) -> Kind:
    def read(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError
        return value

    return Kind(allowed, read, "TEXT")


WORD = _matching("a text without spaces, quotes and variables", r"[A-Za-z0-9_./:@%+=,-]+")
NAME = _matching(
    "a name of lower-case letters, digits, dots and dashes", r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
)
TAG = _matching("a tag of an image", r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
# Ports below need root on most systems.
PORT = whole_number(1024, 65535)
NODES = whole_number(1, 10_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderFlags:
    """Flags of render: its own, then one for each variable of the templates."""

    out: Path | None = setting(PATH, None, "file to write (default: standard output)")
    dry_run: bool = setting(SWITCH, False, "print what the job would run, and write nothing")

    registry: str | None = setting(
        _matching(
            "a registry that ends with a slash", r"[a-zA-Z0-9.-]+(:[0-9]+)?/([a-z0-9._-]+/)*"
        ),
        None,
        "where the image is, with a slash at the end: registry.example.com/team/",
    )
    docker_image_name: str = setting(WORD, "mosaicml-stable-diffusion", "name of the image")
    tag: str | None = setting(TAG, None, "tag of the image, e.g. 0.32.1")
    num_nodes: int | None = setting(NODES, None, "nodes, and so pods, that train")
    num_gpus_per_node: int = setting(whole_number(1, 1024), 8, "GPUs, and so ranks, per node")
    num_efa_per_node: int | None = setting(
        whole_number(0, 1024),
        None,
        "EFA devices of a node: 4 on p4de, 32 on p5 and p5e, 16 on p5en, 0 without EFA",
    )
    num_encoders: int | None = setting(NODES, None, "pods with one GPU each that encode pictures")
    num_decoders: int | None = setting(
        whole_number(1, 100_000),
        None,
        "processes beside the encoders that read and decode, with a CPU each (default: four for "
        "each encoder)",
    )
    trainer_instance_type: str = setting(NAME, "p4de.24xlarge", "machines that train")
    encoder_instance_type: str = setting(NAME, "g5.2xlarge", "machines that decode and encode")
    program: str = setting(one_of("benchmark.py", "train.py"), "benchmark.py", "what the job runs")
    remote: str | None = setting(
        WORD, None, "the data set's pictures, at a place that all pods reach: s3://bucket/laion"
    )
    master_port: int = setting(PORT, 29500, "port on node 0 where the ranks meet")
    rdzv_backend: str = setting(
        one_of("c10d", "etcd", "etcd-v2"),
        "c10d",
        "how the nodes of an elastic job meet: at its first pod, or at the etcd of 4.etcd.yaml",
    )
    results_claim: str = setting(
        NAME, f"{JOB_NAME}-results", "persistent volume claim that the records go to"
    )


SETTINGS = declarations(RenderFlags)
VARIABLES = tuple(name.upper() for name in SETTINGS if name not in ("out", "dry_run"))


def main(argv: Sequence[str] | None = None) -> int:
    """Fill in a template, and write it or say what it would run; returns the exit code."""
    import yaml

    name, rest = choose_command(
        {name: manifest.meaning for name, manifest in MANIFESTS.items()},
        argv,
        prog="python -m sdbench render",
        description="Fill in a manifest of multi-node/.",
        epilog=EPILOG,
    )
    manifest = MANIFESTS[name]
    request = parse(
        RenderFlags,
        rest,
        prog=f"python -m sdbench render {name}",
        description=f"Fill in {manifest.template}: {manifest.meaning}.",
        epilog="",
        rest="ARGUMENTS of the program",
    )
    flags = request.config
    check_suite_is_here(f"{FOLDER}/{manifest.template}", folder=ROOT)
    template = string.Template((ROOT / FOLDER / manifest.template).read_text(encoding="utf-8"))
    names = template.get_identifiers()
    for unused in VARIABLES:
        if unused not in names and request.is_users(unused.lower()):
            raise ConfigError(
                f"the template has no variable {unused}",
                value=getattr(flags, unused.lower()),
                allowed=", ".join(sorted(names)),
                flag=f"--{unused.lower()}",
            )
    arguments = _quote(request.rest) or manifest.arguments
    text = template.substitute(_find_values(flags, names), ARGUMENTS=arguments)
    texts = _find_texts(list(yaml.safe_load_all(text)))
    (command,) = {one for one in texts if RESULTS in one}  # the pods of a job run the same
    _check_arguments(command)
    if flags.dry_run or flags.out is None:
        print(command if flags.dry_run else text.removesuffix("\n"))
        return 0
    flags.out.write_text(text, encoding="utf-8")
    file = shlex.quote(str(flags.out))
    print(f"written: {flags.out}\nnext:")
    if "RDZV_BACKEND" in names and flags.rdzv_backend != "c10d":
        print(f"  kubectl apply -f {FOLDER}/{ETCD}\n  kubectl rollout status deployment/etcd")
    print(f"  kubectl apply -f {file}")
    print(f"  kubectl get pods --watch\n  kubectl logs -f {manifest.logs}")
    print(f"  multi-node/collect-results.sh {flags.results_claim}")
    print(f"  kubectl delete -f {file}")
    return 0


def _find_values(flags: RenderFlags, names: Collection[str]) -> dict[str, Any]:
    """The value of every variable of a template; refuses a variable that is not set."""
    is_at_pod = flags.rdzv_backend == "c10d"
    num_nodes = flags.num_nodes or 0
    values = {
        "RDZV_HOST": f"{JOB_NAME}-worker-0" if is_at_pod else "etcd",
        "RDZV_PORT": flags.master_port if is_at_pod else 2379,
        "RUN_ID": datetime.datetime.now(datetime.UTC).strftime("run-%Y%m%dt%H%M%Sz"),
        # Anyscale's template has 192 for 48 encoders.
        "NUM_DECODERS": 4 * (flags.num_encoders or 0) or None,
        "NUM_WORKERS": num_nodes - 1,  # pods other than node 0
        "WORLD_SIZE": num_nodes * flags.num_gpus_per_node,
    }
    given = {name: getattr(flags, name.lower()) for name in VARIABLES}
    values |= {name: value for name, value in given.items() if value is not None}
    unset = [
        SETTINGS[name.lower()] for name in VARIABLES if name in names and values.get(name) is None
    ]
    if unset:
        raise ConfigError(
            f"not set: {', '.join(one.name.upper() for one in unset)}",
            value="nothing",
            allowed="; ".join(f"{one.help}: {one.kind.allowed}" for one in unset),
            flag=", ".join(one.flag for one in unset),
        )
    return values


def _quote(arguments: Sequence[str]) -> str:
    """Arguments as words of a shell; refuses those that the program would not get as they are."""
    why = "the results of a pod go to its volume"
    refuse_flag("--results_dir", arguments, why=why, flag="ARGUMENTS")
    for argument in arguments:
        if not argument.isprintable() or re.search(r"\$[$(]", argument):
            raise ConfigError(
                "YAML would change the line breaks of an argument, and the pod its $(NAME) and $$",
                value=argument,
                allowed="arguments of one printable line without $( and $$",
                flag="ARGUMENTS",
            )
    return shlex.join(arguments)


def _find_texts(value: Any) -> Iterator[str]:
    """Every text of a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _find_texts(part)


def _check_arguments(command: str) -> None:
    """Refuse arguments that the program would refuse in the cluster."""
    _, program, *words = shlex.split(command)
    settings = recipe if Path(program).name == "train.py" else config
    check(settings.parse_request(words, description="", epilog=""))
