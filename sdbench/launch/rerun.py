"""The command `python -m sdbench rerun`: repeats a run from its record alone.

A record may come from a stranger. Only its settings, its numbers of ranks and its variables of
speed reach the command: no program, no `pipe:` command, no path in a variable, no other variable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench import NUM_CPUS, data
from sdbench.base.errors import EXIT_OK, ConfigError
from sdbench.base.escape import for_terminal, without_controls
from sdbench.base.output import fit
from sdbench.data.command_output import PIPE
from sdbench.launch.child import check_suite_is_here, refuse_flag, run_in_terminal
from sdbench.launch.sweep_file import to_flags
from sdbench.measure.host import ask, open_nvml, read_cpu
from sdbench.models.architecture import resolve_architecture
from sdbench.ranks.launcher import COMPOSER, NO_LAUNCHER, TORCHRUN
from sdbench.record.provenance import (
    ENVIRONMENT_NAMES,
    ENVIRONMENT_PREFIXES,
    git_state,
    other_versions,
    package_versions,
    speed_environment,
)
from sdbench.record.store import BENCHMARK, FEED, SETTINGS_OF, TRAIN, kind_of
from sdbench.report.runs import read_record
from sdbench.settings.kinds import PATH, SWITCH
from sdbench.settings.ray import RAY
from sdbench.settings.request import parse
from sdbench.settings.setting import (
    GPU,
    REQUIRED,
    declarations,
    of_device,
    setting,
)

EPILOG = """\
examples:
  python -m sdbench rerun results/runs/RUN --dry_run
  python -m sdbench rerun runs/20261121T050000Z_2-core-cpu_tiny-64px-fast
  python -m sdbench rerun results/runs/RUN -- --remote my-mds

Before the run it prints what the record lacks, and what differs from the record here: the commit,
packages, the data set. Flags after -- replace settings of the record, such as the places of data
and weights, which a published record lacks. The exit code is that of the run; 2 bad input, 130
stopped.
"""

# The program that makes records of a kind.
PROGRAMS = {BENCHMARK: "benchmark.py", FEED: "data.py", TRAIN: "train.py"}
# A rerun begins anew: it has its own folder, no copies, no older run to go on with, no scheduler.
OF_THE_RUN = {"results_dir", "resume", "max_failures", "ray_storage_path", "stop_grace_s"}
# For a record without ranks: data.py is one process, unless Ray starts its trainers.
ONE_RANK = {"world_size": 1, "num_nodes": 1, "ranks_per_node": 1, "launcher": NO_LAUNCHER}
CHOOSES_GPUS = "CUDA_VISIBLE_DEVICES"
# Values that a record may give a variable: a number or a switch for any variable of speed, and a
# word for the variables below. Other values might name a library or a program that is then loaded.
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?|true|false|yes|no|on|off", re.IGNORECASE)
WORDS = re.compile(r"[A-Za-z0-9_^][A-Za-z0-9_^:;,.=+-]*")
TAKES_WORDS = {
    *("OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY"),
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_LIBRARY", "MKL_DYNAMIC", "ONEDNN_MAX_CPU_ISA"),
    *("DNNL_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_NET"),
    *("GLOO_SOCKET_IFNAME", "FI_PROVIDER", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("MALLOC_CONF", "GLIBC_TUNABLES", "TORCH_DISTRIBUTED_DEBUG"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerunFlags:
    """Flags of rerun."""

    record: Path = setting(
        PATH, REQUIRED, "folder of a run, or its record.json", is_positional=True
    )
    folder: Path | None = setting(
        PATH, None, "folder for the new run (default: runs/rerun_<name of the run>)"
    )
    dry_run: bool = setting(SWITCH, False, "print the command and stop")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a record's command once more; returns its exit code, 0 if it was only printed."""
    request = parse(
        RerunFlags,
        argv,
        prog="python -m sdbench rerun",
        description="Repeat the run of a record: launcher, ranks, settings, environment.",
        epilog=EPILOG,
        rest="FLAGS ...",
    )
    flags = request.config
    record = read_record(flags.record, flag="RECORD")
    folder = flags.folder or Path("runs", f"rerun_{record['run_id']}")
    command, config, unknown = _find_command(record, request.rest, folder=folder)
    data_here, gpu = _check_inputs(record, config), _check_gpus(record)
    variables, left_out = _environment(record, has_gpus=gpu is not None)
    lacking, differences = _compare(record, data_here, gpu=gpu)
    for heading, sentences in (
        ("The record does not say:", [*unknown, *lacking]),
        ("Here it is not as in the record:", [*differences, *left_out]),
    ):
        if sentences:
            lines = (fit(f"  {for_terminal(sentence)}", hanging=4) for sentence in sentences)
            print(heading, *lines, sep="\n", file=sys.stderr)
    words = ["env", *variables, *command] if variables else command
    print(without_controls(shlex.join(words)), flush=True)  # unchanged, to be copied
    if flags.dry_run:
        return EXIT_OK
    return run_in_terminal(command, folder=folder, variables=variables)


def _find_command(
    record: Mapping[str, Any], rest: Sequence[str], *, folder: Path
) -> tuple[list[str], Any, list[str]]:
    """The command of a record, its settings, and what the record does not say of it."""
    kind = kind_of(record)
    if kind not in PROGRAMS:
        raise ConfigError(
            "a record of this kind is not repeated",
            value=kind,
            allowed=" | ".join(PROGRAMS),
            flag="RECORD",
        )
    program, config_type = PROGRAMS[kind], SETTINGS_OF[kind]
    check_suite_is_here(program)
    refuse_flag("--results_dir", rest, why="the new run has its own folder", flag="--folder")
    given = parse(config_type, rest, description="", epilog="", prog=program)
    replaced = {name for name, origin in given.origin.items() if origin == "flag"}
    start, unknown = _find_launcher(record)
    kept, unknown_settings = _settings_to_give(record, config_type, without=replaced | OF_THE_RUN)
    if record["config"]["engine"] == RAY and "num_ray_workers" not in replaced:
        # A record of data.py has no ranks; its result tells how many there were.
        of_feed = (record["summary"] or {}).get("ray", {}).get("num_trainers")
        num_trainers = record["ranks"]["world_size"] if "ranks" in record else of_feed
        kept |= {} if num_trainers is None else {"num_ray_workers": num_trainers}
    revision = record.get("workload", {}).get("revision")
    if revision is not None and not replaced & {"model_name", "model_revision"}:
        kept["model_revision"] = revision
    arguments = [*to_flags(kept), *rest]
    config = parse(config_type, arguments, description="", epilog="", prog=program).config
    command = [*start, program, *arguments, "--results_dir", str(folder)]
    return command, config, [*unknown, *unknown_settings]


def _find_launcher(record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The words before the program, and a sentence if the record does not name the launcher."""
    ranks = record.get("ranks", ONE_RANK)
    num_ranks, launcher, unknown = ranks["world_size"], ranks["launcher"], []
    if record["config"]["engine"] == RAY:  # the program itself has Ray start them
        return ["python"], []
    if ranks["num_nodes"] > 1:
        raise ConfigError(
            f"the run had {num_ranks} ranks on several nodes, which their cluster has to start",
            value=f"{ranks['num_nodes']} nodes",
            allowed="a run on one node; for several: multi-node/README.md",
            flag="RECORD",
        )
    if launcher is None:
        launcher = COMPOSER if num_ranks > 1 else NO_LAUNCHER
        unknown = [f"what started its ranks ({num_ranks}): {launcher} is taken"]
    starts = {COMPOSER: "-n", TORCHRUN: "--nproc_per_node"}
    if launcher in starts:
        return [launcher, starts[launcher], str(num_ranks)], unknown
    return ["python"], unknown


def _settings_to_give(
    record: Mapping[str, Any], config_type: type, *, without: set[str]
) -> tuple[dict[str, Any], list[str]]:
    """The settings that the command line has to give, and a sentence on settings that are unknown.

    Settings that this version's default or preset gives by itself are left out.
    """
    recorded, declared = record["config"], declarations(config_type)
    on_gpu = record["machine"]["device_type"] == GPU
    preset = {"preset": recorded["preset"]} if "preset" in declared else {}
    own = parse(config_type, to_flags(preset), description="", epilog="").config
    kept, unknown = dict(preset), []
    for name, one in declared.items():
        if name in without or name in preset:
            continue
        value = recorded[name]
        if value == of_device(getattr(own, name), on_gpu=on_gpu):
            continue
        is_elsewhere = _is_left_out(value, declared)
        if name == "local" and is_elsewhere and recorded["remote"]:
            continue  # copies of the data go to the cache
        if value is None:
            unknown.append(name)
            continue
        if is_elsewhere or (name == "ray_address" and value != "auto"):
            raise ConfigError(
                f"a record does not say where {one.flag} is: places, commands and clusters are not "
                "left to it",
                value=value,
                allowed=f"its place, after --: -- {one.flag} PLACE{_tell_how_made(record)}",
                flag=one.flag,
            )
        kept[name] = value
    names = ", ".join(unknown)
    return kept, [f"settings, which have this version's values: {names}"] if unknown else []


def _is_left_out(value: Any, names: Mapping[str, Any]) -> bool:
    """Return True for a command, and for ``<flag>``, which `publish` writes for a path.

    A record keeps only the program of a ``pipe:`` command. Braces may expand to one as well.
    """
    from braceexpand import UnbalancedBracesError, braceexpand

    if not isinstance(value, str):
        return False
    places = [value]
    with contextlib.suppress(UnbalancedBracesError):  # a text, or refused by the program itself
        places += braceexpand(value)
    is_command = any(place.startswith(PIPE) for place in places)
    return is_command or any(f"<{name}>" in value for name in names)


def _check_gpus(record: Mapping[str, Any]) -> str | None:
    """The model of the first GPU here; refuses a machine with fewer GPUs than the run had."""
    nvml = open_nvml()
    num_gpus = 0 if nvml is None else ask(nvml, "nvmlDeviceGetCount") or 0
    needed = record.get("ranks", ONE_RANK)["ranks_per_node"]
    on_ray = record["config"]["engine"] == RAY  # its nodes may be others
    if record["machine"]["device_type"] == GPU and num_gpus < needed and not on_ray:
        raise ConfigError(
            f"the run had {needed} x {record['machine']['device_name']}, and this machine has too "
            "few GPUs",
            value=f"{num_gpus} GPUs",
            allowed=f"a machine with {needed} GPUs, with its driver and the package nvidia-ml-py",
            flag="RECORD",
        )
    first = ask(nvml, "nvmlDeviceGetHandleByIndex", 0) if num_gpus else None
    return None if first is None else ask(nvml, "nvmlDeviceGetName", first)


def _check_inputs(record: Mapping[str, Any], config: Any) -> dict[str, Any] | None:
    """The facts of the data set, as a record has them; refuses data or weights that are not here.

    A model of the hub is left to the run itself.
    """
    model, workload = getattr(config, "model_name", None), record.get("workload", {})
    what, how_made = "weights of the record are", ""
    try:
        if model is not None and workload.get("revision") is None:
            resolve_architecture(model, random_weights=config.random_weights)
        what, how_made = "data set of the record is", _tell_how_made(record)
        return data.describe_data(config)
    except ConfigError as error:
        raise ConfigError(
            f"the {what} not here ({error.what[:1].lower()}{error.what[1:]})",
            value=error.value,
            allowed=f"{error.allowed}; another place after --{how_made}",
            flag=error.flag,
        ) from None


def _tell_how_made(record: Mapping[str, Any]) -> str:
    """The end of a sentence: how the data set was made, if the record says so."""
    sentence = ""
    for facts in filter(None, (record["data"] or {}).get("made_by", ())):
        told = [f"{name} {value}" for name, value in facts.items() if name != "command" and value]
        sentence += f"; it was made by {facts['command']}: {', '.join(told)}"
    return sentence


def _environment(record: Mapping[str, Any], *, has_gpus: bool) -> tuple[list[str], list[str]]:
    """Assignments of the record's variables, and sentences on the variables that are left out."""
    here, on_gpu = speed_environment(), record["machine"]["device_type"] == GPU
    assigned, told = {}, []
    for name, value in record["environment"].items():
        changes_speed = name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES
        form = WORDS if name in TAKES_WORDS else NUMBER
        is_taken = form.fullmatch(value) and not (name == CHOOSES_GPUS and on_gpu)
        if changes_speed and (here.get(name) == value or is_taken):
            assigned[name] = value
        else:
            why = "it is the other machine's" if changes_speed else "it does not change speed"
            told.append(f"{name}={value} is not set: {why}")
    told += [
        f"{name}={here[name]} is set here and was not" for name in here if name not in assigned
    ]
    if has_gpus and not on_gpu:
        told.append(f"this machine has GPUs and the run had none: {CHOOSES_GPUS} hides them")
        assigned[CHOOSES_GPUS] = ""
    return [f"{name}={value}" for name, value in sorted(assigned.items())], told


def _compare(
    record: Mapping[str, Any], data_here: Mapping[str, Any] | None, *, gpu: str | None
) -> tuple[list[str], list[str]]:
    """Facts, other than settings, that the record lacks, and sentences on facts that differ."""
    machine, git, state = record["machine"], record["git"], git_state()
    data_then, workload = record["data"], record.get("workload", {})
    then = {
        "machine": f"{machine['num_cpu_cores']} cores of {machine['cpu_name']}",
        **record["versions"],
        **(record["other_versions"] or {}),
    }
    now = {
        "machine": f"{NUM_CPUS} cores of {read_cpu()[0]}",
        **package_versions(),
        **other_versions(),
    }
    if machine["device_type"] == GPU and gpu is not None:
        then["GPU"], now["GPU"] = machine["device_name"], gpu
    if git["commit"] is not None:
        then["commit"], now["commit"] = git["commit"], state["commit"]
    if data_then is not None and data_then["sha256"] != (data_here or {}).get("sha256"):
        then["data set"], now["data set"] = map(_describe_data, (data_then, data_here))
    names = {*then, *now} if record["other_versions"] is not None else then
    differences = [
        f"{name} {then.get(name)} -> {now.get(name)}"
        for name in sorted(names)
        if then.get(name) != now.get(name)
    ]
    if state["dirty"]:
        differences.append("this checkout has changes that are in no commit")
    lacks = {
        "a hash of its data set": data_here is not None and data_then is None,
        "a hash of its weights": workload.get("weights") == "loaded" and not workload["revision"],
        "the versions of its other packages": record["other_versions"] is None,
        "its commit": git["commit"] is None,
        "the uncommitted changes that it ran with": git["dirty"],
    }
    return [fact for fact, is_lacking in lacks.items() if is_lacking], differences


def _describe_data(facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return "synthetic"
    size = "" if facts["num_bytes"] is None else f", {facts['num_bytes']} bytes"
    return f"{facts['num_files']} files{size}, sha256 {facts['sha256'][:12]}"
