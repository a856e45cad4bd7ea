"""The command `python -m sdbench render`: fills in the manifest of a job and checks it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.launch.child import refuse_flag
from sdbench.launch.render.faults import COUNT_KEYS, find_faults, walk
from sdbench.launch.render.variables import COMPUTED, JOB_NAME, VARIABLES, find_values, flag_of
from sdbench.settings import config, recipe
from sdbench.settings.kinds import PATH, SWITCH, TEXT
from sdbench.settings.request import Request, choose_command, parse
from sdbench.settings.setting import setting

FOLDER = Path(__file__).resolve().parents[3] / "multi-node"
# Where the pods mount the volume that collect-results.sh reads.
RESULTS_DIR = "/results"
ARGUMENTS = re.compile(r"^( *)args:\n(?:\1 .*\n)+", flags=re.MULTILINE)
# The arguments of a RayJob are part of a shell command, after this one.
ENTRYPOINT_ARGUMENTS = re.compile(
    rf"^( *)--results_dir={RESULTS_DIR}\n(?:\1\S.*\n)*", flags=re.MULTILINE
)
PARSERS = {"benchmark.py": config.parse_request, "train.py": recipe.parse_request}

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


class Kind(NamedTuple):
    """A manifest: its template in multi-node/, its help, and the commands that use it."""

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
    "rayjob": Kind(
        "7.stable-diffusion-rayjob.yaml-template",
        "RayJob of KubeRay: a Ray cluster of pods that train and pods that encode",
        _job_commands("job/{job}"),
    ),
    "etcd": Kind(
        "4.etcd.yaml",
        "the etcd where the pods of an elastic job can meet",
        ("kubectl apply -f {file}", "kubectl rollout status deployment/etcd"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fill in a template and write it, or say what it would run; returns the exit code.

    Raises:
        ConfigError: A variable is unset, unknown or wrong, or the manifest has a fault.
    """
    name, request = _parse(argv)
    kind, flags, arguments = KINDS[name], request.config, request.rest
    given = {variable: getattr(flags, _field_of(variable)) for variable in VARIABLES}
    given = {variable: value for variable, value in given.items() if value is not None}
    path = flags.template or FOLDER / kind.template
    template = _read(path)
    values = find_values(find_names(template, path=path), given)
    text = string.Template(template).substitute(values)
    if arguments:
        text = _replace_arguments(text, arguments, path)
    documents = _parse_checked(text, path)
    _check_arguments(documents, arguments, path)
    if flags.out is None and not flags.dry_run:
        print(text, end="")
        return 0
    file = flags.out or Path(f"{JOB_NAME}-{name}.yaml")
    if flags.dry_run:
        print("\n".join(_describe(documents)))
    else:
        _write(file, text)
        print(f"written: {file}")
    print("next:")
    if values.get("RDZV_HOST") == "etcd":
        print(f"  kubectl apply -f {FOLDER.name}/{KINDS['etcd'].template}")
    job = documents[-1].get("metadata", {}).get("name", JOB_NAME)
    claim = values.get("RESULTS_CLAIM")
    for command in kind.commands:
        print(f"  {command.format(file=shlex.quote(str(file)), job=job, claim=claim)}")
    return 0


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


def find_names(template: str, *, path: Path) -> set[str]:
    """The variables of a template, ``${NAME}`` each; refuses any other dollar sign."""
    known = (*VARIABLES, *COMPUTED)
    names = set()
    for found in string.Template.pattern.finditer(template):
        if found["braced"] not in known:
            raise ConfigError(
                f"line {template.count(chr(10), 0, found.start()) + 1} of the template has a "
                "variable that render does not know",
                value=found[0],
                allowed=", ".join(f"${{{name}}}" for name in known),
                flag=f"the template {path}",
            )
        names.add(found["braced"])
    return names


def _replace_arguments(text: str, arguments: Sequence[str], path: Path) -> str:
    why = "the results of a pod go to its volume"
    refuse_flag("--results_dir", arguments, why=why, flag="ARGUMENTS")
    if len(ARGUMENTS.findall(text)) + len(ENTRYPOINT_ARGUMENTS.findall(text)) != 1:
        raise ConfigError(
            "the template does not have exactly one place for arguments of a program",
            value=" ".join(arguments),
            allowed="no arguments, or a template with one list `args:` or one entrypoint with "
            f"--results_dir={RESULTS_DIR}",
            flag=f"ARGUMENTS or the template {path}",
        )

    def write_list(found: re.Match[str]) -> str:
        # JSON is YAML, and a text in it stays a text.
        items = map(json.dumps, (*arguments, f"--results_dir={RESULTS_DIR}"))
        return "".join([f"{found[1]}args:\n", *(f"{found[1]}  - {item}\n" for item in items)])

    def write_line(found: re.Match[str]) -> str:
        for argument in arguments:
            if len(argument.splitlines()) > 1:  # YAML would make a space of it
                raise ConfigError(
                    "an argument has a line break",
                    value=argument,
                    allowed="arguments of one line each",
                    flag="ARGUMENTS",
                )
        words = (f"--results_dir={RESULTS_DIR}", *map(shlex.quote, arguments))
        return "".join(f"{found[1]}{word}\n" for word in words)

    return ENTRYPOINT_ARGUMENTS.sub(write_line, ARGUMENTS.sub(write_list, text))


def _check_arguments(
    documents: Sequence[Mapping[str, Any]], arguments: Sequence[str], path: Path
) -> None:
    """Refuse arguments that the program would refuse in the cluster."""
    commands = [("benchmark.py", list(arguments))]
    entrypoints = [one["spec"]["entrypoint"] for one in documents if one["kind"] == "RayJob"]
    if entrypoints:  # they hold the arguments
        lines = [shlex.split(entrypoint) for entrypoint in entrypoints]
        commands = [(Path(words[1]).name, words[2:]) for words in lines if words[1:]]
    for program, words in commands:
        if program not in PARSERS:
            raise ConfigError(
                "the entrypoint runs no program of the suite",
                value=program,
                allowed=" or ".join(f"python {known}" for known in PARSERS),
                flag=f"the template {path}",
            )
        PARSERS[program](words, description="", epilog="")


def _parse_checked(text: str, path: Path) -> list[dict[str, Any]]:
    """The documents of a manifest; refuses a manifest with a fault."""
    import yaml

    flag = f"the template {path}"
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the manifest is not YAML ({' '.join(str(error).split())})",
            value=str(path),
            allowed="a template that gives YAML",
            flag=flag,
        ) from None
    if not documents or not all(isinstance(one, dict) and "kind" in one for one in documents):
        raise ConfigError(
            "this is not a manifest", value=text[:40], allowed="documents with a kind", flag=flag
        )
    for fault in find_faults(documents, flag=flag):
        raise fault
    return documents


def _describe(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines on what a manifest runs: numbers, commands, variables and devices."""
    lines = []
    for document in documents:
        for place, value in walk(document, (str(document["kind"]),)):
            if place[-1] in COUNT_KEYS:
                lines.append(f"{'.'.join(place)}: {value}")
            elif place[-1] in ("command", "args"):
                lines.append(f"{place[-1]}: {shlex.join(value)}")
            elif place[-1] == "entrypoint":
                lines.append(f"entrypoint: {value}")
            elif place[-1] == "limits":
                lines += [f"limit: {name}={number}" for name, number in value.items()]
            elif place[-1] == "env":
                lines += [f"env: {one['name']}={one.get('value', '(secret)')}" for one in value]
    return list(dict.fromkeys(lines))  # the workers of a job repeat what its master runs


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written ({error.strerror})",
            value=str(path),
            allowed="a file in an existing folder",
            flag="--out",
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Flags of every kind; each variable adds one."""

    template: Path | None = setting(PATH, None, "your copy instead of the suite's")
    out: Path | None = setting(PATH, None, "where it goes (default: standard output)")
    dry_run: bool = setting(SWITCH, False, "say what it would run, and write nothing")


def _parse(argv: Sequence[str] | None) -> tuple[str, Request[OutputFlags]]:
    """The name of a kind, and its flags with one for each variable."""
    name, rest = choose_command(
        {name: kind.meaning for name, kind in KINDS.items()},
        argv,
        prog="python -m sdbench render",
        description="Fill in a manifest of multi-node/ and check what comes out.",
        epilog=EPILOG,
    )
    kind = KINDS[name]
    template = (FOLDER / kind.template).read_text(encoding="utf-8")
    fields = []
    for variable, one in VARIABLES.items():
        default = f" (default: {one.default})" if isinstance(one.default, str) else ""
        # A copy of the template may use the others.
        is_used = f"${{{variable}}}" in template
        help_text = f"{one.meaning}: {one.allowed}{default}" if is_used else ""
        fields.append((_field_of(variable), str | None, setting(TEXT, None, help_text)))
    flags_type = dataclasses.make_dataclass(
        "Flags", fields, bases=(OutputFlags,), frozen=True, kw_only=True
    )
    request = parse(
        flags_type,
        rest,
        prog=f"python -m sdbench render {name}",
        description=f"{kind.meaning[0].upper()}{kind.meaning[1:]}, from {kind.template}.",
        epilog="",
        rest="ARGUMENTS of the program",
    )
    return name, request


def _field_of(variable: str) -> str:
    return flag_of(variable).removeprefix("--")
