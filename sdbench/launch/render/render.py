"""The command `python -m sdbench render`: flags into the manifest or the script of a job."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.launch.child import split_command
from sdbench.launch.render.faults import COUNT_KEYS, find_faults, walk
from sdbench.launch.render.variables import (
    JOB_NAME,
    SLURM_VARIABLES,
    VARIABLES,
    find_values,
    flag_of,
)
from sdbench.settings.config import parse_request

FOLDER = Path(__file__).resolve().parents[3] / "multi-node"
SLURM = "slurm"
# Where the pods mount the volume that collect-results.sh reads.
RESULTS_DIR = "/results"
ARGUMENTS = re.compile(r"^( *)args:\n(?:\1 .*\n)+", flags=re.MULTILINE)
# Behind this line a script reads its environment and has no more options of sbatch.
END_OF_HEAD = "set -euo pipefail\n"

EPILOG = """\
examples:
  python -m sdbench render eks --registry registry.example.com/ --tag 0.32.1 --num_nodes 64 \\
      --num_efa_per_node 32 --out job.yaml -- --use_synth_data --use_ema \\
      --device_train_microbatch_size 4
  python -m sdbench render eks-elastic --help
  python -m sdbench render slurm --num_nodes 4 --time 30 --out multi-node/job.sbatch -- \\
      --use_synth_data --device_train_microbatch_size 32
"""


class Kind(NamedTuple):
    """Something that render makes.

    Attributes:
        template: Its file in multi-node/.
        meaning: What it is, for the help.
        commands: What to do with the file, one line each.
    """

    template: str
    meaning: str
    commands: tuple[str, ...]


def _job_commands(pod: str) -> tuple[str, ...]:
    return (
        "kubectl apply -f {file}",
        "kubectl get pods --watch",
        f"kubectl logs -f {pod}",
        "multi-node/collect-results.sh {claim}",
        "kubectl delete -f {file}",
    )


KINDS: dict[str, Kind] = {
    "eks": Kind(
        "3.stable-diffusion-eks.yaml-template",
        "PyTorchJob of Kubeflow's training operator v1, by composer",
        _job_commands("{job}-master-0"),
    ),
    "eks-elastic": Kind(
        "5.stable-diffusion-eks-elastic.yaml-template",
        "the same by torchrun, which starts the ranks again after a loss",
        _job_commands("{job}-worker-0"),
    ),
    "trainjob": Kind(
        "6.stable-diffusion-trainjob.yaml-template",
        "TrainJob of Kubeflow Trainer v2 with its runtime, by composer",
        _job_commands(
            "--tail=-1 -l jobset.sigs.k8s.io/jobset-name={job},"
            "batch.kubernetes.io/job-completion-index=0"
        ),
    ),
    "etcd": Kind(
        "4.etcd.yaml",
        "the etcd where the pods of an elastic job can meet",
        ("kubectl apply -f {file}", "kubectl rollout status deployment/etcd"),
    ),
    SLURM: Kind(
        "2.train.sbatch",
        "the sbatch script with its options, image and arguments",
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
    parse_request(benchmark_arguments, description="", epilog="")  # refuses what it does not know
    table = SLURM_VARIABLES if flags.kind == SLURM else VARIABLES
    given = {name: getattr(flags, name) for name in table if getattr(flags, name) is not None}
    path = flags.template or FOLDER / kind.template
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the template cannot be read ({error})",
            value=str(path),
            allowed="a readable text file",
            flag="--template",
        ) from None
    if flags.kind == SLURM:
        text, words = fill_script(template, given, benchmark_arguments), {}
        # What a reader of the script needs is in its head.
        description = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
        description += text.split(END_OF_HEAD)[1].split("\n\n")[0].splitlines()
    else:
        text, documents, words = _render_manifest(template, given, benchmark_arguments, path)
        description = _describe(documents)
    if flags.out is None and not flags.dry_run:
        print(text, end="")
        return 0
    suffix = ".sbatch" if flags.kind == SLURM else ".yaml"
    file = flags.out or Path(f"{JOB_NAME}-{flags.kind}{suffix}")
    if flags.dry_run:
        print("\n".join(description))
    else:
        _write(file, text)
        print(f"written: {file}")
    print("next:")
    for command in (*_find_meeting_place(text), *kind.commands):
        print(f"  {command.format(file=shlex.quote(str(file)), **words)}")
    return 0


def _render_manifest(
    template: str, given: Mapping[str, str], arguments: Sequence[str], path: Path
) -> tuple[str, list[dict[str, Any]], dict[str, str]]:
    """The text of a manifest, its documents, and the words of the commands for it."""
    values = find_values(find_names(template, path=path), given)
    text = string.Template(template).substitute(values)
    if arguments:
        text = _replace_arguments(text, arguments, path)
    documents = _parse_checked(text, path)
    job = documents[-1].get("metadata", {}).get("name", JOB_NAME)
    return text, documents, {"job": job, "claim": values.get("RESULTS_CLAIM", "")}


def find_names(template: str, *, path: Path) -> set[str]:
    """The variables of a template, ``${NAME}`` each.

    Raises:
        ConfigError: It has one that the table does not know, or a dollar sign that begins none.
    """
    names = set()
    for found in string.Template.pattern.finditer(template):
        if found["braced"] not in VARIABLES:
            raise ConfigError(
                f"line {template.count(chr(10), 0, found.start()) + 1} of the template has a "
                "variable that render does not know",
                value=found[0],
                allowed=", ".join(f"${{{name}}}" for name in VARIABLES),
                flag=f"the template {path}",
            )
        names.add(found["braced"])
    return names


def _replace_arguments(text: str, arguments: Sequence[str], path: Path) -> str:
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
            flag=f"ARGUMENTS or the template {path}",
        )

    def write(found: re.Match[str]) -> str:
        # JSON is YAML, and a text in it stays a text.
        items = map(json.dumps, (*arguments, f"--results_dir={RESULTS_DIR}"))
        return "".join([f"{found[1]}args:\n", *(f"{found[1]}  - {item}\n" for item in items)])

    return ARGUMENTS.sub(write, text)


def _parse_checked(text: str, path: Path) -> list[dict[str, Any]]:
    """The documents of a manifest, without a fault.

    Raises:
        ConfigError: It is no YAML, or something is wrong with it.
    """
    import yaml

    flag = f"the template {path}"
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the manifest is no YAML ({' '.join(str(error).split())})",
            value=str(path),
            allowed="a template that gives YAML",
            flag=flag,
        ) from None
    if not documents or not all(isinstance(one, dict) and "kind" in one for one in documents):
        raise ConfigError(
            "this is no manifest", value=text[:40], allowed="documents with a kind", flag=flag
        )
    for fault in find_faults(documents, flag=flag):
        raise fault
    return documents


def _describe(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a manifest runs: how many, which command, with which variables and devices."""
    lines = []
    for document in documents:
        for place, value in walk(document, (str(document["kind"]),)):
            if place[-1] in COUNT_KEYS:
                lines.append(f"{'.'.join(place)}: {value}")
            elif place[-1] in ("command", "args"):
                lines.append(f"{place[-1]}: {shlex.join(value)}")
            elif place[-1] == "limits":
                lines += [f"limit: {name}={number}" for name, number in value.items()]
            elif place[-1] == "env":
                lines += [f"env: {one['name']}={one.get('value', '(secret)')}" for one in value]
    return list(dict.fromkeys(lines))  # the workers of a job repeat what its master runs


def _find_meeting_place(text: str) -> list[str]:
    """What has to be there before the job."""
    is_met_at_etcd = re.search(r"^ *rdzvHost: etcd$", text, flags=re.MULTILINE)
    return [f"kubectl apply -f {FOLDER.name}/{KINDS['etcd'].template}"] if is_met_at_etcd else []


def fill_script(script: str, values: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The script with options, settings and arguments of benchmark.py in it.

    Args:
        script: Text of 2.train.sbatch.
        values: Values that were given, by name in `SLURM_VARIABLES`.
        arguments: Arguments of benchmark.py, which come before those of the command line.

    Raises:
        ConfigError: A value is wrong, or the script has no head and body to put them into.
    """
    head, end, body = script.partition(END_OF_HEAD)
    if not end or "\n#SBATCH " not in head:
        raise ConfigError(
            "this is not the script that render knows",
            value=script.partition("\n")[0],
            allowed=f"lines that begin with #SBATCH, and behind them `{END_OF_HEAD.strip()}`",
            flag="--template",
        )
    settings = ""
    for name, value in values.items():
        SLURM_VARIABLES[name].check(value, flag=flag_of(name))
        if name.isupper():  # what is in the environment counts more
            settings += f"{name}=${{{name}:-{shlex.quote(value)}}}\n"
            continue
        line = f"#SBATCH --{name}={value}"
        head, num_replaced = re.subn(rf"^#SBATCH --{name}\b.*$", line, head, flags=re.MULTILINE)
        if not num_replaced:
            last = head.index("\n", head.rindex("\n#SBATCH ") + 1)
            head = f"{head[:last]}\n{line}{head[last:]}"
    if arguments:
        settings += f'set -- {shlex.join(arguments)} "$@"\n'
    return f"{head}{end}{settings}{body}"


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
        template = (FOLDER / kind.template).read_text(encoding="utf-8")
        for variable, one in (SLURM_VARIABLES if name == SLURM else VARIABLES).items():
            default = f" (default: {one.default})" if isinstance(one.default, str) else ""
            is_used = name == SLURM or f"${{{variable}}}" in template
            help_text = f"{one.meaning}: {one.allowed}{default}"
            command.add_argument(
                flag_of(variable),
                dest=variable,
                metavar="X",
                help=help_text if is_used else argparse.SUPPRESS,
            )
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
