"""How do flags become the manifest or the script of a job, checked before a cluster sees it?

python -m sdbench render eks | eks-elastic | trainjob | etcd | slurm
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.launch.child import split_command
from sdbench.launch.render import slurm
from sdbench.launch.render.manifest import find_faults
from sdbench.launch.render.pods import Pod, list_pods
from sdbench.launch.render.variables import (
    JOB_NAME,
    NAME_IN_TEMPLATE,
    VARIABLES,
    fill,
    find_values,
    names_in,
)
from sdbench.settings.config import parse_request

FOLDER = Path(__file__).resolve().parents[3] / "multi-node"
SLURM = "slurm"
# Where the pods mount the volume that collect-results.sh reads.
RESULTS_DIR = "/results"
ARGUMENTS = re.compile(r"^( *)args:\n(?:\1 .*\n)+", flags=re.MULTILINE)

EPILOG = """\
examples:
  python -m sdbench render eks --registry registry.example.com/ --tag 0.32.1 --num_nodes 64 \\
      --num_efa_per_node 32 --out job.yaml -- --use_synth_data --use_ema \\
      --device_train_microbatch_size 4
  python -m sdbench render eks-elastic --help
  python -m sdbench render slurm --num_nodes 4 --time 30 --out multi-node/job.sbatch -- \\
      --use_synth_data --device_train_microbatch_size 32
"""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Something that render makes.

    Attributes:
        template: Its file in multi-node/.
        meaning: What it is, for the help.
        file_name: How its file is called where the user has not said.
        commands: What to do with the file, one line each.
    """

    template: str
    meaning: str
    file_name: str
    commands: tuple[str, ...]


COLLECT = "multi-node/collect-results.sh {claim}"
KINDS: dict[str, Kind] = {
    "eks": Kind(
        "3.stable-diffusion-eks.yaml-template",
        "PyTorchJob of Kubeflow's training operator v1, by composer",
        f"{JOB_NAME}-eks.yaml",
        (
            "kubectl apply -f {file}",
            "kubectl get pods --watch",
            "kubectl logs -f {pod}",
            COLLECT,
            "kubectl delete -f {file}",
        ),
    ),
    "eks-elastic": Kind(
        "5.stable-diffusion-eks-elastic.yaml-template",
        "the same by torchrun, which starts the ranks again after a loss",
        f"{JOB_NAME}-eks-elastic.yaml",
        (
            "kubectl apply -f {file}",
            "kubectl get pods --watch",
            "kubectl logs -f {pod}",
            COLLECT,
            "kubectl delete -f {file}",
        ),
    ),
    "trainjob": Kind(
        "6.stable-diffusion-trainjob.yaml-template",
        "TrainJob of Kubeflow Trainer v2 with its runtime, by composer",
        f"{JOB_NAME}-trainjob.yaml",
        (
            "kubectl apply -f {file}",
            "kubectl get pods --watch",
            f"kubectl logs -f --tail=-1 -l jobset.sigs.k8s.io/jobset-name={JOB_NAME},"
            "batch.kubernetes.io/job-completion-index=0",
            COLLECT,
            "kubectl delete -f {file}",
        ),
    ),
    "etcd": Kind(
        "4.etcd.yaml",
        "the etcd where the pods of an elastic job can meet",
        "etcd.yaml",
        ("kubectl apply -f {file}", "kubectl rollout status deployment/etcd"),
    ),
    SLURM: Kind(
        "2.train.sbatch",
        "the sbatch script with its options, image and arguments",
        f"{JOB_NAME}.sbatch",
        ("sbatch --test-only {file}", "sbatch {file}", "squeue --me"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fill in a template and write it, or say what it would run.

    Args:
        argv: The kind and its flags, and behind ``--`` arguments of benchmark.py.

    Returns:
        The exit code.

    Raises:
        ConfigError: For a variable that is unset, unknown or wrong, and for a manifest that would
            not do what it says.
    """
    own, benchmark_arguments = split_command(sys.argv[1:] if argv is None else argv)
    flags = _parse(own)
    kind = KINDS[flags.kind]
    template = flags.template or FOLDER / kind.template
    given = {name: value for name, value in vars(flags).items() if _is_setting(name, value)}
    parse_request(benchmark_arguments, description="", epilog="")  # refuses what it does not know
    if flags.kind == SLURM:
        slurm.check_values(given)
        text = slurm.fill_script(_read(template), given, benchmark_arguments)
        description = _describe_script(text, given, benchmark_arguments)
        words = {}
    else:
        text, values = _render_manifest(template, given, benchmark_arguments)
        pods = list_pods(_parse_checked(text, template))
        description = _describe_pods(pods)
        words = {"pod": pods[0].name, "claim": values.get("RESULTS_CLAIM", "")}
    if flags.out is None and not flags.dry_run:
        print(text, end="")
        return 0
    file = flags.out or Path(kind.file_name)
    if flags.dry_run:
        print(description)
    else:
        _write(file, text)
        print(f"written: {file}")
    commands = [*_meeting_place(text), *kind.commands]
    print("next:")
    for command in commands:
        print(f"  {command.format(file=shlex.quote(str(file)), **words)}")
    return 0


def _is_setting(name: str, value: Any) -> bool:
    return value is not None and name not in ("kind", "template", "out", "dry_run")


def _render_manifest(
    template: Path, given: Mapping[str, str], arguments: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """The text of a manifest, and the values that it was filled with."""
    text = _read(template)
    values = find_values(names_in(text, path=template), given)
    filled = fill(text, values)
    if arguments:
        filled = _replace_arguments(filled, arguments, template)
    return filled, values


def _replace_arguments(text: str, arguments: Sequence[str], template: Path) -> str:
    if any(argument.split("=")[0] == "--results_dir" for argument in arguments):
        raise ConfigError(
            "the results of a pod go to its volume",
            value="--results_dir",
            allowed="arguments without it",
            flag="ARGUMENTS",
        )
    if len(ARGUMENTS.findall(text)) != 1:
        raise ConfigError(
            "the template has no one place for arguments of benchmark.py",
            value=" ".join(arguments),
            allowed="none, or a template with one list `args:`",
            flag=f"ARGUMENTS or the template {template}",
        )
    items = [*arguments, f"--results_dir={RESULTS_DIR}"]

    def write(found: re.Match[str]) -> str:
        indent = found[1]
        # JSON is YAML, and a text in it stays a text.
        return f"{indent}args:\n" + "".join(f"{indent}  - {json.dumps(item)}\n" for item in items)

    return ARGUMENTS.sub(write, text)


def _parse_checked(text: str, template: Path) -> list[dict[str, Any]]:
    """The documents of a manifest, without a fault.

    Raises:
        ConfigError: It is no YAML, or something is wrong with it.
    """
    import yaml

    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the manifest is no YAML ({' '.join(str(error).split())})",
            value=str(template),
            allowed="a template that gives YAML",
            flag="--template",
        ) from None
    for document in documents:
        if not isinstance(document, dict) or "kind" not in document:
            raise ConfigError(
                "this is no manifest",
                value=type(document).__name__,
                allowed="documents with a kind",
                flag=f"the template {template}",
            )
    faults = find_faults(documents)
    if faults:
        others = f" (and {len(faults) - 1} more)" if faults[1:] else ""
        raise ConfigError(
            f"{faults[0].place}: {faults[0].problem}{others}",
            value=faults[0].value,
            allowed=faults[0].allowed,
            flag=f"the template {template}",
        )
    return documents


def _describe_pods(pods: Sequence[Pod]) -> str:
    first = pods[0]
    size = f"{len(pods)} pod{'s' * (len(pods) > 1)}"
    if first.num_gpus:
        size += f" with {first.num_gpus} GPUs each, {len(pods) * first.num_gpus} ranks"
    variables = [f"{name}={value}" for name, value in first.environment.items()]
    variables += [f"{name}: {source}" for name, source in first.secrets.items()]
    variables += [
        f"{name}={value} (from the operator)" for name, value in first.from_operator.items()
    ]
    lines = [size, f"pod {first.name} runs:", f"  {shlex.join(first.command)}"]
    if variables:
        lines += ["with:", *(f"  {variable}" for variable in variables)]
    return "\n".join(lines)


def _describe_script(script: str, given: Mapping[str, str], arguments: Sequence[str]) -> str:
    options = slurm.read_options(script)
    gpus = options.get("gpus-per-node")
    variables = [
        f"{slurm.SETTINGS[name].target}={value}"
        for name, value in given.items()
        if slurm.SETTINGS[name].is_variable
    ]
    size = f"{gpus} GPUs each" if gpus else "the GPUs that Slurm gives"
    lines = [
        f"{options.get('nodes', 1)} nodes with {size}, a rank for each GPU",
        "each node runs:",
        f"  {shlex.join(['multi-node/start-ranks.sh', *arguments])}",
        "options of sbatch:",
        *(f"  --{option}={value}" for option, value in options.items()),
    ]
    if variables:
        lines += ["with:", *(f"  {variable}" for variable in variables)]
    return "\n".join(lines)


def _meeting_place(text: str) -> list[str]:
    """What has to be there before the job."""
    is_met_at_etcd = re.search(r"^ *rdzvHost: etcd$", text, flags=re.MULTILINE)
    return [f"kubectl apply -f {FOLDER.name}/{KINDS['etcd'].template}"] if is_met_at_etcd else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the template cannot be read ({error})",
            value=str(path),
            allowed="a readable text file",
            flag="--template",
        ) from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written ({error.strerror})",
            value=str(path),
            allowed="a file in a folder that is there",
            flag="--out",
        ) from None


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sdbench render",
        description="Fill in one of the templates of multi-node/ and check what comes out.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in KINDS.items():
        command = kinds.add_parser(
            name,
            help=kind.meaning,
            description=f"{kind.meaning[0].upper()}{kind.meaning[1:]}, from {kind.template}.",
            usage=f"python -m sdbench render {name} [-h] [FLAGS] [--out FILE] [--dry_run] "
            "[-- ARGUMENTS of benchmark.py]",
            allow_abbrev=False,
        )
        _add_settings(command, name)
        command.add_argument(
            "--template", type=Path, metavar="FILE", help="your copy instead of the suite's"
        )
        command.add_argument(
            "--out", type=Path, metavar="FILE", help="where it goes (default: standard output)"
        )
        command.add_argument(
            "--dry_run", action="store_true", help="say what it would run, and write nothing"
        )
    return parser.parse_args(argv)


def _add_settings(command: argparse.ArgumentParser, kind: str) -> None:
    if kind == SLURM:
        for setting in slurm.SETTINGS.values():
            help_text = f"{setting.meaning}: {setting.allowed}"
            command.add_argument(f"--{setting.name}", metavar="X", help=help_text)
        return
    in_template = set(NAME_IN_TEMPLATE.findall(_read(FOLDER / KINDS[kind].template)))
    for variable in VARIABLES.values():
        if variable.default is not None:
            default = f" (default: {variable.default})"
        else:
            default = " (default: follows)" if variable.follow else " (required)"
        help_text = f"{variable.meaning}: {variable.allowed}{default}"
        command.add_argument(
            variable.flag,
            dest=variable.name,
            metavar="X",
            help=help_text if variable.name in in_template else argparse.SUPPRESS,
        )
